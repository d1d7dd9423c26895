"""Which modules of the package a module reaches by imports, and along which chain.

Imports inside functions count, and the packages on the way; those under `if TYPE_CHECKING` do
not, since they are never run. Registries name their members in strings: one of each counts
(MEMBERS).

    python -m tests.style.closure [MODULE]     prints every module with its chain, largest first
"""

import ast
import sys
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.style.sources import PACKAGE, parsed

STEP = "lmwright.program.step"
LOOP = "lmwright.train.loop"
MEMBERS = (
    "lmwright.models.llama",
    "lmwright.objectives.clm",
    "lmwright.optim.adamw",
    "lmwright.kernels.tpu_attention",
)

Chains = dict[str, tuple[str, ...]]
"""The shortest chain of imports to each module, from the first to itself."""


@cache
def file_of(module: str) -> Path | None:
    """The file of a module or package of ours."""
    below = PACKAGE.joinpath(*module.split(".")[1:])
    for path in (below.with_suffix(".py"), below / "__init__.py"):
        if path.is_file():
            return path
    return None


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one, without what only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from executed(other)
        else:
            yield child
            yield from executed(child)


def imports(module: str) -> Iterator[str]:
    """Modules of ours that a module imports, wherever it does."""
    for node in executed(parsed(file_of(module))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reached(first: str) -> Chains:
    """Every module of ours that `first` and the members of registries reach, with these."""
    chains: Chains = {first: (first,)}
    queue = deque(chains)
    while queue:
        module = queue.popleft()
        for name in (*(MEMBERS if module == first else ()), *imports(module)):
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                part = ".".join(parts[:end])
                if parts[0] == "lmwright" and part not in chains and file_of(part):
                    chains[part] = (*chains[module], part)
                    queue.append(part)
    return chains


def num_lines(module: str) -> int:
    """Lines of a module's file."""
    return len(file_of(module).read_text(encoding="utf-8").splitlines())


def room_of(module: str) -> str:
    """`data.rows` of `lmwright.data.rows.store`: where it lies."""
    path = file_of(module).relative_to(PACKAGE)
    return ".".join(path.parent.parts) or "the top"


def short(chain: tuple[str, ...]) -> str:
    """A chain of imports in one line."""
    return " > ".join(name.removeprefix("lmwright.") for name in chain)


def rooms(chains: Chains) -> str:
    """The rooms by the lines reached in them, each with the shortest chain into it."""
    members: dict[str, list[str]] = {}
    for module in chains:
        members.setdefault(room_of(module), []).append(module)
    sizes = {room: sum(map(num_lines, modules)) for room, modules in members.items()}
    return "\n".join(
        f"{sizes[room]:6,} lines in {len(members[room]):2} files of {room}: "
        + short(min((chains[module] for module in members[room]), key=len))
        for room in sorted(members, key=sizes.__getitem__, reverse=True)
    )


if __name__ == "__main__":
    found = reached(sys.argv[1] if len(sys.argv) > 1 else STEP)
    for module in sorted(found, key=num_lines, reverse=True):
        print(f"{num_lines(module):6} {short(found[module])}")
    print(rooms(found), f"\n{sum(map(num_lines, found)):,} lines in {len(found)} files")
