"""An encoder from text to transformers: prepared, trained, exported, and its masks filled there as
here."""

import jax
import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.core.compute import Compute
from lmwright.formats.load import load_model
from tests.golden import curves
from tests.golden.cases import CASES
from tests.parity.compare import make_batch

transformers = pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eurobert", "modernbert", "deberta", "bert", "xlm-roberta"])
def test_masks_are_filled_as_here(kind, tmp_path):
    curves.write_sources(tmp_path)
    train = {"train": {"steps": 6, "global_batch_size": 8}}
    run = curves.run_file(tmp_path, kind, CASES[f"family {kind}"] | train)
    out = tmp_path / "out"
    for words in (["prepare", run], ["train", run], ["export", tmp_path / "runs" / kind, out]):
        assert main([str(word) for word in words]) == 0
    fill = transformers.pipeline("fill-mask", model=str(out), device="cpu")
    text = f"the red cat looks {fill.tokenizer.mask_token} the sea"
    ids = fill.tokenizer(text)["input_ids"]
    model, w = (loaded := load_model(out)).model, loaded.weights
    hidden = model.hidden(w, make_batch(np.asarray([ids])), Compute())[0]
    place = ids.index(fill.tokenizer.mask_token_id)
    scores = np.asarray(jax.nn.softmax(model.logits(w, hidden)[0, place]))
    found = fill(text, top_k=10)
    assert [one["token"] for one in found] == np.argsort(-scores)[:10].tolist()
    np.testing.assert_allclose([one["score"] for one in found], -np.sort(-scores)[:10], rtol=1e-4)
