"""Run files: their fields, how they are loaded, checked and written back."""
