"""Identity of a run: the fields that its checkpoints depend on, which tell it from another."""

import os
from collections.abc import Sequence
from typing import Any

from lmwright.config.fields import without
from lmwright.config.run import FREE, Run
from lmwright.core.param import walk
from lmwright.guard.redact import redact_tree
from lmwright.guard.urls import without_secrets
from lmwright.program.trainee import spec_of, training_of


def identity(run: Run) -> dict[str, Any]:
    """The part of a run that its checkpoints depend on."""
    fields = redact_tree(without(FREE, run), without_secrets)  # a new token makes no new run
    if rows_are_alone(run):
        fields["train"].pop("num_microbatches")
    training = training_of(run)
    if any(trainee.dropout for trainee in training.trainees):  # each chunk draws what it drops
        fields["train"]["mlp_chunk_tokens"] = run.train.mlp_chunk_tokens
    if training.listed:  # each is kept or dropped by itself
        fields["train"].pop("global_batch_size")
        rows = {trainee.name: trainee.rows for trainee in training.trainees}
        section, _, name = training.listed.partition(".")
        fields[section][name] = {  # each one's place in its data is counted in steps of its rows
            each["name"]: each | {"rows": rows[each["name"]]} for each in fields[section][name]
        }
    return _numbered(fields)


def rows_are_alone(run: Run) -> bool:
    """True if microbatches only order a sum: no inputs of adapters are dropped, since that is drawn
    for a microbatch, no experts balance its tokens, and the objective compares none of its rows.
    Noise on embeddings is drawn for each row, but where several trainees share the batch, for its
    place among the rows of one."""
    trainees, objective = training_of(run).trainees, run.objective
    noisy = any(t.dropout for t in trainees) or (objective.draws_noise and len(trainees) > 1)
    balanced = any("experts" in p.batch for _, p in walk(spec_of(run)))
    return not noisy and not balanced and objective.rows_are_alone


def keep_shared(runs: Sequence[Run], fields: Sequence[dict[str, Any]]) -> None:
    """Keeps only the listed trainees that both runs have: others may be added or removed."""
    listed = {training_of(run).listed for run in runs}
    if len(listed) > 1 or listed == {""}:
        return
    section, _, name = listed.pop().partition(".")
    before, now = (each[section][name] for each in fields)
    for trainees, other in ((before, now), (now, before)):
        for missing in trainees.keys() - other.keys():
            del trainees[missing]


def differences(a: Any, b: Any, prefix: str = "") -> set[str]:
    """Dotted paths at which two nested dicts differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        paths: set[str] = set()
        for name in a.keys() | b.keys():
            path = f"{prefix}.{name}" if prefix else name
            paths |= differences(a.get(name), b.get(name), path)
        return paths
    if prefix.endswith(".path"):
        a, b = _placed(a), _placed(b)
    return set() if _plain(a) == _plain(b) else {prefix}


def _placed(path: Any) -> Any:
    """A path as it is from the root, be it of this machine."""
    return os.path.abspath(path) if isinstance(path, str) and "://" not in path else path


def _numbered(fields: dict[str, Any]) -> dict[str, Any]:
    """Nested dicts with lists of tables as dicts by the number of a table, as overrides name it."""
    numbered = {}
    for name, value in fields.items():
        if isinstance(value, (list, tuple)) and value and all(isinstance(v, dict) for v in value):
            value = {str(number): table for number, table in enumerate(value)}
        numbered[name] = _numbered(value) if isinstance(value, dict) else value
    return numbered


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
