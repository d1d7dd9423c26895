"""HeldOut: the evaluation of a run while it trains, compiled once."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lmwright.config.run import Eval, Mesh
from lmwright.core.cards import refuse_lost_card
from lmwright.core.contract import Batch
from lmwright.core.param import Tree
from lmwright.core.sharding import batch_sharding, batch_ways
from lmwright.data.rows.store import TokenStore
from lmwright.errors import UserError
from lmwright.evals.compute import Kernels, refuse_samples
from lmwright.evals.loss import evaluate_rows, tally_of
from lmwright.evals.positions import PositionLoss, position_losses
from lmwright.evals.source_loss import SourceLoss
from lmwright.evals.tables import print_losses
from lmwright.formats.hf_stream import on_devices
from lmwright.formats.open import open_run, refuse_run_file
from lmwright.formats.train_state import pick
from lmwright.formats.weights import load_as_trained
from lmwright.guard.heartbeat import beat
from lmwright.program.length import of_rows, with_ids
from lmwright.program.plan import Plan, resolve


class BrokenOff(Exception):
    """An evaluation was told to stop."""


class HeldOut:
    """Losses per held-out source of the store, and greedy continuations of the prompts. What is
    computed asks `stops` before each batch and token, and raises BrokenOff if so."""

    def __init__(self, plan: Plan, store: TokenStore):
        self._plan, self._store = plan, store
        self.stops: Callable[[], bool] = lambda: False
        self._told: set[str] = set()
        rows = plan.run.train.global_batch_size // plan.run.train.num_microbatches
        self._rows = max(rows, batch_ways(plan.mesh))
        self._asked = (
            encode_prompts(plan.run.eval, store, plan.run.data.chat.date)
            if plan.run.eval.prompts
            else ()
        )

    def losses(self, weights: Tree) -> list[SourceLoss]:
        """One SourceLoss per source of which tokens are measured; empty if nothing is held out."""
        found = [self._loss(weights, source) for source in self._store.eval_sources]
        for loss in found:
            if not loss.tokens and loss.source not in self._told and jax.process_index() == 0:
                self._told.add(loss.source)
                print(
                    f"held out from {loss.source}: nothing that a loss is measured on, such as "
                    "liked answers; raise data.holdout_fraction",
                    file=sys.stderr,
                )
        return [loss for loss in found if loss.tokens]

    def positions(self, weights: Tree) -> list[PositionLoss]:
        """One PositionLoss per source, over the rows of `losses`. Raises UserError for answers,
        which have no positions in a text."""
        run, store = self._plan.run, self._store
        if store.holds != "texts":
            raise UserError(
                f"--by-position: {store.place.name('pack')} holds {store.holds}; give a text with "
                "--text FILE"
            )
        model, weights = run.objective.exported(run.model, weights)
        return [
            position_losses(
                model, self._plan.compute, weights, source,
                store.eval_batches(source, self._rows, run.eval.max_rows),
                store.seq_len - 1, self._place,
            )
            for source in store.eval_sources
        ]  # fmt: skip

    def _loss(self, weights: Tree, source: str) -> SourceLoss:
        run, store = self._plan.run, self._store
        tally = tally_of(run.objective)
        loss = evaluate_rows(
            run.model, run.objective, self._plan.compute, weights, source,
            tally.batches(run, store, source, self._rows), self._place, tally,
        )  # fmt: skip
        count = store.eval_rows(source)
        return replace(loss, rows=min(count, run.eval.max_rows or count), of_rows=count)

    def _go_on(self) -> None:
        beat("eval")  # once for each batch: all of them may take hours
        if self.stops():
            raise BrokenOff

    def _place(self, batch: Batch) -> Batch:
        self._go_on()
        sharding = batch_sharding(self._plan.mesh)
        if jax.process_count() == 1:
            return jax.device_put(batch, sharding)
        # Every host has read the same rows; each gives its devices theirs.
        return jax.tree.map(lambda rows: on_devices(np.asarray(rows), sharding), batch)

    def samples(self, weights: Tree) -> list[dict[str, Any]]:
        """Greedy continuation of each of the run's prompts."""
        run = self._plan.run
        if not run.eval.prompts or jax.process_count() > 1:
            return []
        from lmwright.data.text.chat_ends import end_ids
        from lmwright.data.tokens.tokenizer import load_tokenizer
        from lmwright.evals.generate import Sampling, generate
        from lmwright.formats.load import run_prefix

        settings = Sampling(max_new_tokens=run.eval.sample_tokens, temperature=0.0)
        tokenizer = load_tokenizer(self._store.tokenizer_dir)
        model, weights = run.objective.exported(run.model, weights)
        generations = generate(
            model,
            weights,
            tokenizer,
            list(self._asked),
            settings,
            replace(self._plan.compute, unroll=False),  # a few tokens: not worth the compilation
            lambda _row, _text: self._go_on(),
            prefix=run_prefix(run, tokenizer),
            end_ids=end_ids(tokenizer) if run.eval.prompt_format == "chat" else (),
        )
        return [
            {"prompt": prompt, "text": generation.text}
            for prompt, generation in zip(run.eval.prompts, generations, strict=True)
        ]


