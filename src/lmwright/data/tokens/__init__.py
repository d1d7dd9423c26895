"""Tokens: tokenizers, and the encoding of text."""
