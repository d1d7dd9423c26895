"""Many prompts in few slots, against batches and against transformers."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.core.copies import copies_shardings
from lmwright.evals import slots
from lmwright.evals.generate import Sampling, generate
from lmwright.evals.prompt_rows import row_of
from tests.evals.test_likelihood import DECODERS, ENCODERS
from tests.sharded.problem import fresh_weights

QUICK = ("xlstm",)  # memories; keys and values are those of test_prompts_file
NAMES = [name for name in DECODERS if name not in ENCODERS]
COMPUTE = Compute()


class Words:
    """A tokenizer whose texts are numbers."""

    eos_id, bos_id, special_tokens = None, None, {}

    def decode(self, ids, skip_special=True):
        return " ".join(map(str, ids))


def written(model, w, prompts, settings, ends=(), compute=COMPUTE, **options):
    return generate(model, w, Words(), prompts, settings, compute, prefix=(), end_ids=ends,
                    **options)  # fmt: skip


def problem(model, count, seed=0):
    """Prompts of many lengths, and ids that end a text, so that answers have many lengths too."""
    rng = np.random.default_rng(seed)
    size = model.vocab_size
    prompts = [rng.integers(0, size, n).tolist() for n in rng.integers(1, 40, count)]
    return prompts, rng.integers(0, size, size // 12).tolist()


def rows_of(model, prompts, settings):
    return (row_of(i, ids, model, Words(), settings, ()) for i, ids in enumerate(prompts))


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def test_texts_are_those_of_one_batch(name, monkeypatch):
    """Rows that come in for others, move within the cache and, in slow cases, lie on several
    devices."""
    model = DECODERS[name]
    w = fresh_weights(model)
    prompts, ends = problem(model, 23)
    settings = Sampling(20, temperature=0.7, seed=3)
    want = written(model, w, prompts, settings, ends)
    assert len({len(one.tokens) for one in want}) > 5
    moves = []
    shift = slots._shift
    monkeypatch.setattr(slots, "_shift", lambda *a: moves.append(int(a[-1][0])) or shift(*a))
    assert written(model, w, prompts, settings, ends, batch_rows=4) == want
    assert min(moves) < 0 < max(moves)
    if name in QUICK:
        return
    whole = jax.device_put(w, copies_shardings(model.spec(), 3))
    assert written(model, whole, prompts, settings, ends, batch_rows=2) == want


@pytest.mark.slow
def test_layers_apart_and_pieces_of_text():
    """As on CPUs and GPUs where much is written; text is shown as it becomes certain."""
    model = DECODERS["llama"]
    w = fresh_weights(model)
    prompts, ends = problem(model, 9)
    want = written(model, w, prompts, Sampling(20), ends)
    pieces = dict.fromkeys(range(9), "")

    def on_text(row, text):
        pieces[row] += text

    found = written(model, w, prompts, Sampling(20), ends, replace(COMPUTE, unroll=True),
                    batch_rows=4, on_text=on_text)  # fmt: skip
    assert found == want and list(pieces.values()) == [one.text for one in want]


def test_a_longer_prompt_makes_the_cache_longer_or_the_slots_fewer(monkeypatch):
    """The cache grows while rows are in it; where there is no memory for that, they end first."""
    model = replace(DECODERS["llama"], num_layers=1, seq_len=256)
    w = fresh_weights(model)
    prompts, ends = problem(model, 14)
    prompts[9] = np.random.default_rng(1).integers(0, model.vocab_size, 150).tolist()
    want = written(model, w, prompts, Sampling(20), ends)
    longer, begun = [], []
    lengthen, begin = slots._longer, slots._Slots._begin
    monkeypatch.setattr(slots, "_longer", lambda *a: longer.append(a[2]) or lengthen(*a))
    assert written(model, w, prompts, Sampling(20), ends, batch_rows=4) == want
    assert len(longer) == 1

    def noted(self):
        begin(self)
        begun.append(self.num_slots)

    row = slots._cache_shapes(model, COMPUTE, 1, 112)
    size = sum(np.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(row))
    monkeypatch.setattr(slots, "FIRST_ROWS", 4)
    monkeypatch.setattr(slots, "_room", lambda _: 6 * int(size))
    monkeypatch.setattr(slots._Slots, "_begin", noted)
    found = [
        (row.stream.text, row.finish)
        for row in slots.in_slots(
            model, w, COMPUTE, rows_of(model, prompts, Sampling(20)), Sampling(20),
            frozenset(ends), 16,
        )
    ]  # fmt: skip
    assert found == [(one.text, one.finish) for one in want]
    assert begun == [4, 2, 4] and len(longer) == 1
