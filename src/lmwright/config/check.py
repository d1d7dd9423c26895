"""Checks across several sections of a run; the types check single fields."""

import os
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lmwright.config.check_data import data_problems
from lmwright.config.errors import join, nearest, problems
from lmwright.config.fields import default_of
from lmwright.config.run import SCALED_TOGETHER, Run, Tokenizer, seq_len_of
from lmwright.errors import UserError
from lmwright.hardware.chips import CHIPS
from lmwright.hardware.devices import GPUS
from lmwright.storage.bucket import is_bucket

TRAINED = Tokenizer()
"""A tokenizer that is trained as the defaults say."""


def check_run(run: Run) -> None:
    """Raises UserError for a run whose sections contradict each other or that sets a field without
    effect. The error lists every problem found."""
    checks = (
        _check_places,
        _check_length,
        _check_direction,
        _check_parts,
        _check_precision,
        _check_schedule,
        _check_microbatches,
        lambda run: run.mesh.rest_axis(),
        _check_row,
        check_memory,
        _check_checkpoint,
        _check_tokenizer,
        _check_prices,
        _check_limits,
        _check_profile,
        _check_publish,
    )
    kinds = [kind.refuse for kind in (run.objective, run.lora, run.qat) if kind is not None]
    lines = [*problems((*checks, *kinds), run), *data_problems(run.data, seq_len_of(run))]
    if lines:
        raise join(lines)


def _check_places(run: Run) -> None:
    for field, path in (("dir", run.dir), ("data.dir", run.data.dir)):
        if not path:
            raise UserError(f"{field}: is empty; name a folder")
        longest = max(len(part.encode("utf-8", "replace")) for part in path.split("/"))
        if not path.isprintable() or longest > 255:
            shown = path if len(path) <= 40 else path[:40] + "..."
            raise UserError(
                f"{field}: {shown!r} cannot be a folder's path; use printable names of at most 255 "
                "bytes"
            )
        if "://" in path and not is_bucket(path) and field == "dir":
            raise UserError(
                f"{field}: {path!r} cannot hold checkpoints; use a folder, or gs://BUCKET/FOLDER"
            )
        if is_bucket(path) and field == "dir" and (there := sorted({*path} & {*"*?["})):
            raise UserError(
                f"{field}: {path!r} has {' and '.join(there)}, which the storage client takes for "
                "a pattern of several names; use another name"
            )


def refuse_own_data(run: Run) -> None:
    """Raises UserError for a new run whose directory is to hold its data, too: both have a
    `tokenizer`, and a later `prepare` would replace that of the trained run."""
    first, second = (
        path.rstrip("/") if "://" in path else os.path.realpath(os.path.expanduser(path))
        for path in (run.dir, run.data.dir)
    )
    if first == second:
        raise UserError(
            f"data.dir: {run.data.dir} is the run's own directory (dir); choose another folder, "
            f"such as data/{run.name}"
        )


def _check_length(run: Run) -> None:
    steps, epochs = run.train.steps, run.train.epochs
    if steps is None and epochs is None:
        raise UserError("train.steps: missing; set it, or the number of passes in train.epochs")
    if steps is not None and epochs is not None:
        raise UserError(
            f"train.epochs: {epochs:g} and train.steps = {steps} both set the length; "
            "keep one (train.epochs=none or train.steps=none unsets the other)"
        )


def _check_precision(run: Run) -> None:
    for section in ("lora", "qat"):
        if run.train.precision == "fp8" and getattr(run, section) is not None:
            raise UserError(
                "train.precision: 'fp8' works only where all weights are trained as floats; use "
                f"'bf16' with [{section}]"
            )


def _check_direction(run: Run) -> None:
    model, objective = run.model, run.objective
    fits = {True: ("'diffusion'", "'llada'"), False: ("'mlm'", "'modernbert'")}
    if model.both_ways and not objective.both_ways:
        raise UserError(
            f"objective.kind: {objective.kind!r} predicts next tokens, which {model.kind!r} can "
            f"already see; use {fits[model.fills_masks][0]}, or a decoder"
        )
    if objective.both_ways and not model.both_ways:
        kind = "'deberta'" if objective.parts else fits[objective.fills_masks][1]
        cure = f"use model.kind = {kind}"
        if run.train.init_from and not objective.fills_masks:  # of which no such kind can be made
            cure = "name one that does in train.init_from"
        raise UserError(
            f"objective.kind: {objective.kind!r} needs a model that looks both ways, which "
            f"{model.kind!r} does not; {cure}"
        )
    if objective.fills_masks != model.fills_masks:
        raise UserError(
            f"objective.kind: {objective.kind!r} does not train {model.kind!r}; use "
            f"{fits[model.fills_masks][0]}, or model.kind = {fits[objective.fills_masks][1]}"
        )
    if model.both_ways and not model.fills_masks and run.eval.prompts:
        raise UserError(f"eval.prompts: {model.kind!r} does not generate text; leave them out")


