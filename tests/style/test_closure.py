"""The train step and the training loop can be read in one sitting: what they reach by imports is
held to a budget."""

import ast

import pytest

from tests.style.closure import LOOP, STEP, executed, num_lines, reached, rooms, short

# The loop is handed what reads data, saves, evaluates and shows. Empty packages count.
MOST = {STEP: (45, 6_000), LOOP: (60, 7_200)}


@pytest.mark.parametrize("module", MOST)
def test_the_step_and_the_loop_reach_no_more_than_their_budget(module):
    chains, (files, most) = reached(module), MOST[module]
    lines = sum(map(num_lines, chains))
    assert len(chains) <= files and lines <= most, (
        f"{module} reaches {len(chains)} files and {lines:,} lines; {files} and "
        f"{most:,} are allowed. Cut where a chain enters a room:\n{rooms(chains)}"
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
