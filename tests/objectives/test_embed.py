"""Sentence embeddings: the loss and gradient of sentence-transformers, of the whole batch however
it is packed, cut or laid out."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.core.leaves import Lora
from lmwright.core.param import init_weights
from lmwright.errors import UserError
from lmwright.models.eurobert import EuroBert
from lmwright.models.llama import Llama
from lmwright.models.modernbert import ModernBert
from lmwright.objectives.classify import Classify
from lmwright.objectives.embed import Embed
from lmwright.program.plan import resolve
from lmwright.program.state import abstract_batch, abstract_state, init_state
from lmwright.program.step import make_step
from tests.objectives.labeled_rows import packed
from tests.train.test_step import make_run, model_of

V, T, D = 50, 64, 16
SMALL = {"vocab_size": V, "embed_dim": D, "mlp_dim": 24, "num_layers": 1, "num_heads": 4}
MODEL = EuroBert(**SMALL, num_kv_heads=2, head_dim=6, seq_len=T)
CHOICES = [
    (0, {}),
    (2, {"temperature": 0.02, "pooling": "first"}),
    (0, {"direction": "both"}),
    (1, {"direction": "both"}),
    (2, {"matryoshka_dims": (16, 8, 3), "matryoshka_weights": (1.0, 0.5, 0.25),
         "direction": "both"}),
    (1, {"matryoshka_dims": (4, 12), "direction": "both"}),
]  # fmt: skip


def groups(sizes, negatives, seed=2):
    """Lists of token arrays: anchor, positive and so many negatives."""
    rng = np.random.default_rng(seed)
    count = 2 + negatives
    return [
        [rng.integers(0, V, n) for n in sizes[i * count : (i + 1) * count]]
        for i in range(len(sizes) // count)
    ]


SIZES = [5, 9, 3, 11, 24, 1, 7, 2, 6, 4, 8, 10, 13, 3, 5, 9, 2, 6, 17, 4, 1, 8, 12, 3]


def in_rows(found, width=T):
    """Rows of whole groups, (tokens, weight of the first token) of each text."""
    rows, left, places = [], 0, 0
    for group in found:
        size = sum(map(len, group))
        if size > left or places < len(group):
            rows.append([])
            left, places = width, width // 8
        rows[-1] += [(text, float(not i)) for i, text in enumerate(group)]
        left, places = left - size, places - len(group)
    return rows


def weights(objective, model=MODEL):
    return init_weights(objective.spec(model), jax.random.key(0))


def ours(objective, w, batch, model=MODEL):
    """(Loss, gradients)."""

    def loss(w):
        made = objective.loss(model, w, batch, None, Compute())
        return made.total, made

    (_, made), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(w)
    return made, grads


def of_sentence_transformers(objective, columns):
    """Its loss of vectors, lists of [N, D] by column, and the gradient of each."""
    torch = pytest.importorskip("torch")
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")

    class Model(torch.nn.Module):
        def get_embedding_dimension(self):
            return D

        def __call__(self, features):
            return self.forward(features)

        def forward(self, features):
            return {"sentence_embedding": features["x"]}

    model = Model()
    both = objective.direction == "both"
    loss = losses.MultipleNegativesRankingLoss(
        model,
        scale=1 / objective.temperature,
        directions=("query_to_doc", "doc_to_query") if both else ("query_to_doc",),
        partition_mode="per_direction" if both else "joint",
    )
    if objective.matryoshka_dims:
        dims, shares = list(objective.matryoshka_dims), list(objective.matryoshka_weights)
        loss = losses.MatryoshkaLoss(model, loss, dims, shares or None)
    given = [torch.tensor(np.asarray(x), requires_grad=True) for x in columns]
    total = loss([{"x": x} for x in given], None)
    total.backward()
    return float(total.detach()), [x.grad.numpy() for x in given]


@cache
def first_vectors(objective, model):
    """Function of weights and a batch to the vector of each row's first text."""
    return jax.jit(lambda w, b: objective.model_over(model).vectors(w, b, Compute(), 1)[0][:, 0])


def alone(objective, w, texts, model=MODEL):
    """Vectors [N, D] of texts, each in a row by itself."""
    return first_vectors(objective, model)(w, packed([[(text, 0.0)] for text in texts], T))