def _check_parts(run: Run) -> None:
    objective = run.objective
    if run.train.init_parts:
        why = (
            (run.train.init_from is None, "without train.init_from"),
            (run.lora is not None, "with [lora], whose base is taken whole"),
            (bool(objective.parts), f"with objective.kind = {objective.kind!r}"),
        )
        for idle, text in why:
            if idle:
                raise UserError(f"train.init_parts: has no effect {text}; leave it out")
    if run.optim.clip_over == "part" and not (objective.parts and run.optim.clip_norm):
        why = "without optim.clip_norm" if objective.parts else (
            f"with objective.kind = {objective.kind!r}, which trains one model"
        )  # fmt: skip
        raise UserError(f"optim.clip_over: 'part' has no effect {why}; leave it out")
    if not objective.parts or not run.model.both_ways:
        return
    objective.spec(run.model)  # refuses models that do not go together
    if run.lora is not None:
        raise UserError(
            f"lora: objective.kind = {objective.kind!r} trains two models whole; remove [lora]"
        )
    for field, place in objective.starts_from.items():
        if run.train.init_from is None:
            raise UserError(
                f"{field}: {place} has no effect without weights of the model; set "
                "train.init_from to them, too"
            )


def _check_row(run: Run) -> None:
    seq_len, context = seq_len_of(run), run.model.seq_len
    if seq_len > context:
        raise UserError(
            f"data.pack.seq_len: {seq_len} is longer than model.seq_len = {context}; shorten the "
            f"rows or raise model.seq_len"
        )
    if seq_len < 2:
        field = "data.pack.seq_len" if run.data.pack.seq_len else "model.seq_len"
        raise UserError(f"{field}: a row of {seq_len} token leaves nothing to predict; use more")


def check_memory(run: Run) -> None:
    """Raises UserError where choices of what the backward pass keeps contradict each other."""
    train = run.train
    if train.offload != "none" and train.fixed_remat == "none":
        raise UserError(
            f"train.offload: {train.offload!r} has no effect with train.remat = 'none', which "
            "keeps everything on the device; use train.remat = 'block'"
        )
    _check_block_inputs(run)
    if train.offload == "products" and (kept := train.fixed_remat) != "block":
        raise UserError(
            f"train.remat: {kept!r} has no effect with train.offload = 'products', which "
            "puts all matmuls on the host; use train.remat = 'block'"
        )
    if train.head_gradient == "once":
        _check_head_gradient(run)
    if train.mlp_chunk_tokens is not None:
        _check_mlp_chunks(run, train.mlp_chunk_tokens)


def _check_mlp_chunks(run: Run, tokens: int) -> None:
    train, row, remat = run.train, seq_len_of(run), run.train.fixed_remat
    if remat not in ("mlp", "block") or train.offload == "products":
        keeps = ("offload", train.offload) if train.offload == "products" else ("remat", remat)
        raise UserError(
            f"train.mlp_chunk_tokens: has no effect with train.{keeps[0]} = {keeps[1]!r}, which "
            "keeps the mlp's activations of all tokens; use train.remat = 'mlp' or 'block'"
        )
    if not _has_mlp(run.objective.spec(run.model)):
        raise UserError(
            f"train.mlp_chunk_tokens: has no effect on a {run.model.kind} model, which has no mlp "
            "that every token passes through; leave it out"
        )
    if tokens >= row:
        raise UserError(
            f"train.mlp_chunk_tokens: {tokens} has no effect on rows of {row} tokens; use less, or "
            "leave it out"
        )
    if row % tokens:
        raise UserError(
            f"train.mlp_chunk_tokens: {tokens} does not divide the rows of {row} tokens; use a "
            f"divisor, such as {_divisor_below(row, tokens)}"
        )


def _has_mlp(spec: Any) -> bool:
    """True for weights with an mlp that can be taken in chunks, which routed experts cannot."""
    if isinstance(spec, dict):
        return any(map(_has_mlp, spec.values()))
    return spec.outputs[-1:] == ("mlp",) and "experts" not in spec.batch


def _check_head_gradient(run: Run) -> None:
    reason = ""
    if not run.objective.sums_head_once:
        reason = f"on objective.kind = {run.objective.kind!r}, which adds it up in every chunk"
    elif run.train.loss_chunk_tokens >= seq_len_of(run):
        reason = f"on rows of {seq_len_of(run)} tokens, whose loss is one chunk"
    if reason:
        raise UserError(f"train.head_gradient: 'once' has no effect {reason}; leave it out")


