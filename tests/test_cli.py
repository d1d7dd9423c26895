"""The command line: help that is quick and complete, exit codes, one line for bad input."""

import errno
import json
import os
import re
import shlex
import subprocess
import sys

import click
import pytest

from lmwright import __version__
from lmwright.cli import main as cli
from lmwright.cli import runs
from lmwright.cli.main import main
from lmwright.cli.output import BrokenPipe
from lmwright.errors import UserError
from lmwright.formats.open import load_run
from lmwright.guard.unread import EXIT_UNREAD
from lmwright.hardware import environment

RUN_FILE = """\
recipe = "quickstart"
name = "tiny"
dir = "runs/tiny"
[data]
dir = "data"
"""


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    return str(path)


def walk(group=cli.lmwright, path=()):
    """(words, command) of every command that does something."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from walk(command, (*path, name))
        else:
            yield (*path, name), command


VERBS = dict(walk())


def test_help_shows_the_verbs_in_the_order_of_use(capsys):
    assert main(["--help"]) == 0
    shown = re.findall(r"^  (\w+)  ", capsys.readouterr().out, re.M)
    verbs = "quickstart init prepare data tokenizer config models params doctor plan train sweep"
    assert shown == [
        *verbs.split(),
        "launch",
        "jobs",
        "cloud",
        "eval",
        "generate",
        "chat",
        "predict",
        "embed",
        "export",
        "quantize",
        "import",
        "verify",
        "vocab",
        "grow",
        "adapters",
        "publish",
        "report",
    ]
    assert main([]) == 0
    assert "Commands:" in capsys.readouterr().out


def test_no_summary_is_cut_off(capsys):
    for words in ([], ["data"], ["tokenizer"], ["config"], ["jobs"], ["cloud"]):
        main([*words, "--help"])
        assert not re.search(r"[^\]]\.\.\.$", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_each_verb_has_an_example_that_parses(words, capsys):
    """The example's words go through the verb's own parser."""
    assert main([*words, "--help"]) == 0
    text = capsys.readouterr().out
    examples = re.findall(r"^ +(?:Example:)? +(lmwright .*)$", text, re.M)
    assert examples
    for example in examples:
        given = shlex.split(example.split(" > ")[0])[1:]
        assert tuple(given[: len(words)]) == words
        VERBS[words].make_context("x", given[len(words) :])


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lmwright {__version__}\n"


def test_config_show_prints_a_run_file(run_file, capsys, tmp_path):
    assert main(["config", "show", run_file, "train.steps=55"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^steps = 55 +# command line$", text, re.M)
    again = tmp_path / "again.toml"
    again.write_text(text)
    assert load_run(again) == load_run(run_file, ["train.steps=55"])


def test_config_schema_is_json(capsys):
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["train"]


def test_config_presets_names_them_all(capsys):
    assert main(["config", "presets"]) == 0
    text = capsys.readouterr().out
    for name in ("quickstart", "pretrain", "llama-500k", "kisoku-3b", "llama-70b"):
        assert f"  {name} " in text


@pytest.mark.parametrize(
    "argv",
    [
        ["config", "show", "RUN", "train.stpes=3"],
        ["config", "show", "no-such-file.toml"],
        ["config", "show"],
        ["trian", "RUN"],
        ["train", "RUN", "--train.steps=3"],
        ["generate", "somewhere"],
        ["generate", "somewhere", "--prompt", "x", "--top-p", "2"],
        ["generate", "somewhere", "--prompt", "caf\udce9"],  # a byte of Latin 1
        ["prepare", "RUN", "--stage", "tokens"],
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, run_file, capsys):
    assert main([run_file if word == "RUN" else word for word in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"lmwright: error: [^\n]+\n", err)


def test_a_field_given_with_dashes_says_how_it_is_written(run_file, capsys):
    main(["train", run_file, "--train.steps=3"])
    assert "without dashes" in capsys.readouterr().err


@pytest.fixture
def verb(monkeypatch):
    """Lets `lmwright train` end in the given way."""

    def ends(with_):
        def body(*_args, **_kwargs):
            if isinstance(with_, BaseException):
                raise with_
            return with_

        monkeypatch.setattr(runs, "load", body)
        for check in ("data.missing.prepare_missing", "train.prepared.refuse_missing"):
            monkeypatch.setattr(f"lmwright.{check}", lambda _run: False)
        monkeypatch.setattr(
            sys.modules["lmwright.train.command"], "train_command", lambda run, **_: run
        )

    pytest.importorskip("lmwright.train.command")
    return ends


@pytest.mark.parametrize(
    ("with_", "code", "err"),
    [
        (0, 0, ""),
        (130, 130, ""),
        (42, 42, ""),
        (None, 0, ""),
        (True, 0, ""),  # something that is no exit code
        (UserError("run.toml:3: bad"), 2, "lmwright: error: run.toml:3: bad\n"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left", "a/b"), 2, "error: a/b: the disk is full"),
        (OSError(errno.EISDIR, "", ".b.tmp", None, "b"), 2, "error: b: a folder lies in the place"),
        (OSError(errno.EFBIG, "File too large", "a"), 2, "error: a: the file is larger than its"),
        (OSError(errno.EROFS, "Read-only", "a/b"), 2, "error: a/b: the file system is read-only"),
        (PermissionError(errno.EACCES, "denied", "a/b"), 2, "error: a/b: no permission"),
    ],
)
def test_how_a_verb_ends_is_the_exit_code(verb, capsys, with_, code, err):
    verb(with_)
    assert main(["train", "run.toml"]) == code
    found = capsys.readouterr().err
    assert err in found if err else found == ""


@pytest.mark.parametrize("error", [ValueError("ours"), OSError(errno.EIO, "broken")])
def test_our_own_mistakes_keep_their_traceback(verb, error):
    verb(error)
    with pytest.raises(type(error)):
        main(["train", "run.toml"])


def start(*argv, **more):
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, **more)


def test_help_imports_nothing_heavy():
    """What keeps `lmwright --help` quick."""
    code = (
        "import sys\nfrom lmwright.cli.main import main\n"
        "main(['--help'])\nmain(['train', '--help'])\n"
        "heavy = {'jax', 'numpy', 'torch', 'pydantic', 'rich', 'tomli_w', 'lmwright.config.run'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = start(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


def test_the_installed_command_ends_with_the_exit_code(run_file):
    done = start(sys.executable, "-m", "lmwright", "config", "show", run_file, "train.stpes=3")
    assert done.returncode == 2
    assert done.stderr.startswith("lmwright: error: command line: train.stpes")
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_early_is_no_error(run_file):
    command = f"{sys.executable} -m lmwright config schema | head -c 10"
    done = start("bash", "-o", "pipefail", "-c", command)
    assert (done.returncode in (0, EXIT_UNREAD), done.stderr) == (True, "")


@pytest.mark.parametrize("how", ["print", "rich.print"])
def test_a_reader_that_leaves_before_the_end_is_no_answer(how):
    """Exit code 1 would say that a plan does not fit, or that models differ."""
    code = (
        "import sys, rich\nfrom lmwright.cli import main\n"
        "@main.lmwright.command()\n"
        f"def much(): [{how}('x' * 100) for _ in range(9999)]\n"
        "sys.exit(main.main(['much']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        child.stdout.close()
        assert (child.stderr.read(), child.wait(60)) == (b"", EXIT_UNREAD)


def test_an_output_without_a_character_shows_it_as_json(tmp_path):
    name = tmp_path / "\u0142\U0001f408.toml"
    name.write_text(RUN_FILE.replace("tiny", "\u0142\U0001f408"))
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = start(sys.executable, "-m", "lmwright", "config", "show", str(name), env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert 'name = "\\u0142\\ud83d\\udc08"' in done.stdout


@pytest.mark.parametrize(
    "closed",
    [">&-", *(pytest.param(more, marks=pytest.mark.slow) for more in ("2>&-", ">&- 2>&-"))],
)
def test_an_output_that_is_closed_is_no_error(run_file, closed):
    command = f"{sys.executable} -m lmwright config show {run_file}"
    assert start("bash", "-c", f"{command} {closed}").returncode == 0
    assert start("bash", "-c", f"{command} a=1 {closed}").returncode == 2


def test_another_pipe_that_breaks_is_not_hidden(verb):
    verb(BrokenPipeError(errno.EPIPE, "of a socket"))
    with pytest.raises(BrokenPipe):
        main(["train", "run.toml"])


@pytest.mark.parametrize("name", environment.ENVIRONMENT)
def test_the_users_environment_has_the_last_word(monkeypatch, capsys, name):
    monkeypatch.delenv(name, raising=False)
    main(["--version"])
    assert os.environ[name] == environment.ENVIRONMENT[name]
    monkeypatch.setenv(name, "0")
    main(["--version"])
    assert os.environ[name] == "0"


COMPILED = "JAX_COMPILATION_CACHE_DIR"


@pytest.mark.parametrize("harm", ["none", "open", "open parent", "link", "linked parent", "world"])
def test_compiled_programs_are_kept_only_where_nobody_else_may_write(tmp_path, harm):
    cache = tmp_path / "cache"
    folder = cache / "lmwright" / "compiled"
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "compiled").mkdir(parents=True, mode=0o700)
    if harm != "none":
        folder.mkdir(parents=True)
    for each, mode in ((folder, 0o777), (folder.parent, 0o775), (cache, 0o777)):
        if harm == {folder: "open", folder.parent: "open parent", cache: "world"}[each]:
            each.chmod(mode)
    if harm == "link":
        folder.rmdir()
        folder.symlink_to(elsewhere)
    elif harm == "linked parent":
        folder.rmdir()
        folder.parent.rmdir()
        folder.parent.symlink_to(elsewhere)
    told = (
        "import os, lmwright.cli.main as c; c.main(['--version']); "
        f"print(os.environ.get('{COMPILED}'))"
    )
    variables = {name: value for name, value in os.environ.items() if name != COMPILED}
    done = subprocess.run(
        [sys.executable, "-c", told],
        env=variables | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    taken = done.stdout.splitlines()[-1]
    if harm == "none":
        assert taken == str(folder) and not done.stderr
        assert {p.stat().st_mode & 0o777 for p in (folder, folder.parent)} == {0o700}
    else:
        assert taken == "None" and "compiled programs are not cached" in done.stderr


def test_a_compiled_program_that_was_cut_off_is_written_anew(tmp_path):
    """JAX alone would leave it, and warn of it in every command."""
    script = tmp_path / "script.py"
    script.write_text("""
