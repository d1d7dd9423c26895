"""Results of a drill: what differs from the run without faults, and a table of the faults."""

import json
import statistics
from collections import defaultdict
from typing import Any

import numpy as np


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
    print("\n| fault | times | seen after, median / worst s | next step after, median / worst s |")
    print("|---|---|---|---|")
    for kind, group in by_kind.items():
        cells = []
        for name in ("seen", "back"):
            values = [row[name] for row in group if row.get(name) is not None]
            worst = f"{statistics.median(values):.2f} / {max(values):.2f}" if values else "-"
            cells.append(worst)
        print(f"| {kind} | {len(group)} | {cells[0]} | {cells[1]} |")
    print(f"\n{len(rows)} faults; checkpoints lost: {watch.lost}; longest without a sign of life: ")
    print(f"{watch.longest:.1f} s; goodput {goodput:.1%}; steps and arrays that differ: ")
    print(f"{len(problems)} {problems[:5]}")
