"""What libraries say of a failure goes to a file; the terminal gets the sentence of the run."""

import logging
import subprocess
import sys
import textwrap

from lmwright.train.log import errors_to_file

FAILS = """
    import atexit, os, sys
    from pathlib import Path
    from lmwright.train.log import errors_to_file

    atexit.register(lambda: os.write(2, b"a write of the failed save has ended"))
    try:
        with errors_to_file(Path(".")):
            raise ValueError
    except ValueError:
        print("the sentence", file=sys.stderr)
"""


def test_what_ends_after_a_failed_save_is_not_shown():
    words = [sys.executable, "-c", textwrap.dedent(FAILS)]
    assert subprocess.run(words, capture_output=True, text=True).stderr == "the sentence\n"


def test_a_log_that_cannot_be_opened_stops_nothing(tmp_path):
    with errors_to_file(tmp_path / "not" / "there"):
        logging.getLogger("absl").error("a thread tells its error")
    assert not list(tmp_path.iterdir())