@pytest.mark.parametrize("negatives, choice", CHOICES)
def test_loss_and_gradients_are_those_of_sentence_transformers(negatives, choice):
    """Of vectors of texts that are alone in their rows."""
    objective, found = Embed(**choice), groups(SIZES, negatives)
    w, count = weights(objective), len(found)
    texts = [text for column in zip(*found, strict=True) for text in column]
    vectors, back = jax.vjp(lambda w: alone(objective, w, texts), w)
    columns = [vectors[i * count : (i + 1) * count] for i in range(2 + negatives)]
    wanted, slopes = of_sentence_transformers(objective, columns)
    made, grads = ours(objective, w, packed(in_rows(found), T))
    assert float(made.weight) == count
    np.testing.assert_allclose(made.total / made.weight, wanted, rtol=1e-5)
    (theirs,) = back(jnp.concatenate(slopes))
    for mine, other in zip(*map(jax.tree.leaves, (grads, theirs)), strict=True):
        scale = float(np.abs(other).max()) + 1e-9
        np.testing.assert_allclose(mine / count, other, atol=2e-5 * scale)


def test_modernbert_gives_vectors_too():
    model = ModernBert(**SMALL, num_kv_heads=4, head_dim=4, window=5, seq_len=T)
    objective, found = Embed(), groups(SIZES, 1)
    w = weights(objective, model)
    assert not {"dense", "head_norm", "decoder_bias"} & set(w)
    columns = [alone(objective, w, column, model) for column in zip(*found, strict=True)]
    wanted, _ = of_sentence_transformers(objective, columns)
    made, _ = ours(objective, w, packed(in_rows(found), T), model)
    np.testing.assert_allclose(made.total / made.weight, wanted, rtol=1e-5)


@pytest.mark.parametrize("direction", ["anchors", "both"])
def test_the_same_text_is_no_negative(direction):
    """Equal anchors, equal positives, and negatives that are some other's positive: the formula in
    loops, over texts as they are."""
    objective, found = Embed(direction=direction), groups(SIZES, 1)
    same = [list(group) for group in found]
    same[1][0] = found[0][0]  # the anchor of another
    same[3][1] = found[2][1]  # what belongs to another
    same[4][2] = found[5][1]  # a negative that belongs to another
    same[6][1] = found[7][0]  # the anchor of another
    w = weights(objective)
    made, _ = ours(objective, w, packed(in_rows(same), T))
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)  # noqa: E731
    a, p, n = (unit(alone(objective, w, list(c))) for c in zip(*same, strict=True))
    named = [[tuple(text.tolist()) for text in group] for group in same]
    total = 0.0
    for i, (anchor, own, _) in enumerate(named):
        scores, back = [a[i] @ p[i]], [a[i] @ p[i]]
        for k, (other, belongs, no) in enumerate(named):
            if k != i and belongs not in (anchor, own) and other != anchor:
                scores.append(a[i] @ p[k])
            if no not in (anchor, own):
                scores.append(a[i] @ n[k])
            if k != i and other not in (anchor, own) and belongs != own:
                back.append(p[i] @ a[k])
        each = [np.log(np.sum(np.exp(20 * (np.array(s) - s[0])))) for s in (scores, back)]
        total += np.mean(each[: 1 + (direction == "both")])
    np.testing.assert_allclose(float(made.total), total, rtol=1e-5)


def test_rows_of_padding_alone_have_finite_gradients():
    made, grads = ours(Embed(), weights(Embed()), packed([[], []], T))
    assert float(made.total) == float(made.weight) == 0
    assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(grads))


def after(batch, microbatches, devices, **mesh):
    run = make_run(num_microbatches=microbatches)
    objective = Embed(matryoshka_dims=(16, 6), direction="both")
    run = replace(run, model=MODEL, objective=objective, mesh=replace(run.mesh, **mesh))
    # as the feed deals rows out
    deal = lambda a: a.reshape(-1, microbatches, T).swapaxes(0, 1)  # noqa: E731
    plan = resolve(run, jax.devices()[:devices])
    with jax.set_mesh(plan.mesh):
        state, metrics = make_step(plan)(init_state(plan), jax.tree.map(deal, batch))
    return model_of(state)["weights"], metrics


