"""Generation equals transformers token for token, and a model without a cache; a row depends
on nothing but its prompt, the seed and its number."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers

from lmwright.config.run import Tokenizer
from lmwright.core.compute import Compute
from lmwright.core.param import count_params, map_params
from lmwright.core.sharding import AXES, make_mesh, weight_shardings
from lmwright.core.weight import nbytes
from lmwright.data.tokens.tokenizer import train_tokenizer
from lmwright.errors import UserError
from lmwright.evals import generate as module
from lmwright.evals.generate import Sampling, bucket, generate, pad_prompts
from lmwright.evals.prompt_rows import row_of
from lmwright.evals.prompted import kept_weights, weights_of
from lmwright.formats.card import Facts
from lmwright.formats.loaded import LoadedModel
from lmwright.formats.proof import logits
from lmwright.models import cached
from tests.evals.small_model import GREEDY, MODEL, PROMPTS, SAMPLED
from tests.in_memory import to_hf


@pytest.fixture(scope="module")
def tokenizer():
    text = ["the cat sat on the mat and the dog sat on the log"] * 30
    return train_tokenizer(text, Tokenizer(vocab_size=300))


@pytest.fixture(scope="module")
def weights(tokenizer):
    rng = np.random.default_rng(3)

    def one(param):
        return rng.standard_normal(param.shape).astype("f4") * 0.3 + (param.fill or 0)

    w = map_params(one, MODEL.spec())
    w["embed"][tokenizer.eos_id] = 0.0  # a text does not end by itself
    return w


@pytest.fixture(scope="module")
def greedy(weights, tokenizer):
    return run(weights, tokenizer, PROMPTS, GREEDY)


def run(weights, tokenizer, prompts, settings, **options):
    return generate(MODEL, weights, tokenizer, prompts, settings, **options)


def test_greedy_equals_transformers_in_a_left_padded_batch(weights, tokenizer, greedy):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = MODEL.hf.config(MODEL)
    cls = getattr(transformers, config["architectures"][0])
    theirs = cls(cls.config_class(**config)).eval()
    tensors = {k: torch.tensor(v) for k, v in to_hf(MODEL, weights).items()}
    theirs.load_state_dict(tensors, strict=False)
    theirs.tie_weights()
    tokens, valid = pad_prompts(PROMPTS)
    assert tokens.shape == (4, 32) and valid.sum() == sum(map(len, PROMPTS))
    out = theirs.generate(
        input_ids=torch.tensor(tokens).long(), attention_mask=torch.tensor(valid).long(),
        max_new_tokens=45, do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert [list(one.tokens) for one in greedy] == out[:, tokens.shape[1] :].tolist()
    assert run(weights, tokenizer, PROMPTS, GREEDY, batch_rows=2) == greedy  # in slots
    assert len({one.tokens for one in greedy}) == 4
    assert {one.finish for one in greedy} == {"length"}


def test_cached_equals_uncached(weights, greedy):
    """Each token is the argmax of a plain forward pass over everything before it."""
    ids = np.zeros((4, 96), np.int32)
    for row, (prompt, one) in enumerate(zip(PROMPTS, greedy, strict=True)):
        whole = [*prompt, *one.tokens]
        ids[row, : len(whole)] = whole  # causal: what follows changes nothing
    best = logits(MODEL, weights, ids).argmax(-1)
    for row, (prompt, one) in enumerate(zip(PROMPTS, greedy, strict=True)):
        first = len(prompt) - 1
        assert best[row, first : first + 45].tolist() == list(one.tokens)


@pytest.mark.parametrize("unroll", [False, True])
def test_the_command_holds_the_weights_once(unroll, weights, tokenizer, greedy, monkeypatch):
    """Of float32 files: in the precision that computes, layers apart, no stack of them left."""
    tensors = to_hf(MODEL, weights)
    loaded = LoadedModel(MODEL, tensors, None, Facts("x"), Path("x"))
    stacks = []
    split = cached.as_list
    monkeypatch.setattr(
        cached,
        "as_list",
        lambda w, **free: (stacks.extend(jax.tree.leaves(w)), split(w, **free))[1],
    )
    before = {id(a) for a in jax.live_arrays()}
    compute = Compute(precision="bf16", kernels="cpu", unroll=unroll)
    w = weights_of(loaded, compute)
    assert bool(stacks) == unroll and all(stack.is_deleted() for stack in stacks)
    alive = sum(a.nbytes for a in jax.live_arrays() if id(a) not in before)
    assert alive == 2 * count_params(MODEL.spec()) == nbytes(w)
    assert kept_weights(loaded, compute) is kept_weights(loaded, compute)
    assert all(stack.is_deleted() for stack in stacks)
    again = generate(MODEL, w, tokenizer, PROMPTS, GREEDY, compute)
    plain = generate(MODEL, weights, tokenizer, PROMPTS, GREEDY, compute)
    assert again == plain and not any(leaf.is_deleted() for leaf in jax.tree.leaves(w))


def test_bf16_runs_in_bf16(weights, tokenizer, greedy):
    half = run(weights, tokenizer, PROMPTS, GREEDY, compute=Compute(precision="bf16"))
    assert sum(a.tokens[0] == b.tokens[0] for a, b in zip(greedy, half, strict=True)) >= 3
    assert half != greedy  # rounding shows sooner or later


def test_a_row_does_not_depend_on_its_neighbors(weights, tokenizer):
    first = run(weights, tokenizer, PROMPTS, SAMPLED)
    assert first == run(weights, tokenizer, PROMPTS, SAMPLED, batch_rows=2)
    others = run(weights, tokenizer, [[1], PROMPTS[1], list(range(30))], SAMPLED)
    assert others[1] == first[1]
    same = run(weights, tokenizer, [PROMPTS[1]] * 3, SAMPLED)
    assert same[1] == first[1] and len({one.tokens for one in same}) == 3
    assert run(weights, tokenizer, PROMPTS, replace(SAMPLED, seed=6))[1] != first[1]


def test_a_sharded_model_gives_the_same_text(weights, tokenizer, greedy):
    """As inside a training run: weights on a mesh of eight devices, rows that do not divide."""
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    sizes = dict.fromkeys(AXES, 1) | {"fsdp": 4, "tensor": 2}
    mesh = make_mesh(sizes, jax.devices()[:8])
    sharded = jax.tree.map(jax.device_put, weights, weight_shardings(MODEL.spec(), mesh))
    with jax.set_mesh(mesh):
        found = run(sharded, tokenizer, PROMPTS[1:2], GREEDY)
        assert jax.sharding.get_abstract_mesh().size == 8
    assert found == greedy[1:2]


def test_streamed_pieces_are_the_text(weights, tokenizer):
    pieces = {row: "" for row in range(4)}

    def on_text(row, text):
        assert text
        pieces[row] += text

    found = run(weights, tokenizer, PROMPTS, SAMPLED, on_text=on_text)
    assert [pieces[row] for row in range(4)] == [one.text for one in found]
    assert found == run(weights, tokenizer, PROMPTS, SAMPLED)
    for prompt, one in zip(PROMPTS, found, strict=True):
        whole = tokenizer.decode([*prompt, *one.tokens], skip_special=True)
        assert whole.endswith(one.text.lstrip("\ufffd"))


def test_a_gpu_is_asked_less_often_than_each_token(weights, tokenizer, greedy, monkeypatch):
    """Text that is shown meanwhile comes in pieces of eight tokens; it is the same."""
    calls, decode = [], module.decode
    monkeypatch.setattr(module, "decode", lambda *a: calls.append(a[2]) or decode(*a))
    gpu, pieces = Compute(kernels="gpu"), []  # in fp32 without kernels, as XLA alone
    found = run(weights, tokenizer, PROMPTS[:1], GREEDY, compute=gpu,
                on_text=lambda row, text: pieces.append(text))  # fmt: skip
    assert found == greedy[:1] and "".join(pieces) == found[0].text
    assert calls == [8] * -(-45 // 8)


def test_a_text_ends_where_it_should(weights, tokenizer, greedy):
    end = greedy[1].tokens[9]
    place = greedy[1].tokens.index(end)
    ended = run(weights, tokenizer, PROMPTS, GREEDY, end_ids=[end])[1]
    assert ended.finish == "end" and ended.tokens == greedy[1].tokens[:place]

    stop = greedy[1].text[6:9]
    stopped = run(weights, tokenizer, PROMPTS, replace(GREEDY, stop=("not there", stop)))[1]
    assert stopped.finish == "stop" and stop not in stopped.text
    assert stopped.text == greedy[1].text[: greedy[1].text.index(stop)]

    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    own = tokenizer.backend.id_to_token(end)  # is in no text, as a special token
    backend.add_special_tokens([tokenizers.AddedToken(own, special=True)])
    special = replace(tokenizer, backend=backend)
    assert run(weights, special, PROMPTS, replace(GREEDY, stop=(own,)))[1].tokens == ended.tokens

    full = run(weights, tokenizer, [list(range(90))], GREEDY)
    assert full[0].finish == "context" and len(full[0].tokens) == 6


def test_text_prompts(weights, tokenizer):
    """An empty one begins with the token between documents; special tokens are read."""
    eos, cat = tokenizer.eos_id, tokenizer.encode("the cat")
    prompts = ["", [eos], "the cat<|endoftext|>", [*cat, eos] * 6]
    found = run(weights, tokenizer, prompts, GREEDY)
    assert found[0].tokens == found[1].tokens and found[0].prompt_tokens == 1
    assert found[2].prompt_tokens == len(cat) + 1
    prompts = ["the cat", [eos, *cat], PROMPTS[1]]
    found = run(weights, tokenizer, prompts, GREEDY, prefix=[eos])
    assert found[0] == found[1] and found[2].prompt_tokens == len(PROMPTS[1])


def test_an_empty_prompt_begins_as_documents_do(tokenizer):
    """With bos, where the tokenizer has one."""
    ids = row_of(0, "", MODEL, replace(tokenizer, bos="a"), GREEDY, ()).ids
    assert ids == [tokenizer.backend.token_to_id("a")] != [tokenizer.eos_id]
    assert row_of(0, "", MODEL, tokenizer, GREEDY, ()).ids == [tokenizer.eos_id]


@pytest.mark.parametrize(
    "prompt, says",
    [
        (list(range(96)), "prompt 2: has 96 tokens and the model's context is 96"),
        ("cat " * 200, "prompt 2: has .* tokens and the model's context"),
        ([3, 304], "prompt 2: holds id 304, the model has 304"),
    ],
)
def test_prompts_that_do_not_fit(weights, tokenizer, prompt, says):
    with pytest.raises(UserError, match=says):
        run(weights, tokenizer, [[1], prompt], Sampling(4))


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED])
def test_logits_that_are_no_numbers_give_no_text(settings, weights, tokenizer):
    """One NaN in the last norm; before, the first token was written again and again."""
    broken = weights | {"norm": weights["norm"].copy()}
    broken["norm"][0] = np.nan
    with pytest.raises(UserError, match=r"gives logits that are not finite: the training diverged"):
        run(broken, tokenizer, PROMPTS[:2], settings)


def test_few_programs_are_compiled(weights, tokenizer):
    """Prompts of 17 to 32 tokens, other seeds and other sampling figures share programs."""
    run(weights, tokenizer, PROMPTS, SAMPLED)
    before = module.prefill._cache_size(), module.decode._cache_size()
    other = Sampling(40, temperature=0.4, top_k=300, seed=1)
    run(weights, tokenizer, [[1], [2, 3], list(range(19))], other)
    assert (module.prefill._cache_size(), module.decode._cache_size()) == before


def test_bucket():
    sizes = np.arange(1, 2000)
    found = np.array([bucket(int(size)) for size in sizes])
    assert (found >= sizes).all() and (np.diff(found) >= 0).all()
    assert len(set(found)) == 4 + 15 and (found[sizes > 128] - sizes[sizes > 128] < 128).all()
