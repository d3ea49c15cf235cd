"""Checkpoints in other formats than that of `transformers`: GGUF files as models and tokenizers."""
