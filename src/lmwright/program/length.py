"""Length: how many steps the epochs of a run are, by the rows of its prepared data; and what else
follows from that data."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from lmwright.config.check import check_run
from lmwright.config.fit import count_steps
from lmwright.config.run import Run
from lmwright.data.rows.store import TokenStore
from lmwright.data.tokens.tokenizer import load_tokenizer
from lmwright.errors import UserError

if TYPE_CHECKING:
    from lmwright.program.plan import Plan


def completed(run: Run) -> Run:
    """Run with steps in place of epochs, and with the tokenizer's ids where the data is prepared.
    Raises UserError for a tokenizer that does not serve the objective, or the model."""
    run = with_steps(run)
    padded = getattr(run.model, "pad_id", None) is not None
    if not run.objective.reads_tokenizer and not padded:
        return run
    try:
        store = TokenStore.open(run.data.dir)
    except UserError:
        return run  # `train` says what is wrong; a plan needs no ids
    if padded:
        _refuse_padding(run, store)
    return with_ids(run, store)


def _refuse_padding(run: Run, store: TokenStore) -> None:
    """Raises UserError unless the tokenizer pads with the token that the model's table of positions
    leaves room for: transformers counts positions by it."""
    pad, kind = load_tokenizer(store.tokenizer_dir).pad_id, run.model.kind
    if pad != run.model.pad_id:
        raise UserError(
            f"model.first_position: {run.model.first_position} is for a tokenizer that pads with "
            f"{run.model.pad_id}, as released {kind} models do, and that of {run.data.dir} pads "
            f"with {pad}; use model.kind = 'bert' with token_types = 1, which is the same model"
        )


def with_ids(run: Run, store: TokenStore) -> Run:
    """Run whose objective has what it reads from the tokenizer of prepared data."""
    if not run.objective.reads_tokenizer:
        return run
    tokenizer = load_tokenizer(store.tokenizer_dir)
    return replace(run, objective=run.objective.with_tokenizer(tokenizer))


def of_rows(plan: "Plan", stores: Iterable[TokenStore]) -> "Plan":
    """Plan whose kernels take each row as one document only where the rows were prepared so."""
    from lmwright.kernels.select import KERNELS  # imports jax

    one = all(store.attention == "row" for store in stores)
    one &= not KERNELS["sums in order"](plan.run.train.compiler_options)
    return replace(plan, compute=replace(plan.compute, one_document=one))


def with_steps(run: Run) -> Run:
    """Run with `train.steps` in place of `train.epochs`; the last step may reach into the next
    epoch."""
    if run.train.epochs is None:
        return run
    try:
        rows = TokenStore.open(run.data.dir).epoch_rows
    except UserError as error:
        raise type(error)(
            f"train.epochs: the steps of an epoch are counted in the prepared data, and {error}"
            "; or set train.steps"
        ) from None
    steps = count_steps(run.train.epochs, rows, run.train.global_batch_size)
    run = replace(run, train=replace(run.train, steps=steps, epochs=None))
    check_run(run)
    return run


def epoch_rows(folder: str) -> int | None:
    """Rows of an epoch of the data prepared in a folder; None where there is none."""
    try:
        return TokenStore.open(folder).epoch_rows
    except UserError:
        return None
