"""Stores: the prepared data of each trainee, checked against the run."""

from collections.abc import Mapping

from lmwright.config.rows import refuse_rows
from lmwright.config.run import Run
from lmwright.data.rows.store import TokenStore
from lmwright.data.tokens.classes import listed
from lmwright.data.tokens.vocabulary import check_size
from lmwright.errors import UserError
from lmwright.program.plan import Plan
from lmwright.program.trainee import Trainee


def open_stores(plan: Plan) -> dict[str, TokenStore]:
    """The prepared data of each trainee, by its name."""
    return {trainee.name: open_store(plan, trainee) for trainee in plan.training.trainees}


def open_store(plan: Plan, trainee: Trainee) -> TokenStore:
    """The prepared data of a trainee. Raises UserError where it does not fit the run, or has fewer
    rows than a step takes."""
    run = plan.run
    store = open_fitting(run, trainee.data, plan.seq_len, run.data.cache_gib)
    store.check_batch(trainee.rows)
    if trainee.steps is not None:  # of a run that is not `completed`
        store.check_rows(trainee.rows * trainee.steps)
    return store


def open_fitting(run: Run, folder: str, seq_len: int, cache_gib: float = 0.0) -> TokenStore:
    """Prepared data whose rows are such as a run trains on. Raises UserError for other data."""
    store = TokenStore.open(folder, cache_gib=cache_gib)
    if store.seq_len != seq_len:
        raise UserError(
            f"{folder}: rows hold {store.seq_len} tokens, and the run needs {seq_len}; prepare "
            f"again or set data.pack.seq_len = {store.seq_len}"
        )
    check_size(store.vocab_size, run.model.vocab_size, folder)
    refuse_rows(run.objective, (store.holds,), f"{folder}: holds {store.holds}")
    if store.labels and store.labels != run.objective.labels:
        raise UserError(
            f"objective.labels: {listed(run.objective.labels)} are not the classes "
            f"{listed(store.labels)} of the data in {folder}; prepare it again"
        )
    return store


def refuse_other_data(
    plan: Plan, stores: Mapping[str, TokenStore], trained: dict[str, str]
) -> None:
    """Raises UserError where a trainee goes on with other data than it was `trained` on, which
    has the fingerprints by its name."""
    for trainee in plan.training.trainees:
        known = trained.get(trainee.name)
        if known is not None and not stores[trainee.name].is_called(known):
            raise UserError(
                f"{trainee.data}: the prepared data is not what {plan.run.dir} was trained on; "
                f"prepare it as before, or choose another dir="
            )
