"""Files and functions fit on a screen or a few, say what they are, and use one vocabulary."""

import ast
import re

import pytest

from tests.style.sources import (
    PACKAGE,
    is_dataclass_definition,
    name_of,
    parsed,
    python_files,
    text_files,
)

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
BANNED_NAMES = {"hidden_dim"}  # means two things in the field
BANNED_FILES = r"(utils|common|helpers|misc)|.*_(v\d|old|new|deprecated)"
BANNED_CALLS = {"eval", "exec"}
BANNED_IMPORTS = {"pickle", "cPickle", "dill", "marshal", "shelve"}
LEGEND = set("btsdfnkghvelrca")  # B T S D F N K G H V E L R C A
BRITISH = re.compile(
    r"\b(?!capsize|exercise)\w*?("
    r"(?:normal|token|optim|quant|serial|initial|organ|recogn|summar|visual|penal|random|minim"
    r"|maxim|general|special|util|parallel|vector|material|standard|synchron|regular)is(?:e|ed|es"
    r"|er|ers|ing|ation|ations)"
    r"|colou?r(?<=our)\w*|behaviou?r(?<=our)\w*|neighbou?r(?<=our)\w*|favou?r(?<=our)\w*"
    r"|centre[sd]?|licence|artefact\w*|analys(?:e|ed|es|ing)|modell(?:ed|ing|er)"
    r"|labell(?:ed|ing)|cancell(?:ed|ing)|travell(?:ed|ing)|grey"
    r")\b",
    re.I,
)
THIS_FILE = "tests/style/test_files.py"

every_file = pytest.mark.parametrize("path", python_files(), ids=name_of)


@every_file
def test_a_file_is_short_ascii_and_says_what_it_is(path):
    source = path.read_bytes()
    assert source.isascii(), "only ASCII in code; write escapes"
    assert len(source.splitlines()) <= MAX_FILE_LINES
    if source.strip():
        assert ast.get_docstring(parsed(path)), "open the module with what it is"
    assert not re.fullmatch(BANNED_FILES, path.stem), "name the file after what it does"


@every_file
def test_functions_are_short(path):
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    long = {
        node.name: size
        for node in ast.walk(parsed(path))
        if isinstance(node, functions)
        if (size := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long


@every_file
def test_banned_names_calls_and_imports(path):
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Name | ast.FunctionDef | ast.arg | ast.Attribute | ast.keyword):
            names = (getattr(node, field, None) for field in ("id", "name", "arg", "attr"))
            found |= BANNED_NAMES & {name for name in names if isinstance(name, str)}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= BANNED_CALLS & {node.func.id}
        if isinstance(node, ast.Import):
            found |= BANNED_IMPORTS & {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= BANNED_IMPORTS & {(node.module or "").split(".")[0]}
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found |= set() if getattr(node.value, "value", None) is False else {"allow_pickle"}
    assert not found


@every_file
def test_dataclass_attributes_are_annotated(path):
    """`x = 3` in a dataclass is no field, silently."""
    bare = {
        f"{node.name}.{target.id}"
        for node in ast.walk(parsed(path))
        if is_dataclass_definition(node)
        for statement in node.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name) and not target.id.startswith("__")
    }
    assert not bare


@pytest.mark.parametrize("path", python_files("src", "benchmarks"), ids=name_of)
def test_einsum_letters_are_those_of_the_legend(path):
    wrong = {}
    for node in ast.walk(parsed(path)):
        if not (isinstance(node, ast.Call) and node.args):
            continue
        called = ast.unparse(node.func).split(".")[-1]
        first = node.args[0]
        if called not in ("dot", "einsum", "dot_ragged") or not isinstance(first, ast.Constant):
            continue
        if isinstance(first.value, str):
            letters = set(re.sub(r"[\s,.]|->", "", first.value)) - LEGEND
            wrong |= {first.value: letters} if letters else {}
    assert not wrong


@pytest.mark.parametrize("path", python_files("src"), ids=name_of)
def test_public_functions_and_classes_are_described(path):
    bare = [
        node.name
        for node in parsed(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if not ast.get_docstring(node)
    ]
    assert not bare


@pytest.mark.parametrize("path", text_files(), ids=name_of)
def test_spelling_is_american_and_paths_are_nobodys_own(path):
    if name_of(path) == THIS_FILE:
        return
    text = path.read_text(encoding="utf-8")
    found = [match[0] for match in BRITISH.finditer(text)]
    assert not found
    assert not re.findall(r"(?<![\w.:/])/(?:work|root|home)/\w[^\s\"'`]*", text)


def test_the_rules_can_fail():
    """Each pattern finds what it is for, and leaves its neighbors alone."""
    for word in ("normalise", "Tokeniser", "optimisation", "colour", "behaviours", "centre"):
        assert BRITISH.search(f"a {word} b"), word
    for word in ("normalize", "color", "behavior", "raise", "otherwise", "precise", "hour"):
        assert not BRITISH.search(f"a {word} b"), word
    assert re.fullmatch(BANNED_FILES, "utils") and re.fullmatch(BANNED_FILES, "muon_v2")
    assert not re.fullmatch(BANNED_FILES, "llama")
    assert any(is_dataclass_definition(n) for n in ast.walk(parsed(PACKAGE / "config" / "run.py")))
