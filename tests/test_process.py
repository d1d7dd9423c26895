"""The process of a command: it ends with its parent, and early interrupts are quiet."""

import os
import subprocess
import sys
import time

import psutil
import pytest


def test_the_age_of_a_process_is_told_to_the_part_of_a_second(monkeypatch):
    """A session that seems to begin before its job is not counted to it. The time of day of the
    machine's start, by which psutil reckons, has no parts of a second."""
    from lmwright.guard.processes import age_s

    at = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: at(process) - 0.9)
    before = time.time()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    after = time.time()
    time.sleep(0.2)
    began = time.time() - age_s(child.pid)
    child.communicate()
    assert before - 0.05 <= began <= after + 0.05
    assert age_s(child.pid) == 0


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


@pytest.mark.parametrize("kind", ["ImportError", "SystemError"])
@pytest.mark.parametrize("module", ["lmwright.cli.main", "lmwright.cli.quickstart"])
@pytest.mark.parametrize("pressed", [True, False])
def test_ctrl_c_while_a_library_in_c_is_imported(kind, module, pressed):
    """It shows what Python raised, and raises an error of its own, which does not name it."""
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name != {module!r}:\n            return\n"
        "        try:\n"
        f"            {pressed} and signal.raise_signal(signal.SIGINT)\n"
        "        except KeyboardInterrupt as error:\n"
        "            if sys.excepthook is not sys.__excepthook__:\n"
        "                sys.excepthook(type(error), error, error.__traceback__)\n"
        f"        error = {kind}('while initializing the extension')\n"
        "        error.__suppress_context__, error.__context__ = True, None\n"
        "        raise error\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from lmwright.__main__ import main\n"
        "sys.argv[1:] = ['quickstart']\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ("Traceback" in done.stderr) != pressed
    assert ("lmwright: interrupted" in done.stderr) == pressed
    assert done.returncode == (130 if pressed else 1)


def test_ctrl_c_waits_until_a_library_in_c_is_loaded():
    """In the midst of it, jaxlib crashes."""
    code = (
        "import signal, sys, time\n"
        "from importlib.machinery import ExtensionFileLoader\n"
        "from lmwright.cli.interrupt import note_interrupts\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "note_interrupts()\n"
        "class Spec:\n"
        "    origin = '/none.so'\n"
        "    @property\n"
        "    def name(self):\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "        time.sleep(0.1)\n"
        "        print('loaded', flush=True)\n"
        "        return 'none'\n"
        "try:\n"
        "    try:\n"
        "        ExtensionFileLoader('none', '/none.so').create_module(Spec())\n"
        "    except ImportError:\n"
        "        time.sleep(10)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.replace("loaded\n", "") == "interrupted\n" and done.stderr == ""
    assert done.stdout.startswith("loaded\n")
