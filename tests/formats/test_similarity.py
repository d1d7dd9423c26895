"""Pairs of texts with a number: the losses of sentence-transformers, and the way to its folder."""

import jax
import numpy as np
import pytest
from scipy import stats

from lmwright.cli.main import main
from lmwright.core.compute import Compute
from lmwright.core.param import walk
from lmwright.data.prepare import prepare_command
from lmwright.data.rows.show import show_command
from lmwright.data.rows.store import TokenStore
from lmwright.errors import UserError
from lmwright.evals.held_out import open_held_out
from lmwright.evals.loss import batch_of
from lmwright.formats.convert import export_command
from lmwright.models.eurobert import EuroBert
from lmwright.objectives.similarity import Similarity
from tests.in_memory import to_hf
from tests.labeled_run import SIZES, prepared_run
from tests.parity.compare import assert_near
from tests.saved_run import save_run, weights_at

ROWS = [
    {"text": f"the cat {i}", "text_pair": f"a dog of {i % 7}" + " or more" * (i % 3),
     "label": i % 5 / 4}
    for i in range(60)
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with random weights."""
    root = tmp_path_factory.mktemp("pairs")
    model = EuroBert(mlp_dim=24, **SIZES)
    run = prepared_run(root, model, Similarity(), ROWS, rows="labeled")
    save_run(run, steps=(1,), std=0.3)
    return run


@pytest.fixture(scope="module")
def exported(run):
    out = f"{run.dir}-exported"
    export_command(run.dir, out)
    return out


@pytest.mark.parametrize("compares", ["numbers", "order"])
def test_loss_and_gradients_are_those_of_sentence_transformers(run, exported, compares):
    """Of all held-out pairs as one batch, which one of ours packs."""
    library = pytest.importorskip("sentence_transformers")
    import torch
    from sentence_transformers.sentence_transformer import losses

    theirs = library.SentenceTransformer(exported, device="cpu")
    names = {"numbers": "CosineSimilarityLoss", "order": "CoSENTLoss"}
    held = ROWS[-10:]
    texts = [theirs.tokenize([r[name] for r in held]) for name in ("text", "text_pair")]
    theirs.eval()
    wanted = getattr(losses, names[compares])(theirs)(
        texts, torch.tensor([row["label"] for row in held], dtype=torch.float32)
    )
    wanted.backward()
    objective = Similarity(compares=compares)
    (rows,) = TokenStore.open(run.data.dir).eval_batches("held", 10)
    w = weights_at(1, objective.spec(run.model), 0.3)
    keys = jax.random.split(jax.random.key(0), len(rows["tokens"]))

    def loss(w):
        made = objective.loss(run.model, w, batch_of(rows), keys, Compute())
        return made.total / made.weight, made.weight

    (value, count), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(w)
    assert count == len(held)
    np.testing.assert_allclose(value, wanted.item(), rtol=1e-5)
    model, _ = objective.exported(run.model, {})
    gradients = to_hf(model, grads)
    body = theirs[0].auto_model
    pad = body.embed_tokens.padding_idx  # torch keeps its row as it is, though it ends texts, too
    gradients["embed_tokens.weight"] = np.array(gradients["embed_tokens.weight"])
    gradients["embed_tokens.weight"][pad] = 0
    for name, p in body.named_parameters():
        assert_near(gradients[name], p.grad.numpy(), name)


def test_microbatches_are_one_batch(run):
    """All pairs are compared, whatever the pieces that are encoded one after the other."""
    objective = Similarity(compares="order")
    (rows,) = TokenStore.open(run.data.dir).eval_batches("held", 4, 4)
    w, keys = weights_at(1, objective.spec(run.model), 0.3), jax.random.split(jax.random.key(0), 4)
    whole = batch_of(rows)
    pieces = jax.tree.map(lambda leaf: leaf.reshape(2, 2, -1), whole)

    @jax.jit
    def loss(w, batch):
        return objective.loss(run.model, w, batch, keys, Compute()).total

    (value, grads), (other, theirs) = (jax.value_and_grad(loss)(w, b) for b in (whole, pieces))
    assert value > 1 and float(other) == pytest.approx(float(value), rel=1e-5)
    for (path, ours), (_, leaf) in zip(walk(grads), walk(theirs), strict=True):
        assert_near(ours, np.asarray(leaf), path)


def test_held_out_pairs(run, exported, tmp_path, capsys):
    """Correlations with the cosines of the vectors of embed."""
    vectors = {}
    for name in ("text", "text_pair"):
        (tmp_path / "t.txt").write_text("".join(row[name] + "\n" for row in ROWS[-10:]))
        words = [exported, str(tmp_path / "t.txt"), "--out", str(tmp_path / f"{name}.npy")]
        assert main(["embed", *words, "--precision", "fp32"]) == 0
        vectors[name] = np.load(tmp_path / f"{name}.npy")
    cosines = np.sum(vectors["text"] * vectors["text_pair"], axis=1)
    scores = np.array([row["label"] for row in ROWS[-10:]])
    opened = open_held_out(run.dir, precision="fp32")
    (loss,) = opened.held_out.losses(opened.weights)
    found = loss.numbers
    assert stats.spearmanr(*found.T)[0] == pytest.approx(stats.spearmanr(scores, cosines)[0])
    assert loss.loss == pytest.approx(np.mean((scores - cosines) ** 2), rel=1e-4)
    capsys.readouterr()
    assert main(["eval", run.dir]) == 0
    assert "Spearman" in capsys.readouterr().out
    show_command(run.data.dir, 0, 3)
    said = capsys.readouterr().out
    assert "0.25: 'the cat" in said and ", pair: 'a dog of" in said


def test_a_temperature_that_compares_nothing_is_refused():
    with pytest.raises(UserError, match='temperature: has no effect with compares = "numbers"'):
        Similarity(temperature=0.5)
    assert Similarity(compares="order", temperature=0.5).temperature == 0.5


def test_a_row_of_one_text_is_refused(tmp_path):
    rows = [*ROWS[:5], {"text": "alone", "label": 1}, *ROWS[6:]]
    with pytest.raises(UserError, match=r"texts.jsonl:6 has no second text; give it in a column"):
        prepared_run(tmp_path, EuroBert(mlp_dim=24, **SIZES), Similarity(), rows, rows="labeled")


@pytest.mark.parametrize("compares", ["numbers", "order"])
def test_numbers_that_no_cosine_reaches_are_told(compares, tmp_path, capsys):
    """Ratings from 0 to 5, as STS-B has them; what is between -1 and 1 needs no word."""
    rows = [{**row, "label": 5 * (i % 6) / 5} for i, row in enumerate(ROWS)]
    run = prepared_run(
        tmp_path, EuroBert(mlp_dim=24, **SIZES), Similarity(compares=compares), rows, rows="labeled"
    )
    capsys.readouterr()
    prepare_command(run)
    said = capsys.readouterr().out.splitlines()
    beyond = [line for line in said if "numbers beyond 1" in line]
    assert [line.split(":")[0] for line in beyond] == (
        ["texts (train)", "held (eval)"] if compares == "numbers" else []
    )
