"""The repository's own Python files, parsed once, for the tests of style."""

import ast
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "lmwright"
FOLDERS = ("src", "tests", "benchmarks", "examples")
TEXTS = ("*.md", "*.toml", "*.txt", "*.j2", "*.css", "*.js", "*.yml", "Makefile")


def python_files(*folders: str) -> list[Path]:
    """Every Python file below the folders, or below all of them."""
    return [
        path
        for folder in folders or FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "__pycache__" not in path.parts
    ]


def text_files() -> list[Path]:
    """Every file that people read: code, pages, templates."""
    below = (ROOT / folder for folder in (*FOLDERS, "docs"))
    found = [path for folder in below for kind in TEXTS for path in folder.rglob(kind)]
    top = [path for kind in TEXTS for path in ROOT.glob(kind)]
    return python_files() + sorted(path for path in found + top if path.is_file())


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of a file, walked once for all rules."""
    return list(ast.walk(parsed(path)))


def name_of(path: Path) -> str:
    """A file's path in the repository."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


Rule = Callable[[Path], Iterable[tuple[int, str]]]
"""(line, offense) of each place in a file that breaks a rule."""


def check(rule: Rule, paths: Iterable[Path]) -> None:
    """Fails with `file:line: offense` of every place where a rule is broken."""
    offenders = [f"{name_of(path)}:{line}: {text}" for path in paths for line, text in rule(path)]
    assert not offenders, "\n" + "\n".join(offenders)


def lines_of(path: Path) -> list[tuple[int, str]]:
    """The numbered lines of a text."""
    return list(enumerate(path.read_text(encoding="utf-8").splitlines(), 1))


def is_dataclass_definition(node: ast.AST) -> bool:
    """True for a class that carries `@dataclass`, called or not, or `@section`."""
    if not isinstance(node, ast.ClassDef):
        return False
    calls = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return any(ast.unparse(call).split(".")[-1] in ("dataclass", "section") for call in calls)
