"""Tokens: tokenizers, and text to ids."""
