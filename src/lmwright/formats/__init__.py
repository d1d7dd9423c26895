"""Formats: Hugging Face, PEFT and GGUF files, in and out, with proof."""
