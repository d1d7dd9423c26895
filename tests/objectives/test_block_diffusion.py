"""Block diffusion and complementary masks: transformers with one dense mask, and what both must
equal exactly."""

from dataclasses import fields, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import init_weights
from lmwright.errors import UserError
from lmwright.models.llama import Llama
from lmwright.objectives.diffusion import Diffusion
from lmwright.objectives.mask_draws import complementary, mask_rows
from tests.in_memory import to_hf
from tests.objectives.cut_batches import after_step
from tests.objectives.test_diffusion import MASK, MODEL, T, V, drawn, exact_bound, rows

PLAIN = Diffusion(mask_token_id=MASK)


@cache
def fresh():
    return init_weights(MODEL.spec(), jax.random.key(0))


def packed():
    """Two rows of several documents, of which one ends in padding."""
    batch = rows(2)
    ids = np.array([[1] * 11 + [2] * 22 + [3] * 7, [1] * 17 + [2] * 14 + [0] * 9])
    at = np.array([[list(row).index(i) for i in row] for row in ids])
    at = np.arange(T) - at
    weight = (ids > 0) & (at > 0)
    arrays = (batch.tokens, ids, at, weight.astype(np.float32))
    return Batch(*map(jnp.asarray, arrays))


def torch_model():
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2, head_dim=6,
        num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=MODEL.norm_eps,
        rope_theta=MODEL.rope_theta, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    missing = model.load_state_dict({k: torch.tensor(v) for k, v in to_hf(MODEL, fresh()).items()})
    assert not missing.missing_keys and not missing.unexpected_keys
    return model


def dense_mask(batch, size, views):
    """float [B, 1, S, S] over all masked rows and the clean one behind each other."""
    ids, at = np.asarray(batch.segment_ids), np.asarray(batch.positions)
    b, block = len(ids), at // size
    same = ids[:, :, None] == ids[:, None, :]
    own = same & (block[:, :, None] == block[:, None, :])
    before = same & (block[:, :, None] > block[:, None, :])
    mask = np.zeros((b, views + 1, T, views + 1, T), bool)
    for view in range(views):
        mask[:, view, :, view], mask[:, view, :, views] = own, before
    mask[:, views, :, views] = own | before
    mask = mask.reshape(b, 1, (views + 1) * T, -1)
    return torch.tensor(np.where(mask, 0.0, np.finfo(np.float32).min), dtype=torch.float32)


@pytest.mark.parametrize("views, kernels", [("one", "cpu"), ("complementary", "reference")])
def test_loss_and_gradients_are_those_of_transformers(views, kernels):
    """Llama's blocks, rows behind each other with repeated positions, one mask over all."""
    size, batch, draws = 4, packed(), drawn(2)
    objective = replace(PLAIN, block_tokens=size, views=views)
    compute = Compute(kernels=kernels, loss_chunk_tokens=16)

    def total(w):
        made = objective.loss(MODEL, w, batch, draws, compute)
        return made.total, made

    (ours, loss), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(fresh())

    @jax.jit
    def drawn_masks(batch):
        block = objective.blocks(batch)
        masks = (mask_rows(batch, draws, block),)
        return masks if views == "one" else complementary(batch, *masks, block)

    masks = drawn_masks(batch)
    model, tokens = torch_model(), torch.tensor(np.asarray(batch.tokens), dtype=torch.long)
    noisy = [tokens.masked_fill(torch.tensor(np.asarray(m.masked)), MASK) for m in masks]
    n = len(masks)
    positions = torch.tensor(np.tile(np.asarray(batch.positions), (1, n + 1)))
    logits = model(
        input_ids=torch.cat([*noisy, tokens], 1), attention_mask=dense_mask(batch, size, n),
        position_ids=positions,
    ).logits[:, : n * T]  # fmt: skip
    each = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), tokens.repeat(1, n), reduction="none"
    )
    weights = np.concatenate([np.asarray(m.weights) for m in masks], 1)
    theirs = (each * torch.tensor(weights)).sum()
    np.testing.assert_allclose(ours, theirs.item(), rtol=1e-5)
    np.testing.assert_allclose(loss.weight, n * np.asarray(batch.loss_weight).sum(), rtol=1e-5)
    theirs.backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    for name, ours in to_hf(MODEL, grads).items():
        largest = np.abs(gradients[name]).max()
        np.testing.assert_allclose(ours, gradients[name], atol=2e-5 * largest, err_msg=name)


def test_a_block_of_the_whole_row_is_masked_diffusion():
    """The same masks, the same loss, whatever the clean row says."""
    batch, draws = rows(3, 33, 6), drawn(3)
    losses = [
        jax.jit(lambda w, each=each: each.loss(MODEL, w, batch, draws, Compute()))(fresh())
        for each in (PLAIN, replace(PLAIN, block_tokens=T))
    ]
    np.testing.assert_allclose(losses[0].total, losses[1].total, rtol=1e-6)
    assert float(losses[0].weight) == float(losses[1].weight)


