"""Imports point one way, and what must start quickly reaches no jax."""

import ast
import subprocess
import sys
from functools import cache

from tests.style.sources import PACKAGE, nodes_of, python_files

# Lowest first; a package imports from those before it, or from itself.
ORDER = [
    {"guard", "__init__"},
    {"errors"},
    {"storage"},
    {"hardware"},
    {"report"},
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
    {"evals", "publish"},
    {"quantize"},
    {"train"},
    {"cloud"},
    {"api"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}

# Modules that still import each other, within a room.
CIRCLES = []

JAX_FREE = (
    "api",
    "cli",
    "cloud",
    "config",
    "data",
    "errors",
    "guard",
    "hardware",
    "presets",
    "report",
    "storage",
)
HEAVY = {"jax", "jaxlib", "torch", "tensorflow", "transformers", "datasets"}


def room_of(module):
    """lmwright.data.rows.store as `data`."""
    return [*module.split("."), "__init__"][1]


def module_of(path):
    """src/lmwright/data/stage.py as `lmwright.data.stage`."""
    parts = ("lmwright", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in python_files("src")}


def imported(path):
    """Modules of our own that a file imports, inside functions too."""
    for node in nodes_of(path):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name for name in names if name in MODULES)


@cache
def graph():
    """The modules of our own that each of them imports."""
    return {name: {m for m in imported(path) if m != name} for name, path in MODULES.items()}


def circles(edges):
    """Sets of nodes from each of which all others of the set are reached (Tarjan)."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges[node]:
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(set(stack[at:]))
            del stack[at:]

    for node in edges:
        if node not in index:
            visit(node)
    return [group for group in found if len(group) > 1]


def test_imports_point_one_way():
    wrong = {
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in others
        if room_of(other) != room_of(name) and RANK[room_of(other)] >= RANK[room_of(name)]
    }
    assert not wrong, "a room may import only what comes before it in ORDER"


def test_no_circle_between_rooms():
    rooms = {room_of(name): set() for name in graph()}
    for name, others in graph().items():
        rooms[room_of(name)] |= {room_of(other) for other in others} - {room_of(name)}
    assert circles(rooms) == []


def test_no_circle_within_a_room():
    found = circles(graph())
    assert [group for group in found if group not in CIRCLES] == []
    assert [group for group in CIRCLES if group not in found] == [], "is none any longer"


def test_a_circle_is_found():
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert circles(edges) == [{"b", "c"}]


def test_the_package_alone_imports_nothing_else():
    code = "import sys; old = set(sys.modules); import lmwright; print(*set(sys.modules) - old)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["lmwright"]


def test_what_starts_quickly_reaches_no_jax():
    """Imports the modules one by one, so that the first that brings jax is named."""
    names = [name for name in MODULES if room_of(name) in JAX_FREE]
    names += ["lmwright.optim.kinds", "lmwright.formats.open"]
    assert len(names) > 10
    code = (
        f"import importlib, sys\nfor name in {names}:\n    importlib.import_module(name)\n"
        f"    found = {HEAVY} & set(sys.modules)\n"
        "    if found: sys.exit(f'{name} imports {sorted(found)}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
