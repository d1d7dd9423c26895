"""Start of the command `lmwright`, also as `python -m lmwright`."""

import sys


def main() -> int:
    """Runs the command; returns its exit code."""
    try:
        from lmwright.cli.main import main
    except KeyboardInterrupt:  # while Python reads the modules
        print("lmwright: interrupted", file=sys.stderr)
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(main())
