"""Replaced token detection: loss and every gradient as a composition of transformers' layers has
them, the generator's table untouched by the discriminator, and the same numbers however a batch is
cut."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.config.run import Mesh
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import init_weights, walk
from lmwright.errors import UserError
from lmwright.formats.hf_read import model_from_config
from lmwright.formats.hf_stream import from_hf
from lmwright.models.detector import Detector
from lmwright.models.eurobert import EuroBert
from lmwright.nn.gumbel import sample
from lmwright.objectives.mlm import Mlm
from lmwright.objectives.rtd import Rtd, detect
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.quick import Quick
from tests.in_memory import abstract_weights, to_hf
from tests.objectives.cut_batches import CUTS, after_step
from tests.parity.compare import assert_near, randomize
from tests.parity.families import DEBERTA
from tests.parity.row import SIZES
from tests.parity.test_encoders import EOS, LENGTHS, MASK, T, V, packed
from tests.planner.test_analytic import dot_flops
from tests.train.test_step import SEQ_LEN, make_run

torch = pytest.importorskip("torch", reason="torch is the reference")
transformers = pytest.importorskip("transformers")

LAYERS, WEIGHT = 4, 7.0
OBJECTIVE = Rtd(
    mask_token_id=MASK, mask_ratio=0.4, never_masked=(EOS,), generator_layers=2,
    detector_weight=WEIGHT,
)  # fmt: skip
KEYS = jax.random.split(jax.random.key(5), len(LENGTHS))


class Head(torch.nn.Module):
    """Microsoft's head over tokens, with its names."""

    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.dense, self.classifier = torch.nn.Linear(width, width), torch.nn.Linear(width, 1)
        self.LayerNorm = torch.nn.LayerNorm(width, config.layer_norm_eps)

    def forward(self, x, first):
        h = self.LayerNorm(x + torch.take_along_dim(x, first[..., None], 1))
        return self.classifier(torch.nn.functional.gelu(self.dense(h)))[..., 0]


def masked_lm(layers):
    said = {k: v for k, v in (SIZES | DEBERTA | {"num_hidden_layers": layers}).items()}
    config = transformers.DebertaV2Config(**{k: v for k, v in said.items() if v is not None})
    config.architectures = ["DebertaV2ForMaskedLM"]
    theirs = transformers.DebertaV2ForMaskedLM(config).float().eval()
    randomize(theirs)
    return theirs


@pytest.fixture(scope="module")
def theirs():
    """A generator, an encoder with a table of differences, and a head."""
    torch.manual_seed(1)
    generator, encoder = masked_lm(2), masked_lm(LAYERS)
    head = Head(encoder.config)
    randomize(head)
    return generator, encoder.deberta, head


@pytest.fixture(scope="module")
def ours(theirs):
    """(our model, the same weights)."""
    return our_models(theirs, OBJECTIVE)


def our_models(theirs, objective):
    """(our model, the weights of both)."""
    generator, encoder, head = theirs
    said = json.loads(encoder.config.to_json_string(use_diff=False))
    said["architectures"] = ["DebertaV2ForMaskedLM"]
    model = model_from_config(said, "config.json")
    tensors = {f"deberta.{k}": v for k, v in encoder.state_dict().items()}
    tensors |= {f"mask_predictions.{k}": v for k, v in head.state_dict().items()}
    arrays = lambda tensors: {k: v.numpy() for k, v in tensors.items()}  # noqa: E731
    return model, {
        "generator": from_hf(objective.generator(model), arrays(generator.state_dict())),
        "discriminator": from_hf(Detector(model), arrays(tensors)),
    }


@pytest.fixture(scope="module")
def filled(ours):
    """A packed batch, what is hidden of it, and the rows with samples."""
    model, w = ours
    batch = packed(LENGTHS)
    hidden = OBJECTIVE.masking.hide(batch, V, KEYS)
    fill = jax.jit(lambda w: OBJECTIVE.fill(model, w, batch, hidden, KEYS, Compute())[1])
    return batch, hidden, fill(w["generator"])


def tensor(a):
    return torch.tensor(np.asarray(a))


def their_loss(theirs, batch, hidden, mixed):
    """Their loss, the sum that ours is over the number of tokens, for given samples."""
    generator, encoder, head = theirs
    ids = np.asarray(batch.segment_ids)
    same = tensor(ids[:, :, None] == ids[:, None])
    parts, real = generator.deberta, tensor(ids > 0)
    x = parts.encoder(parts.embeddings(tensor(hidden.tokens)), same).last_hidden_state
    logits = generator.lm_predictions(x, parts.embeddings.word_embeddings)
    masked = torch.zeros(ids.shape, dtype=bool)
    for row, (places, chosen) in enumerate(zip(hidden.places, hidden.predicted, strict=True)):
        masked[row, np.asarray(places)[np.asarray(chosen) > 0]] = True
    tokens, mixed = tensor(batch.tokens).long(), tensor(mixed).long()
    first = torch.nn.functional.cross_entropy(logits[masked], tokens[masked], reduction="sum")
    table = parts.embeddings.word_embeddings.weight.detach()
    table = table + encoder.embeddings.word_embeddings.weight
    x = encoder.encoder(encoder.embeddings(inputs_embeds=table[mixed]), same).last_hidden_state
    start = tensor((ids[:, :, None] == ids[:, None]).argmax(-1))
    found = head(x, start)[real]
    second = torch.nn.functional.binary_cross_entropy_with_logits(
        found, (mixed != tokens)[real].float(), reduction="sum"
    )
    return (first / 0.4 + WEIGHT * second) / real.sum()


