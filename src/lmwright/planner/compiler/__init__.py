"""Compiler: the train step compiled for a TPU, and its program read."""
