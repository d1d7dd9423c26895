"""Files and functions fit on a screen or a few, say what they are, and use one vocabulary."""

import ast
import re
from functools import cache

import pytest

from tests.style.sources import (
    PACKAGE,
    ROOT,
    check,
    is_dataclass_definition,
    lines_of,
    nodes_of,
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
    r"(?!capsize|exercise)\w*?("
    r"(?:normal|token|optim|quant|serial|initial|organ|recogn|summar|visual|penal|random|minim"
    r"|maxim|general|special|util|parallel|vector|material|standard|synchron|regular)is(?:e|ed|es"
    r"|er|ers|ing|ation|ations)"
    r"|colou?r(?<=our)\w*|behaviou?r(?<=our)\w*|neighbou?r(?<=our)\w*|favou?r(?<=our)\w*"
    r"|centre[sd]?|licence|artefact\w*|analys(?:e|ed|es|ing)|modell(?:ed|ing|er)"
    r"|labell(?:ed|ing)|cancell(?:ed|ing)|travell(?:ed|ing)|grey"
    r")",
    re.I,
)
WORD = re.compile(r"\w+")
THIS_FILE = ROOT / "tests/style/test_files.py"
OWN_PATH = re.compile(r"(?<![\w.:/])/(?:work|root|home)/\w[^\s\"'`]*")
NO_SUBJECT = re.compile(r"(What|Whether|The same|That of|Those of)\b")
EINSUMS = ("dot", "einsum", "dot_ragged")
NAMED_BY = {ast.Name: "id", ast.FunctionDef: "name", ast.arg: "arg", ast.Attribute: "attr",
            ast.keyword: "arg"}  # fmt: skip
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def file_is_short_ascii_and_says_what_it_is(path):
    source = path.read_bytes()
    if not source.isascii():
        yield 1, "only ASCII in code; write escapes"
    if (lines := len(source.splitlines())) > MAX_FILE_LINES:
        yield lines, f"longer than {MAX_FILE_LINES} lines"
    if source.strip() and not ast.get_docstring(parsed(path)):
        yield 1, "open the module with what it is"
    if re.fullmatch(BANNED_FILES, path.stem):
        yield 1, "name the file after what it does"


def functions_are_short(path):
    for node in nodes_of(path):
        if isinstance(node, FUNCTIONS):
            size = node.end_lineno - node.lineno + 1
            if size > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {size} lines of {MAX_FUNCTION_LINES}"


def no_banned_names_calls_and_imports(path):
    for node in nodes_of(path):
        found = set()
        if (field := NAMED_BY.get(type(node))) is not None:
            found |= BANNED_NAMES & {getattr(node, field)}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= BANNED_CALLS & {node.func.id}
        if isinstance(node, ast.Import):
            found |= BANNED_IMPORTS & {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= BANNED_IMPORTS & {(node.module or "").split(".")[0]}
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found |= set() if getattr(node.value, "value", None) is False else {"allow_pickle"}
        yield from ((node.lineno, f"{name} is banned") for name in found)


def dataclass_attributes_are_annotated(path):
    for node in filter(is_dataclass_definition, nodes_of(path)):
        for statement in node.body:
            for target in statement.targets if isinstance(statement, ast.Assign) else ():
                if isinstance(target, ast.Name) and not target.id.startswith("__"):
                    yield target.lineno, f"{node.name}.{target.id} is no field, silently: annotate"


def einsum_letters_are_those_of_the_legend(path):
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and node.args:
            called, equation = ast.unparse(node.func).split(".")[-1], node.args[0]
            text = equation.value if isinstance(equation, ast.Constant) else None
            if called in EINSUMS and isinstance(text, str):
                if letters := set(re.sub(r"[\s,.]|->", "", text)) - LEGEND:
                    yield node.lineno, f"{text}: {letters} are not of the legend"


def public_functions_and_classes_are_described(path):
    for node in parsed(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if not ast.get_docstring(node):
                yield node.lineno, f"{node.name} has no docstring"


def docstrings_name_their_subject(path):
    for node in nodes_of(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            name = getattr(node, "name", "the module")
            told = NO_SUBJECT.match(ast.get_docstring(node) or "")
            if told:
                line = getattr(node, "lineno", 1)
                yield line, f"{name}: name the subject; {told[0]!r} says nothing in a tooltip"


def docstrings_are_characters(path):
    """Python 3.13 and later compile no docstring with half of a surrogate pair."""
    for node in nodes_of(path):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
            if re.search("[\ud800-\udfff]", ast.get_docstring(node) or ""):
                yield getattr(node, "lineno", 1), "half of a surrogate pair in a docstring"


def spelling_is_american(path):
    for number, line in lines_of(path):
        yield from ((number, word) for word in WORD.findall(line) if is_british(word))


@cache  # a word stands in many places
def is_british(word):
    return BRITISH.fullmatch(word) is not None


def paths_are_nobodys_own(path):
    for number, line in lines_of(path):
        yield from ((number, match[0]) for match in OWN_PATH.finditer(line))


TEXTS = [path for path in text_files() if path != THIS_FILE]  # which names what it forbids
# rule -> files, a source that breaks it
RULES = {
    file_is_short_ascii_and_says_what_it_is: (python_files(), "x = 1\n"),
    functions_are_short: (python_files(), "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
    no_banned_names_calls_and_imports: (python_files(), "import pickle\n"),
    dataclass_attributes_are_annotated: (python_files(), "@dataclass\nclass A:\n    x = 3\n"),
    einsum_letters_are_those_of_the_legend: (
        python_files("src", "benchmarks"),
        "dot('xyz->x', a)\n",
    ),
    public_functions_and_classes_are_described: (python_files("src"), "def f():\n    pass\n"),
    docstrings_name_their_subject: (python_files("src"), '"""Whether it rains."""\n'),
    docstrings_are_characters: (python_files(), '"""Half: \\ud83d."""\n'),
    spelling_is_american: (TEXTS, "# the colour\n"),
    paths_are_nobodys_own: (TEXTS, "# of /root/x\n"),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_files(rule):
    check(rule, RULES[rule][0])


def test_every_rule_finds_its_offender(tmp_path):
    for rule, (_, source) in RULES.items():
        path = tmp_path / f"{rule.__name__}.py"
        path.write_text(source)
        assert list(rule(path)), rule.__name__


def test_the_rules_leave_neighbors_alone():
    for word in ("normalise", "Tokeniser", "optimisation", "colour", "behaviours", "centre"):
        assert BRITISH.search(f"a {word} b"), word
    for word in ("normalize", "color", "behavior", "raise", "otherwise", "precise", "hour"):
        assert not BRITISH.search(f"a {word} b"), word
    assert re.fullmatch(BANNED_FILES, "utils") and re.fullmatch(BANNED_FILES, "muon_v2")
    assert not re.fullmatch(BANNED_FILES, "llama")
    assert NO_SUBJECT.match("The same, but") and not NO_SUBJECT.match("The samples")
    assert NO_SUBJECT.match("Those of x") and not NO_SUBJECT.match("Those that see x")
    assert any(is_dataclass_definition(n) for n in nodes_of(PACKAGE / "config" / "run.py"))
