"""HeldOut: what a run evaluates on while it trains, compiled once."""

from typing import Any

import jax
import numpy as np

from podsmith.core.batch import Batch
from podsmith.core.param import Tree
from podsmith.core.sharding import batch_sharding, batch_ways
from podsmith.data.store import TokenStore
from podsmith.evals.loss import SourceLoss, evaluate_rows, padded
from podsmith.plan.resolve import Plan


class HeldOut:
    """Losses per held-out source of the store, and greedy continuations of the prompts."""

    def __init__(self, plan: Plan, store: TokenStore):
        self._plan, self._store = plan, store
        rows = plan.run.train.global_batch_size // plan.run.train.num_microbatches
        self._rows = max(rows, batch_ways(plan.mesh))

    def losses(self, weights: Tree) -> list[SourceLoss]:
        """One entry a source; empty where nothing is held out."""
        run = self._plan.run
        return [
            evaluate_rows(
                run.model,
                run.objective,
                self._plan.how,
                weights,
                source,
                padded(self._store.eval_batches(source, self._rows, run.eval.max_rows), self._rows),
                self._place,
            )
            for source in self._store.eval_sources
        ]

    def _place(self, batch: Batch) -> Batch:
        sharding = batch_sharding(self._plan.mesh)
        if jax.process_count() == 1:
            return jax.device_put(batch, sharding)
        # Every host has read the same rows; each gives its devices theirs.
        return jax.tree.map(
            lambda a: jax.make_array_from_callback(
                a.shape, sharding, lambda index, a=a: np.asarray(a[index])
            ),
            batch,
        )

    def samples(self, weights: Tree) -> list[dict[str, Any]]:
        """The run's prompts, each continued greedily."""
        run = self._plan.run
        if not run.eval.prompts or jax.process_count() > 1:
            return []
        from podsmith.data.tokenizer import load_tokenizer
        from podsmith.evals.generate import Sampling, generate

        settings = Sampling(max_new_tokens=run.eval.sample_tokens, temperature=0.0)
        tokenizer = load_tokenizer(self._store.tokenizer_dir)
        found = generate(
            run.model, weights, tokenizer, list(run.eval.prompts), settings, self._plan.how
        )
        return [
            {"prompt": prompt, "text": one.text}
            for prompt, one in zip(run.eval.prompts, found, strict=True)
        ]
