"""The train step can be read in one sitting: what it reaches by imports is held to a budget."""

import ast

import pytest

from tests.style.closure import STEP, executed, num_lines, reached, rooms, short

# The goal of the house. Empty packages count.
MOST_FILES = 45
MOST_LINES = 6_000


def test_the_step_reaches_no_more_than_its_budget():
    chains = reached(STEP)
    lines = sum(map(num_lines, chains))
    assert len(chains) <= MOST_FILES and lines <= MOST_LINES, (
        f"{STEP} reaches {len(chains)} files and {lines:,} lines; {MOST_FILES} and "
        f"{MOST_LINES:,} are allowed. Cut where a chain enters a room:\n{rooms(chains)}"
    )


@pytest.mark.parametrize(
    "module, chain",
    [
        ("lmwright.models.llama", "program.step > models.llama"),  # a registry's
        ("lmwright.optim.rule", "program.step > optim.adamw > optim.rule"),
        ("lmwright.core", "program.step > core"),  # a package on the way
        ("lmwright.objectives", "program.step > objectives"),  # on the way to a member
    ],
)
def test_chains_are_the_shortest(module, chain):
    assert short(reached(STEP)[module]) == chain


def test_what_only_a_type_checker_reads_does_not_count():
    tree = ast.parse("if typing.TYPE_CHECKING:\n    import a\nelse:\n    import b\n")
    names = [alias.name for node in executed(tree) if isinstance(node, ast.Import)
             for alias in node.names]  # fmt: skip
    assert names == ["b"]