def test_blocks_of_one_token_are_the_chain_of_likelihoods():
    """As a causal model of the same weights has them: all before, and a mask."""
    batch = packed()
    objective, draws = replace(PLAIN, block_tokens=1), drawn(2)
    found = jax.jit(lambda w: objective.loss(MODEL, w, batch, draws, Compute()))(fresh())
    shared = {f.name: getattr(MODEL, f.name) for f in fields(Llama) if hasattr(MODEL, f.name)}
    shared.pop("kind")
    causal = Llama(**shared)
    at = jnp.arange(T)

    @jax.jit
    def chance(row, place):
        """Log probability of a token, of those before it in its document and a mask there."""
        tokens = jnp.where(at == place, MASK, row.tokens)
        one = jax.tree.map(lambda a: a[None], replace(row, tokens=tokens))
        logits = causal.logits(fresh(), causal.hidden(fresh(), one, Compute())[0])[0, place]
        return jax.nn.log_softmax(logits)[row.tokens[place]]

    each = jax.jit(jax.vmap(lambda row: jax.vmap(partial(chance, row))(at)))(batch)
    np.testing.assert_allclose(found.total, -jnp.sum(each * batch.loss_weight), rtol=1e-5)


def test_blocks_have_exact_counts_and_times_of_their_own():
    batch, draws = packed(), drawn(2)
    block = replace(PLAIN, block_tokens=8).blocks(batch)
    masked, weights = map(np.asarray, jax.jit(mask_rows)(batch, draws, block))
    learned, start = np.asarray(batch.loss_weight) > 0, np.asarray(block.start)
    counts = []
    for row in range(2):
        for begin in np.unique(start[row]):
            mine = start[row] == begin
            n, k = learned[row, mine].sum(), masked[row, mine].sum()
            assert (1 <= k <= n) if n else k == 0
            np.testing.assert_allclose(weights[row, mine].sum(), n, rtol=1e-6)
            counts.append(k)
    assert len(set(counts)) > 3 and not masked[~learned].any()


def test_blocks_of_a_row_have_evenly_spread_times():
    """As many equal parts of [0, 1) as there are blocks have a time each."""
    batch, draws = rows(16, prompt=0), drawn(16)
    block = replace(PLAIN, block_tokens=8).blocks(batch)
    masked = jax.jit(mask_rows)(batch, draws, block).masked
    counts = np.sort(np.asarray(masked).reshape(16, -1, 8).sum(2), axis=1)
    parts = np.arange(T // 8 + 1) * 8 * 8 / T
    assert np.all(counts >= np.floor(parts[:-1]) + 1) and np.all(counts <= np.ceil(parts[1:]))


@pytest.mark.parametrize("size", [None, 1, 5])
def test_complementary_views_mask_each_token_once(size):
    batch, draws = rows(16, 33, 6), drawn(16)
    block = replace(PLAIN, block_tokens=size).blocks(batch)
    views = lambda *a: complementary(a[0], mask_rows(*a), a[2])  # noqa: E731
    first, second = jax.jit(views)(batch, draws, block)
    learned = np.asarray(batch.loss_weight) > 0
    np.testing.assert_array_equal(first.masked ^ second.masked, learned)
    assert not np.any(first.masked & second.masked)
    np.testing.assert_allclose(np.sum(first.weights + second.weights, 1), 2 * 27, rtol=1e-5)


def test_complementary_views_bound_the_likelihood():
    """Unbiased: the mean of both views over draws is the mean over all sets of masks."""
    model = replace(MODEL, vocab_size=9)
    w = jax.tree.map(lambda w: 4 * w, init_weights(model.spec(), jax.random.key(3)))
    tokens, num = np.array([4, 7, 5, 5, 8, 4, 6]), 4096
    shape = (num, len(tokens))
    at = jnp.broadcast_to(jnp.arange(len(tokens)), shape)
    ids, weight = jnp.ones(shape, jnp.int32), (at > 0).astype(jnp.float32)
    batch = Batch(jnp.broadcast_to(jnp.asarray(tokens), shape), ids, at, weight)
    objective = replace(PLAIN, views="complementary")
    loss = jax.jit(partial(objective.loss, model, compute=Compute()))(
        w, batch, objective.draws(jax.random.key(2), jnp.arange(num), num)
    )
    np.testing.assert_allclose(loss.weight, 2 * 6 * num, rtol=1e-5)
    expected = exact_bound(model, w, tokens)
    assert float(loss.total) / (2 * num) == pytest.approx(expected, rel=0.01)


def test_the_same_update_however_a_batch_is_cut():
    objective = replace(PLAIN, block_tokens=5, views="complementary")
    after = partial(after_step, MODEL, objective)
    (plain, one), (other, two) = after(1, 1), after(2, 4)
    np.testing.assert_allclose(one["loss"], two["loss"], rtol=1e-5)
    for ours, theirs in zip(*map(jax.tree.leaves, (other, plain)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


def test_work_and_bad_input():
    plain, blocks, twice = (
        replace(PLAIN, **options).works(MODEL, T)[""].flops_per_token()
        for options in ({}, {"block_tokens": 4}, {"views": "complementary"})
    )
    head = 6 * 16 * V
    attention = 12 * 4 * 6 * 2 * T  # two rows, of which a query sees half
    assert blocks == pytest.approx(2 * (plain - head / 2 - attention) + head / 2 + attention)
    assert twice == pytest.approx(2 * plain)
    with pytest.raises(UserError, match="block_tokens: 40 is not below the 40 tokens of a row"):
        replace(PLAIN, block_tokens=T).works(MODEL, T)
