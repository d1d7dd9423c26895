"""The command line: one command per verb; see `lmwright.cli.main`."""
