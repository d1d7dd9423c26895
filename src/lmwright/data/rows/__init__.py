"""Rows: ids packed, ordered, and read in training."""
