"""Start of the command `lmwright`, also as `python -m lmwright`."""

import gc
import os
import sys

STOPPED = (130, 42)  # by Ctrl-C, or by SIGTERM


def main() -> int:
    """Runs the command; returns its exit code, or ends the process with it."""
    # imports and traces make many small objects, which at Python's thresholds are walked again
    # and again
    gc.set_threshold(20_000, 20, 20)
    try:
        from lmwright.cli.interrupt import note_interrupts, was_interrupted
    except KeyboardInterrupt:  # while Python reads the modules
        return _interrupted()
    note_interrupts()
    try:
        from lmwright.cli.main import main
    except (ImportError, KeyboardInterrupt, SystemError) as error:
        if not was_interrupted(error):
            raise
        return _interrupted()
    try:
        code = main()
    except SystemExit as error:  # a stop before the first step
        if error.code not in STOPPED:
            raise
        code = int(error.code or 0)
    if code in STOPPED and not sys.modules.keys().isdisjoint(("jax", "jaxlib")):
        # a thread of JAX may still be compiling, from which Python would take JAX's objects away
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _interrupted() -> int:
    print("lmwright: interrupted", file=sys.stderr)
    return 130


if __name__ == "__main__":
    sys.exit(main())
