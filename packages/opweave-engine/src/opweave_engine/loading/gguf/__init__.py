"""GGUF files: configuration, tokenizer, chat template and weights of a model in one file."""
