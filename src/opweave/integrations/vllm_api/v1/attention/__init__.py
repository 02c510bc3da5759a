"""Where vLLM keeps attention."""
