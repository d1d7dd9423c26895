"""Run files: what a run may say, how it is read, checked and written back."""