def test_loss_and_gradients_are_those_of_the_composition(theirs, ours, filled, record_property):
    model, w = ours
    batch, hidden, mixed = filled

    def loss(w):
        result = OBJECTIVE.loss(model, w, batch, KEYS, Compute(loss_chunk_tokens=4))
        return result.total / result.weight

    value, grads = jax.jit(jax.value_and_grad(loss))(w)
    modules = dict(zip(("generator", "encoder", "head"), theirs, strict=True))
    for module in modules.values():
        module.zero_grad()
    expected = their_loss(theirs, batch, hidden, mixed)
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    wanted = dict(theirs[0].named_parameters())
    found = to_hf(OBJECTIVE.generator(model), grads["generator"])
    assert set(found) == set(wanted)
    near = [assert_near(found[name], p.grad.numpy(), name) for name, p in wanted.items()]
    wanted = {f"deberta.{n}": p for n, p in theirs[1].named_parameters()}
    wanted |= {f"mask_predictions.{n}": p for n, p in theirs[2].named_parameters()}
    found = to_hf(Detector(model), grads["discriminator"])
    assert set(found) == set(wanted)
    near += [assert_near(found[name], p.grad.numpy(), name) for name, p in wanted.items()]
    record_property("gradients", float(max(near)))


def test_the_discriminator_leaves_the_generator_alone(ours, filled):
    """Its loss has no gradient for any weight of the generator, whose table it reads; and the
    masked language modeling of the generator is that of `mlm`."""
    model, w = ours
    batch, hidden, mixed = filled

    def found(w, objective):
        return objective.loss(model, w, batch, KEYS, Compute()).total

    heavy = jax.jit(jax.grad(lambda w: found(w, replace(OBJECTIVE, detector_weight=1e6))))(w)
    light = jax.jit(jax.grad(lambda w: found(w, replace(OBJECTIVE, detector_weight=1e-6))))(w)
    for (path, a), (_, b) in zip(walk(heavy["generator"]), walk(light["generator"]), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=path)
    alone = jax.jit(
        jax.grad(
            lambda table: detect(model, w["discriminator"], table, batch, mixed, Compute())[0].total
        )
    )(w["generator"]["embed"])
    assert np.abs(alone).max() > 0  # which `loss` keeps away
    mlm = Mlm(mask_token_id=MASK, mask_ratio=0.4, never_masked=(EOS,))
    wanted = jax.jit(jax.grad(
        lambda w: mlm.loss(OBJECTIVE.generator(model), w, batch, KEYS, Compute()).total / 0.4
    ))(w["generator"])  # fmt: skip
    for (path, a), (_, b) in zip(walk(light["generator"]), walk(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), err_msg=path)
    del hidden


def test_the_export_detects_as_the_run_does(ours, filled):
    """It has both tables in one; its logits give the loss and the metrics of the run."""
    model, w = ours
    batch, _, mixed = filled
    table = w["generator"]["embed"]
    own = w["discriminator"] | {"embed": 0.1 * table[::-1]}  # which starts at zero
    detector, exported = OBJECTIVE.exported(model, w | {"discriminator": own})
    x, _ = detector.hidden(exported, replace(batch, tokens=mixed), Compute())
    logits = np.asarray(detector.logits(exported, x)[..., 0])
    loss, metrics = detect(model, own, table, batch, mixed, Compute())
    real, replaced = np.asarray(batch.segment_ids) > 0, np.asarray(mixed != batch.tokens)
    each = np.logaddexp(0, np.where(replaced, -logits, logits))
    np.testing.assert_allclose(loss.total, each[real].sum(), rtol=1e-5)
    right = (logits > 0) == replaced
    for name, of in (("detector_accuracy", real), ("detector_recall", real & replaced)):
        assert [float(part) for part in metrics[name]] == [right[of].sum(), of.sum()]


def test_only_masks_are_filled(filled):
    batch, hidden, mixed = filled
    masked = np.asarray(hidden.tokens != batch.tokens)
    changed = np.asarray(mixed != batch.tokens)
    assert changed.any() and not changed[~masked].any()
    again = OBJECTIVE.masking.hide(batch, V, KEYS)
    np.testing.assert_array_equal(hidden.tokens, again.tokens)


