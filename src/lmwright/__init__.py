"""lmwright: plan, train and ship language models on TPUs, laptops and GPUs.

Importing the package is cheap and pulls in neither jax nor torch; every verb of the
command line is one function in one named module (see `lmwright.cli.main`).
"""

__version__ = "0.2.0"
