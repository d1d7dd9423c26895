"""No text names a distribution that is not ours, and the project goes by one name."""

import re
import tomllib

import pytest

from tests.style.sources import ROOT, name_of, python_files, text_files

# Where the name of before must stand: what it has written is still read.
EARLIER = {
    "CHANGELOG.md",
    "src/lmwright/formats/adapter_note.py",
    "src/lmwright/report/summary.py",
    "tests/earlier/test_earlier.py",
    "tests/style/test_names.py",
}
LOCKS = ("run.lock", "test.lock", "torch.txt", "models.txt")
TOOLS = {"uv", "libtpu"}
INSTALL = re.compile(r"(?:pip|uv pip|pipx|uv tool) (?:install|download)\s+([^`\n#;()]+)")


def known_names():
    lines = [line for lock in LOCKS for line in (ROOT / "requirements" / lock).open()]
    names = {m[1].lower() for line in lines if (m := re.match(r"([A-Za-z0-9._-]+)\s*[=<>~]", line))}
    return names | TOOLS


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


@pytest.mark.parametrize("path", text_files(), ids=name_of)
def test_only_packages_that_we_know_are_named_for_installation(path):
    if path.name == "test_names.py":
        return
    names = known_names()
    for line, word in installed(path.read_text(encoding="utf-8")):
        if word.startswith("["):
            assert set(word.strip("[]").split(",")) <= extras(), line
        elif re.match(r"[A-Za-z]", word):
            name = re.split(r"[\[=<>~!@]", word)[0].lower()
            assert name in names, f"{name} is no package of the lock files: {line}"


def test_the_scan_sees_a_name_that_is_not_ours():
    assert ("pip install 'lmwright[tpu]'", "lmwright[tpu]") in list(
        installed("run `pip install 'lmwright[tpu]'` first")
    )
    assert "lmwright" not in known_names() and "podsmith" not in known_names()


@pytest.mark.parametrize("path", text_files(), ids=name_of)
def test_the_name_of_before_is_gone(path):
    if name_of(path) not in EARLIER:
        assert "podsmith" not in path.read_text(encoding="utf-8").lower()


def test_extras_are_named_by_the_one_function_for_messages():
    """A message that writes its own install line would be missed when the package is published."""
    for path in python_files("src"):
        text = path.read_text(encoding="utf-8")
        if path.name != "errors.py":
            assert "pip install -e" not in text, name_of(path)
        for extra in re.findall(r"install\(['\"](\w+)['\"]\)", text):
            assert extra in extras(), name_of(path)