def test_samples_are_of_the_softmax():
    """In chunks that do not divide the vocabulary, by a chi-square test of each id."""
    ids, draws = 11, 40_000
    table = np.random.default_rng(0).standard_normal((ids, 3)).astype("f4")
    x = jnp.asarray([[[0.5, -1.0, 2.0], [0.0, 0.3, -0.2]]])
    logits = lambda w, x: jnp.einsum("bkd,vd->bkv", x, w["table"]) + w["bias"]  # noqa: E731
    w = {"table": jnp.asarray(table), "bias": jnp.linspace(-1, 1, ids)}
    axes, keys = {"table": 0, "bias": 0}, jax.random.split(jax.random.key(3), draws)
    for chunk in (4, 11, 50):
        run = jax.jit(lambda keys, chunk=chunk: sample(
            logits, w, axes, jnp.broadcast_to(x, (draws, 2, 3)), keys, ids, chunk
        ))  # fmt: skip
        found = np.asarray(run(keys))
        probs = np.asarray(jax.nn.softmax(logits(w, x)[0], axis=-1))
        for place in range(2):
            counts = np.bincount(found[:, place], minlength=ids)
            expected = draws * probs[place]
            assert np.sum((counts - expected) ** 2 / expected) < 35  # 1 in 10,000 at 10 degrees


def test_the_logits_of_the_generator_are_never_whole(ours, filled):
    """With a vocabulary of several chunks, no array of the step has all ids for each mask."""
    model = replace(ours[0], vocab_size=20_000)
    batch, hidden, _ = filled
    w = jax.eval_shape(lambda: init_weights(OBJECTIVE.spec(model), jax.random.key(0)))
    loss = jax.grad(lambda w: OBJECTIVE.loss(model, w, batch, KEYS, Compute()).total)
    text, places = str(jax.make_jaxpr(loss)(w)), hidden.places.shape[1]
    assert f"[4,{places},8192]" in text and f"[4,{-(-places // 4)},20000]" in text
    assert f"[4,{places},20000]" not in text


@pytest.fixture(scope="module")
def whole(ours):
    return after_step(small(ours[0]), OBJECTIVE, 1, 1)


def small(model):
    return replace(model, num_layers=2)


@pytest.mark.parametrize("microbatches, devices", [CUTS[1], CUTS[3]])
def test_the_same_numbers_however_a_batch_is_cut(microbatches, devices, ours, whole):
    weights, metrics = after_step(small(ours[0]), OBJECTIVE, microbatches, devices)
    for name, value in whole[1].items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, atol=1e-7, err_msg=name)
    for (path, a), (_, b) in zip(walk(weights), walk(whole[0]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, err_msg=path)


def test_work_is_what_jax_traces(ours):
    """The generator's head at its masks, once more forward for the samples; but for products with
    distances, as `tests/models/test_deberta.py` says."""
    objective = replace(OBJECTIVE, mask_ratio=0.48)  # 12 of 25 places: no chunk is filled up
    model = replace(ours[0], position_buckets=2 * T, max_distance=2 * T)
    leaf = lambda dtype: jax.ShapeDtypeStruct((len(LENGTHS), T), dtype)  # noqa: E731
    batch = Batch(leaf(jnp.int32), leaf(jnp.int32), leaf(jnp.int32), leaf(jnp.float32))
    loss = lambda w, b: objective.loss(model, w, b, KEYS, Compute(kernels="tpu")).total  # noqa: E731
    traced = jax.make_jaxpr(jax.grad(loss))(abstract_weights(objective.spec(model)), batch)
    works = objective.works(model, T)
    # rows of distances are projected once; each distance has one
    width, layers = model.num_heads * model.head_dim, 2 + LAYERS
    once = 3 * 2 * 2 * (4 * T) * model.embed_dim * width * layers
    found = dot_flops(traced.jaxpr) - once
    wanted = sum(work.flops_per_token() for work in works.values()) * len(LENGTHS) * T
    assert found == pytest.approx(wanted, rel=1e-3)


def test_both_models_are_planned(ours):
    run = make_run()
    run = replace(run, model=replace(ours[0], seq_len=SEQ_LEN), objective=OBJECTIVE)
    quick = Quick.of(run, parse_machine("v5e-8"))
    assert len(quick.layouts) == 2 and quick.step_s > 0
    with pytest.raises(UserError, match=r"mesh\.context: a deberta model"):
        Quick.of(replace(run, mesh=Mesh(context=2, fsdp=4)), parse_machine("v5e-8"))


def test_what_it_cannot_do_is_refused(ours):
    model = ours[0]
    with pytest.raises(UserError, match="generator_layers: 9 makes the generator larger"):
        Rtd(generator_layers=9).spec(model)
    with pytest.raises(UserError, match="'rtd' has no head for 'eurobert'"):
        Rtd().spec(EuroBert(
            vocab_size=V, embed_dim=16, mlp_dim=24, num_layers=2, num_heads=4, num_kv_heads=2,
            head_dim=6, seq_len=32,
        ))  # fmt: skip
    assert Rtd().generator(model).num_layers == model.num_layers // 2
