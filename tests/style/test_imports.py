"""Imports point one way, and what must start quickly reaches no jax."""

import ast
import subprocess
import sys

import pytest
from sources import PACKAGE, name_of, parsed, python_files

# Lowest first; a package imports from those before it, or from itself.
ORDER = [
    {"guard", "__init__"},
    {"errors"},
    {"hardware", "report"},
    {"config"},
    {"core", "data"},
    {"nn", "optim"},
    {"kernels"},
    {"models"},
    {"presets"},
    {"objectives"},
    {"program"},
    {"checkpoint"},
    {"formats"},
    {"planner"},
    {"evals", "quantize", "publish"},
    {"train"},
    {"cloud"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}

# Imports inside functions that look upwards, with the reason.
UPWARD = {
    ("formats", "train"): "the adapters of a run are merged into its base",
    ("program", "formats"): "adapters begin on a base of any format",
}

JAX_FREE = ("cli", "cloud", "config", "data", "errors", "guard", "hardware", "presets", "report")
HEAVY = {"jax", "jaxlib", "torch", "tensorflow", "transformers", "datasets"}


def package_of(path):
    """config_merge.py as `config`, data/rows/store.py as `data`."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "config" if first.startswith("config_") else first


def imported(path):
    """(package, whether at module level) of each import of our own."""
    tree = parsed(path)
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = node.module == "lmwright"
            modules = [f"lmwright.{a.name}" for a in node.names] if whole else [node.module]
            modules = ["lmwright" if m == "lmwright.__version__" else m for m in modules]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        for module in modules:
            parts = module.split(".")
            if parts[0] == "lmwright":
                name = parts[1] if len(parts) > 1 else "__init__"
                yield name, node in tree.body


@pytest.mark.parametrize("path", python_files("src"), ids=name_of)
def test_imports_point_one_way(path):
    mine = package_of(path)
    wrong = {
        name
        for name, top in imported(path)
        if name != mine and RANK[name] >= RANK[mine] and (top or (mine, name) not in UPWARD)
    }
    assert not wrong, f"{mine} may import only what comes before it in ORDER"


def test_no_exception_is_stale():
    used = {(package_of(p), name) for p in python_files("src") for name, top in imported(p)}
    assert set(UPWARD) <= used


def test_the_package_alone_imports_nothing_else():
    code = "import sys; old = set(sys.modules); import lmwright; print(*set(sys.modules) - old)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["lmwright"]


def test_what_starts_quickly_reaches_no_jax():
    """Imports the modules one by one, so that the first that brings jax is named."""
    names = [
        ".".join(("lmwright", *path.relative_to(PACKAGE).with_suffix("").parts))
        for path in python_files("src")
        if package_of(path) in JAX_FREE
    ]
    names = [name.removesuffix(".__init__") for name in [*names, "lmwright.optim.kinds"]]
    assert len(names) > 10
    code = (
        f"import importlib, sys\nfor name in {names}:\n    importlib.import_module(name)\n"
        f"    found = {HEAVY} & set(sys.modules)\n"
        "    if found: sys.exit(f'{name} imports {sorted(found)}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
