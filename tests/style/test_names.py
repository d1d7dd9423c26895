"""No text names a distribution that is not ours, and the project goes by one name."""

import re
import tomllib
from functools import cache

from tests.style.sources import ROOT, check, lines_of, name_of, python_files, text_files

# Where the name of before must stand: what it has written is still read.
EARLIER = {
    "CHANGELOG.md",
    "src/lmwright/formats/adapter_note.py",
    "src/lmwright/report/summary.py",
    "tests/earlier/test_earlier.py",
    "tests/style/test_names.py",
}
THIS_FILE = ROOT / "tests/style/test_names.py"
LOCKS = ("run.lock", "test.lock", "torch.txt", "models.txt")
TOOLS = {"uv", "libtpu"}
INSTALL = re.compile(r"(?:pip|uv pip|pipx|uv tool) (?:install|download)\s+([^`\n#;()]+)")


@cache
def known_names():
    lines = [line for lock in LOCKS for line in (ROOT / "requirements" / lock).open()]
    names = {m[1].lower() for line in lines if (m := re.match(r"([A-Za-z0-9._-]+)\s*[=<>~]", line))}
    return names | TOOLS


@cache
def extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])


def installed(text):
    """(whole line, package) of everything that the text tells people to install."""
    for found in INSTALL.finditer(text):
        for word in () if found[1].startswith("-e ") else found[1].split():
            word = word.strip("'\"`,.:")
            if word and not word.startswith("-") and "$" not in word and "{" not in word:
                yield found[0], word
        yield from ((found[0], f"[{extra}]") for extra in re.findall(r"\.\[([\w,]+)\]", found[1]))


def packages_for_installation_are_known(path):
    names, whole = known_names(), path.read_text(encoding="utf-8")
    for text, word in installed(whole):
        number = whole[: whole.index(text)].count("\n") + 1
        if word.startswith("["):
            if not set(word.strip("[]").split(",")) <= extras():
                yield number, f"{word} is no extra of ours: {text}"
        elif re.match(r"[A-Za-z]", word):
            name = re.split(r"[\[=<>~!@]", word)[0].lower()
            if name not in names:
                yield number, f"{name} is no package of the lock files: {text}"


def name_of_before_is_gone(path):
    if name_of(path) not in EARLIER:
        for number, line in lines_of(path):
            if "podsmith" in line.lower():
                yield number, line.strip()


def test_only_packages_that_we_know_are_named_for_installation():
    check(packages_for_installation_are_known, [p for p in text_files() if p != THIS_FILE])


def test_the_scan_sees_a_name_that_is_not_ours():
    assert ("pip install 'lmwright[tpu]'", "lmwright[tpu]") in list(
        installed("run `pip install 'lmwright[tpu]'` first")
    )
    assert "lmwright" not in known_names() and "podsmith" not in known_names()


def test_the_name_of_before_is_gone():
    check(name_of_before_is_gone, text_files())


def extras_are_named_by_the_one_function(path):
    for number, line in lines_of(path):
        if path.name != "errors.py" and "pip install -e" in line:
            yield number, "say it with errors.install: this is missed when the package is published"
        for extra in re.findall(r"install\(['\"](\w+)['\"]\)", line):
            if extra not in extras():
                yield number, f"{extra} is no extra of ours"


def test_extras_are_named_by_the_one_function_for_messages():
    check(extras_are_named_by_the_one_function, python_files("src"))