def _check_block_inputs(run: Run) -> None:
    kept, embed_dim = run.train.block_inputs, run.model.embed_dim
    if kept == "exact":
        return
    if run.train.fixed_remat == "none":
        raise UserError(
            f"train.block_inputs: {kept!r} does not lower the peak with train.remat = 'none', "
            "which keeps what blocks compute beside their inputs; use train.remat = 'block'"
        )
    if embed_dim % SCALED_TOGETHER:
        raise UserError(
            f"train.block_inputs: {kept!r} gives {SCALED_TOGETHER} neighbors one scale, which do "
            f"not divide model.embed_dim = {embed_dim}; use train.block_inputs = 'exact'"
        )


def _divisor_below(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return next(size for size in range(min(number, most), 0, -1) if number % size == 0)


def _check_schedule(run: Run) -> None:
    schedule: Any = getattr(run.optim, "schedule", None)
    if schedule is not None and run.train.steps is not None:
        schedule.refuse(run.train.steps)


def _check_microbatches(run: Run) -> None:
    """The part of `program.plan.refuse_batch` that needs no device."""
    train = run.train
    _refuse_pieces(train.num_microbatches, train.global_batch_size, "train.global_batch_size")
    if run.lora is not None:
        rows: dict[str, int] = {}
        with suppress(UserError):  # which `lora.refuse` tells
            rows = run.lora.rows_of(train.global_batch_size)
        for name, number in rows.items():
            _refuse_pieces(train.num_microbatches, number, "lora.adapters.rows", f" of {name!r}")


def _refuse_pieces(num: int, rows: int, field: str, whose: str = "") -> None:
    if rows % num:
        below = rows // num * num
        near = f"{below} or {below + num}" if below else f"{num}"
        raise UserError(
            f"{field}: {rows} rows{whose} do not divide into {num} microbatches; use a multiple of "
            f"{num} (nearest: {near})"
        )


def _check_checkpoint(run: Run) -> None:
    keep_every, save_every = run.checkpoint.keep_every_steps, run.checkpoint.save_every_steps
    if keep_every and keep_every % save_every:
        raise UserError(
            f"checkpoint.keep_every_steps: {keep_every} is not a multiple of "
            f"checkpoint.save_every_steps = {save_every}, so those steps are never saved; use a "
            f"multiple of {save_every}"
        )


def _check_tokenizer(run: Run) -> None:
    tokenizer = run.data.tokenizer
    if tokenizer.path is not None:
        return
    origin = None if run.train.init_parts else run.train.init_from
    if origin is not None and run.data.sources:
        if replace(tokenizer, special_tokens=TRAINED.special_tokens) != TRAINED:
            raise UserError(
                "data.tokenizer: would be trained here, but the weights of train.init_from = "
                f"{origin!r} belong to another one; remove [data.tokenizer], or set its path"
            )
        raise UserError(
            "data.tokenizer.path: missing; set the path of the tokenizer that the weights of "
            f"train.init_from = {origin!r} were trained with, or remove [data.tokenizer] if it "
            "lies beside them"
        )
    size = run.model.vocab_size
    if tokenizer.vocab_size and tokenizer.vocab_size > size:
        raise UserError(
            f"data.tokenizer.vocab_size: {tokenizer.vocab_size} is more than "
            f"model.vocab_size = {size}; make them equal"
        )


def _check_prices(run: Run) -> None:
    known = [*CHIPS, *GPUS, "cpu"]
    for kind in run.plan.prices:
        if kind not in known:
            cure = nearest(kind, known, what="there are")
            raise UserError(f"plan.prices.{kind}: there is no such chip; {cure}")


def _check_limits(run: Run) -> None:
    limits = run.limits
    for name in ("session_hours", "total_hours"):
        hours = getattr(limits, name)
        if hours is not None and hours * 60 <= limits.margin_minutes:
            raise UserError(
                f"limits.{name}: {hours:g} hours are not more than limits.margin_minutes = "
                f"{limits.margin_minutes:g}; nothing is left to train in"
            )
    if limits.session_hours is None and limits.total_hours is None:
        if limits.margin_minutes != default_of(type(limits).__dataclass_fields__["margin_minutes"]):
            raise UserError(
                "limits.margin_minutes: has no effect without session_hours or total_hours; set "
                "one or leave it out"
            )


def _check_profile(run: Run) -> None:
    if run.metrics.profile_steps is None:
        return
    first, last = run.metrics.profile_steps
    end = run.train.steps
    if first > last:
        raise UserError(
            f"metrics.profile_steps: [{first}, {last}] ends before it begins; give the first step "
            f"and the last, as in [10, 12]"
        )
    if end is not None and last > end:
        raise UserError(
            f"metrics.profile_steps: step {last} is after the last step of the run, {end}; give "
            "earlier steps"
        )


def _check_publish(run: Run) -> None:
    if run.train.publish_every_steps is not None and run.publish is None:
        raise UserError(
            "train.publish_every_steps: has no effect without [publish], which says where to; add "
            'it with repo = "owner/name" and license = "apache-2.0", or another'
        )