def encode_prompts(
    settings: Eval, store: TokenStore, date: str | None = None
) -> list[str | list[int]]:
    """The prompts as they are, or as a user's turn in the chat template, encoded.

    Raises UserError where the tokenizer has no template.
    """
    if settings.prompt_format == "text":
        return list(settings.prompts)
    from lmwright.data.text.chat_template import ChatTemplate
    from lmwright.data.tokens.tokenizer import load_tokenizer
    from lmwright.evals.chat_prompts import encode_chats

    tokenizer = load_tokenizer(store.tokenizer_dir)
    if not tokenizer.chat_template:
        raise UserError(
            'eval.prompt_format: "chat" needs a chat template, and the tokenizer of '
            f'{store.place.name("tokenizer")} has none; set data.chat.template or "text"'
        )
    template = ChatTemplate(tokenizer.chat_template, tokenizer, date)
    return list(encode_chats(settings.prompts, template, tokenizer, "eval.prompts"))


@dataclass(frozen=True)
class Opened:
    """A run's checkpoint, and what is held out from its training, on the first device here."""

    path: Path
    plan: Plan
    step: int
    weights: Tree
    held_out: HeldOut


def open_held_out(
    path: str,
    *,
    max_rows: int | None = None,
    adapter: str | None = None,
    samples: int | None = None,
    precision: str | None = None,
    kernels: Kernels = "platform",
) -> Opened:
    """A run directory's newest checkpoint, or that of one of its adapters with that adapter's own
    data, by default in the run's precision. Raises UserError where there is no run, no checkpoint,
    or nothing is held out."""
    try:
        place = open_run(path)
    except UserError:
        if not Path(path).exists():
            raise
        refuse_run_file(path)
        text = f"{path}: not a run directory, so it has no held-out data; add --text FILE"
        raise UserError(text) from None
    refuse_lost_card()
    run, weights, step = load_as_trained(place.path, place.step, adapter=adapter)
    run = replace(run, mesh=Mesh(), eval=replace(run.eval, max_rows=max_rows))
    refuse_samples(run.model, samples)
    if samples is not None:
        run = replace(run, objective=replace(run.objective, eval_samples=samples))
    if precision:
        run = replace(run, train=replace(run.train, precision=precision))
    plan = resolve(run, jax.local_devices()[:1])
    if kernels == "reference":
        plan = replace(plan, compute=replace(plan.compute, kernels="reference", unroll=False))
    folder = pick(plan, adapter).data
    store = TokenStore.open(folder)
    if not store.eval_sources:
        change = "raise" if run.data.holdout_fraction else "set"
        raise UserError(
            f"{folder}: nothing is held out; {change} data.holdout_fraction, or add a source with "
            f'use = "eval", and prepare again'
        )
    _refuse_other_tokens(place.path, store)
    plan = of_rows(replace(plan, run=with_ids(plan.run, store)), [store])
    return Opened(place.path, plan, step, weights, HeldOut(plan, store))


def _refuse_other_tokens(run_dir: Path, store: TokenStore) -> None:
    """Raises UserError for data that was prepared anew with another tokenizer than the run's."""
    from lmwright.data.tokens.tokenizer import load_tokenizer

    folder = run_dir / "tokenizer"
    if not folder.is_dir():
        return
    own = load_tokenizer(folder)
    if own.fingerprint == store.tokenizer_fingerprint:
        return
    if own.backend.get_vocab() != load_tokenizer(store.tokenizer_dir).backend.get_vocab():
        raise UserError(
            f"{store.place.name('tokenizer')}: is not the tokenizer that {run_dir} was trained "
            "with; run `lmwright prepare` to make the data as they were"
        )


def eval_command(path: str, **options: Any) -> int:
    """Prints the held-out loss of a run; `options` are those of `open_held_out`. Returns 0."""
    opened = open_held_out(path, **options)
    print_losses(opened.held_out.losses(opened.weights), opened.plan.compute)
    return 0
