"""Checkpoints: folders in Hugging Face layout, their configuration, weights and tokenizers; GGUF files."""
