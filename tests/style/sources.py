"""The repository's own Python files, parsed once, for the tests of style."""

import ast
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


def name_of(path: Path) -> str:
    """Test id: the path in the repository."""
    return path.relative_to(ROOT).as_posix()


def is_dataclass_definition(node: ast.AST) -> bool:
    """Whether a class carries `@dataclass`, called or not."""
    if not isinstance(node, ast.ClassDef):
        return False
    calls = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return any(ast.unparse(call).split(".")[-1] == "dataclass" for call in calls)
