"""Start of the command `lmwright`, also as `python -m lmwright`."""

import gc
import sys


def main() -> int:
    """Runs the command; returns its exit code."""
    # imports and traces make many small objects, which at Python's thresholds are walked again
    # and again
    gc.set_threshold(20_000, 20, 20)
    try:
        from lmwright.cli.main import main
    except KeyboardInterrupt:  # while Python reads the modules
        print("lmwright: interrupted", file=sys.stderr)
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(main())
