"""Rows: tokens packed into rows, ordered, and read in training."""