import pathlib, lmwright.cli.main as c
c.main(["--version"])
import jax
def known(x): return x * 2 + 1
for cut in (True, False, False):
    jax.clear_caches()
    assert jax.jit(known)(1) == 3
    [path] = pathlib.Path(jax.config.jax_compilation_cache_dir).glob("jit_known-*-cache")
    size = path.stat().st_size
    if cut: path.write_bytes(path.read_bytes()[:99])
print(size)
""")
    least = {
        f"JAX_PERSISTENT_CACHE_MIN_{name}": "0" for name in ("COMPILE_TIME_SECS", "ENTRY_SIZE")
    }
    variables = {name: value for name, value in os.environ.items() if name != COMPILED} | least
    variables |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script)], env=variables, capture_output=True, text=True
    )
    assert int(done.stdout.splitlines()[-1]) > 99
    assert done.stderr.count("Error reading persistent compilation cache") == 1


@pytest.mark.parametrize("there", [False, True])
def test_a_tpu_compiler_without_a_tpu_is_not_asked_for_one(monkeypatch, tmp_path, there):
    (tmp_path / "accel0").touch()
    monkeypatch.setattr(environment, "find_spec", lambda name: object())
    monkeypatch.setattr(
        environment, "ACCELERATORS", (str(tmp_path / ("accel*" if there else "none*")),)
    )
    monkeypatch.delenv("JAX_PLATFORMS")
    environment.set_environment()
    assert os.environ.get("JAX_PLATFORMS") == (None if there else "cpu")
