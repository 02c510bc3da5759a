"""Where vLLM keeps quantization; import layers from :mod:`opweave.layers`."""
