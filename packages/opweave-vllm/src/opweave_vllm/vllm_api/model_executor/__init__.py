"""Where vLLM keeps ``custom_op``."""