@pytest.fixture(scope="module")
def plain():
    """A batch of unequal rows, one of them padding, and the state after a step on one device."""
    rows = in_rows(groups(SIZES + SIZES[:15], 1))
    batch = packed([*rows, *[[]] * (8 - len(rows))], T)
    assert 5 < len(rows) < 8
    return batch, after(batch, 1, 1)


@pytest.mark.parametrize(
    "microbatches, devices, mesh",
    [(4, 1, {}), (8, 1, {}), (1, 8, {"fsdp": 8}), (2, 4, {"data": 2, "fsdp": 2}),
     (1, 4, {"fsdp": 2, "tensor": 2}), (1, 4, {"fsdp": 2, "context": 2})],
)  # fmt: skip
def test_an_update_is_the_same_however_a_batch_is_cut(plain, microbatches, devices, mesh):
    """Microbatches and devices have no fewer negatives."""
    batch, (wanted, one) = plain
    found, two = after(batch, microbatches, devices, **mesh)
    assert float(one["target_tokens"]) == float(two["target_tokens"]) == 13
    for name in ("loss", "nll", "accuracy", "grad_norm"):
        np.testing.assert_allclose(one[name], two[name], rtol=1e-4)
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-4, atol=2e-5)


def test_each_microbatch_drops_inputs_of_its_own():
    objective = Embed()
    w, two = weights(objective), jax.random.split(jax.random.key(1), (1, 2))  # layers, microbatches
    a, b, rate = jnp.ones((1, D, 2)), jnp.ones((1, 2, 24)), jnp.full(1, 0.5)
    up = Lora(w["layers"]["up"], a, b, None, jax.random.key_data(two), rate)
    w |= {"layers": w["layers"] | {"up": up}}
    twice = jax.tree.map(lambda a: jnp.stack([a, a]), packed(in_rows(groups(SIZES, 0))[:1], T))
    found = jax.jit(partial(objective.texts, objective.model_over(MODEL), compute=Compute()))
    first, second = found(w, twice)[0].vectors
    assert not np.allclose(first, second, rtol=1e-2)


def test_only_vectors_are_kept_of_all_microbatches():
    """Memory of the compiled step: a microbatch's, not the batch's."""

    def memory(num):
        train = {"num_microbatches": num, "global_batch_size": 64, "remat": "none"}
        run = replace(make_run(**train), model=MODEL, objective=Embed())
        plan = resolve(run, jax.devices()[:1])
        with jax.set_mesh(plan.mesh):
            lowered = make_step(plan).lower(abstract_state(plan), abstract_batch(plan, 64 // num))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert memory(8) < memory(1) / 3


def test_a_step_of_microbatches_encodes_twice():
    """Which is no work that counts, as nothing that is recomputed does."""
    objective, flops = Embed(), []
    for num, passes in ((1, 0), (2, 1)):
        run = replace(make_run(num_microbatches=num), model=MODEL, objective=objective)
        assert objective.passes_of(num) == passes
        flops.append(resolve(run, jax.devices()[:1]).flops_per_step)
    assert flops[0] == flops[1]


def test_the_work_has_no_head_over_the_vocabulary():
    work = Embed().works(replace(MODEL, vocab_size=100_000), T)[""]
    assert work.flops_per_token() == Embed().works(MODEL, T)[""].flops_per_token()


def test_what_is_refused():
    with pytest.raises(UserError, match=r"objective\.matryoshka_dims: 32 is more than model.embed"):
        Embed(matryoshka_dims=(32, 8)).spec(MODEL)
    with pytest.raises(UserError, match="a number occurs twice"):
        Embed(matryoshka_dims=(8, 8))
    with pytest.raises(UserError, match="1 weights for 2 matryoshka_dims"):
        Embed(matryoshka_dims=(8, 4), matryoshka_weights=(1.0,))
    llama = Llama(**SMALL, num_kv_heads=2, head_dim=6, seq_len=T)
    with pytest.raises(
        UserError, match="'llama' cannot be trained to give vectors; use an encoder"
    ):
        Embed().spec(llama)
    with pytest.raises(UserError, match="this 'eurobert' has a head that is not for vectors"):
        Embed().spec(Classify(labels=("a", "b")).model_over(MODEL))
