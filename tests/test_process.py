"""The process of a command: it ends with its parent, and early interrupts are quiet."""

import os
import subprocess
import sys


def test_a_process_ends_with_its_parent():
    """Killed, which leaves it no time to tell."""
    child = (
        "import time, signal; from lmwright.guard.parent import end_with_parent; "
        "end_with_parent(); "
        "signal.signal(signal.SIGTERM, lambda *_: print('saved', flush=True) or exit()); "
        "print('there', flush=True); time.sleep(60)"
    )
    parent = (
        "import subprocess, sys, time; from lmwright.guard.parent import with_parent; "
        f"subprocess.Popen([sys.executable, '-c', {child!r}], env=with_parent()); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", parent],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout.readline() == "there\n"
    process.kill()
    assert process.stdout.readline() == "saved\n"
    process.wait()


def test_ctrl_c_while_modules_are_read():
    code = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'lmwright.cli.main':\n            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from lmwright.__main__ import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr == "lmwright: interrupted\n"
