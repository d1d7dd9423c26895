"""Hugging Face's names of each family: tensors and fields, both ways."""
