"""Results of a drill: what differs from the run without faults, and a table of the faults."""

import json
import statistics
from collections import defaultdict
from typing import Any

import numpy as np

WATCHDOG_S = 8.0
SILENT_S = 10.0  # of an agent, as lmwright.cloud.spec.Limits has it
LOOK_S = 2.0  # until what hangs is seen, after its limit
STEPPING = ("step", "save", "save/step")  # before that nothing can be saved


def losses(folder: Any) -> dict[int, set[float]]:
    """Every loss that was logged, by step."""
    logged = defaultdict(set)
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["kind"] == "train":
            logged[entry["step"]].add(entry["loss"])
    return dict(logged)


def arrays(folder: Any, step: int) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint, as Orbax reads them without us."""
    import jax
    import orbax.checkpoint as ocp

    place, reader = folder / "checkpoints" / str(step) / "state", ocp.PyTreeCheckpointer()
    kept = reader.metadata(place).item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), kept)
    tree = reader.restore(place, restore_args=as_numpy)
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def compare(runs: str, steps: int, spoiled: list[int]) -> list[str]:
    """Differences between the run with faults and the one without; of both, the steps whose loss
    is NaN must be the spoiled ones."""
    from etils import epath

    root, problems = epath.Path(runs), []
    with_faults, without = losses(root / "faults"), losses(root / "calm")
    for step in range(1, steps + 1):
        if with_faults.get(step) != without.get(step) or len(without.get(step, ())) != 1:
            problems.append(f"step {step}: {with_faults.get(step)} and {without.get(step)}")
    if (found := sorted(step for step, values in without.items() if "NaN" in values)) != spoiled:
        problems.append(f"steps with NaN: {found} in place of {spoiled}")
    print(f"{len(spoiled)} of {steps} steps had NaN and were skipped")
    ours, theirs = arrays(root / "faults", steps), arrays(root / "calm", steps)
    if ours.keys() != theirs.keys() or not ours:
        problems.append("the checkpoints hold other arrays")
    problems += [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()]
    return problems


def tell(rows: list[dict[str, Any]], watch: Any, goodput: float, problems: list[str]) -> None:
    """Prints the table."""
    by_kind = defaultdict(list)
    for row in rows:
        by_kind[row["kind"]].append(row)
    heads = {"seen": "seen after", "saved": "saved after", "back": "next step after"}
    columns = " | ".join(f"{head}, median / worst s" for head in heads.values())
    print(f"\n| fault | times | {columns} |")
    print("|---|---|---|---|---|")
    for kind, group in by_kind.items():
        cells = [_middle_and_worst([row.get(name) for row in group]) for name in heads]
        print(f"| {kind} | {len(group)} | {' | '.join(cells)} |")
    print(f"\n{len(rows)} faults; checkpoints lost: {watch.lost}; longest without a sign of life: ")
    print(f"{watch.longest:.1f} s; goodput {goodput:.1%}; steps and arrays that differ: ")
    print(f"{len(problems)} {problems[:5]}")


def _middle_and_worst(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f} / {max(known):.2f}" if known else "-"


def tell_goals(rows: list[dict[str, Any]], longest: float) -> None:
    """Prints how many faults met each goal."""

    def values(name: str, *kinds: str, phases: tuple[str, ...] = ()) -> list[float]:
        of = [row for row in rows if row["kind"] in kinds or not kinds]
        of = [row for row in of if row["phase"] in phases or not phases]
        return [row[name] for row in of if row.get(name) is not None]

    goals = {
        "a death is seen": (values("seen", "kill", "agent"), 2.0),
        "a hang is seen": (values("seen", "stop", phases=("step",)), WATCHDOG_S + LOOK_S),
        "a frozen agent is seen": (values("seen", "stop agent"), SILENT_S + LOOK_S),
        "a save is whole after a notice": (
            values("saved", "term", "notice", phases=STEPPING),
            15.0,
        ),
        "the next step is done": (values("back"), 15.0),
        "something moves": ([longest], 60.0),
    }
    print("\n| goal | within s | median / worst s | met |")
    print("|---|---|---|---|")
    for name, (measured, goal) in goals.items():
        met = sum(value <= goal for value in measured)
        mark = "-" if not measured else "yes" if met == len(measured) else "NO"
        cells = f"{_middle_and_worst(list(measured))} | {mark}, {met} of {len(measured)}"
        print(f"| {name} | {goal:g} | {cells} |")
