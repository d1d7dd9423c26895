"""Text of masked diffusion models: a plain loop, and diffusers, token for token."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.config.run import Tokenizer
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.copies import copies_shardings
from lmwright.core.param import map_params
from lmwright.data.tokens.tokenizer import save_tokenizer, train_tokenizer
from lmwright.errors import UserError
from lmwright.evals.fill import Filling
from lmwright.evals.generate import Sampling, generate
from lmwright.models.llada import Llada
from lmwright.nn.attention import masked_attention
from tests.evals.small_model import MODEL as DECODER
from tests.in_memory import export_hf, to_hf

MODEL = Llada(
    vocab_size=304, embed_dim=48, mlp_dim=88, num_layers=2, num_heads=6, num_kv_heads=2,
    head_dim=10, seq_len=96, rope_theta=3001.0, bias="attention",
)  # fmt: skip
PROMPTS = [[7, 12], list(range(40, 63)), [250, 4, 4, 99, 8]]
NEW = 12


@pytest.fixture(scope="module")
def tokenizer():
    text = ["the cat sat on the mat and the dog sat on the log"] * 30
    special = ("<|endoftext|>", "<|mask|>")
    return train_tokenizer(text, Tokenizer(vocab_size=300, special_tokens=special))


@pytest.fixture(scope="module")
def weights(tokenizer):
    rng = np.random.default_rng(3)

    def one(param):
        return rng.standard_normal(param.shape).astype("f4") * 0.2 + (param.fill or 0)

    w = map_params(one, MODEL.spec())
    w["head"][:, tokenizer.eos_id] = 0.0  # a text does not end by itself
    return w


def filled(w, tokenizer, prompts=PROMPTS, model=MODEL, filling=None, **settings):
    """Ids of each continuation."""
    texts = generate(
        model, w, tokenizer, prompts, Sampling(NEW, **settings), Compute(),
        filling=filling or Filling(),
    )  # fmt: skip
    assert all(text.finish == "length" for text in texts)
    return [list(text.tokens) for text in texts]


@jax.jit
def logits_of(w, tokens, mask):
    """float32 [T, V] of a row alone, whose queries see what a dense mask [T, T] says."""
    row = tokens[None]
    ids = jnp.ones_like(row)
    batch = Batch(row, ids, jnp.arange(len(tokens))[None], ids.astype(jnp.float32))
    kernel = lambda q, k, v, ids, scoring: masked_attention(q, k, v, mask[None], scoring)  # noqa: E731
    return MODEL.logits(w, MODEL.hidden_by(kernel, w, batch, Compute())[0])[0]


def plain_loop(w, tokenizer, number, prompt, filling, temperature=0.0, seed=0, predicts="own"):
    """LLaDA's generate.py with one row, and the random numbers of the row's own key."""
    mask, start = tokenizer.mask_id, len(prompt)
    block = filling.block_tokens or NEW
    steps = filling.steps or block
    x = np.array([*prompt, *[mask] * NEW])
    key = jax.random.fold_in(jax.random.key(seed), number)

    def seen(x, end):
        shown = x if filling.sees == "text" else x[:end]
        mask = np.ones((len(shown), len(shown)), bool)
        if filling.sees == "blocks":  # those of the prompt, then those of the text
            at = np.arange(len(shown))
            number = np.where(at < start, at // block, start + (at - start) // block)
            mask = number[:, None] >= number
        out = np.asarray(logits_of(w, shown, mask), np.float64)
        return np.concatenate([out[:1], out[:-1]]) if predicts == "next" else out

    for i in range(-(-NEW // block)):
        begin, end = start + i * block, min(start + (i + 1) * block, start + NEW)
        share, rest = divmod(end - begin, steps)
        for step in range(steps):
            logits = seen(x, end)[begin:end]
            if filling.guidance:
                without = x.copy()
                without[:start] = mask
                plain = seen(without, end)[begin:end]
                logits = plain + (filling.guidance + 1) * (logits - plain)
            draw = jax.random.fold_in(key, i * steps + step)
            noise = jax.random.gumbel(jax.random.fold_in(draw, 0), (block, logits.shape[1]))
            noisy = logits + temperature * np.asarray(noise)[: end - begin]
            noisy[:, mask] = -np.inf
            token = noisy.argmax(-1)
            chance = np.exp(logits - logits.max(-1, keepdims=True))
            chance = (chance / chance.sum(-1, keepdims=True))[np.arange(end - begin), token]
            if filling.first == "random":
                uniform = jax.random.uniform(jax.random.fold_in(draw, 1), (block,))
                chance = np.asarray(uniform)[: end - begin]
            chance = np.where(x[begin:end] == mask, chance, -np.inf)
            count = max(share + (step < rest), np.sum(chance > (filling.threshold or np.inf)))
            for place in np.argsort(-chance, kind="stable")[:count]:
                if chance[place] > -np.inf:
                    x[begin + place] = token[place]
    assert not np.any(x == mask)
    return x[start:].tolist()


WAYS = {
    "whole": (Filling(), {}),
    "few steps": (Filling(steps=5), {}),
    "blocks": (Filling(block_tokens=4, steps=3), {}),
    "uneven blocks": (Filling(block_tokens=5, steps=2), {}),
    "prefix": (Filling(block_tokens=4, steps=2, sees="prefix"), {}),
    "seen by blocks": (Filling(block_tokens=4, steps=2, sees="blocks"), {}),
    "threshold": (Filling(steps=6, threshold=0.3), {}),
    "guided": (Filling(block_tokens=6, steps=3, guidance=1.5), {}),
    "random": (Filling(steps=4, first="random"), {}),
    "temperature": (Filling(block_tokens=6, steps=3), {"temperature": 0.9, "seed": 7}),
    "guided and drawn": (  # in place of several ways that are slow tests
        Filling(block_tokens=5, steps=3, guidance=1.5), {"temperature": 0.9, "seed": 7},
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_of_prompts_equals_a_plain_loop_for_each(weights, tokenizer, way):
    filling, settings = WAYS[way]
    ours = filled(weights, tokenizer, filling=filling, **settings)
    theirs = [
        plain_loop(weights, tokenizer, number, prompt, filling, **settings)
        for number, prompt in enumerate(PROMPTS)
    ]
    assert ours == theirs


def test_the_ways_are_different(weights, tokenizer):
    found = [str(filled(weights, tokenizer, filling=f, **s)) for f, s in WAYS.values()]
    assert len(set(found)) == len(WAYS)


def test_a_model_whose_outputs_predict_the_next_token(weights, tokenizer):
    from dataclasses import replace

    filling = Filling(steps=4)
    ours = filled(weights, tokenizer, model=replace(MODEL, predicts="next"), filling=filling)
    for number, (row, prompt) in enumerate(zip(ours, PROMPTS, strict=True)):
        assert row == plain_loop(weights, tokenizer, number, prompt, filling, predicts="next")


@pytest.mark.parametrize("new, block, steps", [(8, 8, 8), (8, 8, 3), (12, 4, 4), (16, 4, 2)])
def test_tokens_equal_those_of_diffusers(weights, tokenizer, new, block, steps):
    """Its pipeline on transformers' EuroBERT; it sees nothing behind a block."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("diffusers", minversion="0.42", reason="its LLaDA 2 pipeline is compared")
    from diffusers import BlockRefinementScheduler, LLaDA2Pipeline

    config = MODEL.hf.config(MODEL)
    cls = getattr(transformers, config["architectures"][0])
    theirs = cls(cls.config_class(**config)).eval()
    tensors = {k: torch.tensor(v) for k, v in to_hf(MODEL, weights).items()}
    theirs.load_state_dict(tensors)
    prompt = list(range(40, 40 + 2 * block))
    pipeline = LLaDA2Pipeline(theirs, BlockRefinementScheduler(), None)
    out = pipeline(
        input_ids=torch.tensor([prompt]), gen_length=new, block_length=block,
        num_inference_steps=steps, temperature=0.0, threshold=2.0, editing_threshold=None,
        eos_early_stop=False, mask_token_id=tokenizer.mask_id, output_type="seq",
    )  # fmt: skip
    expected = np.asarray(out.sequences)[0].tolist()
    sees = "prefix" if block < new else "text"
    (ours,) = generate(
        MODEL, weights, tokenizer, [prompt], Sampling(new), Compute(),
        filling=Filling(block_tokens=block, steps=steps, sees=sees),
    )  # fmt: skip
    assert list(ours.tokens) == expected[-new:]


def test_a_text_ends_where_its_end_is_filled_in(weights, tokenizer):
    sure = {**weights, "head": weights["head"].copy()}
    end = tokenizer.eos_id
    tokens = filled(weights, tokenizer)[0]
    sure["head"][:, end] = 1.001 * sure["head"][:, tokens[5]]
    (text,) = generate(MODEL, sure, tokenizer, PROMPTS[:1], Sampling(NEW), Compute())
    assert text.finish == "end" and len(text.tokens) < NEW
    stops = tokenizer.decode(tokens[3:5])
    (text,) = generate(
        MODEL, weights, tokenizer, PROMPTS[:1], Sampling(NEW, stop=(stops,)), Compute(),
    )  # fmt: skip
    assert text.finish == "stop" and stops not in text.text


@pytest.mark.parametrize(
    "filling, settings, told",
    [
        ({"steps": 13}, {}, "steps: 13 is more than the 12 tokens of a block"),
        ({"block_tokens": 13}, {}, "block_tokens: 13 is more than max_new_tokens 12"),
        ({"sees": "prefix"}, {}, "sees: 'prefix' has no effect with a single block"),
        ({"sees": "blocks"}, {}, "sees: 'blocks' needs block_tokens"),
        (
            {},
            {"temperature": 1.0, "top_k": 3},
            "top_k, top_p: have no effect on a model that fills",
        ),
        ({}, {"top_p": 0.5}, "top_k, top_p: have no effect on a model that fills"),  # at 0
        ({"threshold": 1.5}, {}, "threshold: 1.5 must be"),
        ({"threshold": 0.5, "first": "random"}, {}, "threshold: has no effect"),
        ({"guidance": -1.0}, {}, "guidance: -1.0 must be"),
    ],
)
def test_settings_without_effect(weights, tokenizer, filling, settings, told):
    with pytest.raises(UserError, match=told):
        filled(weights, tokenizer, filling=Filling(**filling), **settings)


def test_models_and_tokenizers_that_do_not_fit(weights, tokenizer):
    with pytest.raises(UserError, match="steps: for models that fill in masks, which 'llama' does"):
        generate(DECODER, {}, tokenizer, ["x"], Sampling(2), Compute(), filling=Filling(steps=2))
    plain = train_tokenizer(["the cat sat on the mat"] * 9, Tokenizer(vocab_size=270))
    with pytest.raises(UserError, match=r"has no mask token, .* --special --add '<\|mask\|>'"):
        generate(MODEL, weights, plain, ["x"], Sampling(2), Compute())


def test_prompts_of_a_file(weights, tokenizer, tmp_path):
    """Through the command, where one of several devices computes."""
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    export_hf(MODEL, weights, tmp_path / "tokenizer", tmp_path / "model")
    texts = ["the cat", "on the mat sat", "dog"]
    (tmp_path / "p.txt").write_text("\n".join(texts) + "\n")
    words = ["--prompts", str(tmp_path / "p.txt"), "--out", str(tmp_path / "out.jsonl")]
    words += ["--max-new-tokens", str(NEW), "--block-tokens", "4", "--steps", "3"]
    words += ["--precision", "fp32", "--devices", "4"]
    assert main(["generate", str(tmp_path / "model"), *words]) == 0
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    settings, filling = Sampling(NEW), Filling(block_tokens=4, steps=3)
    wanted = generate(MODEL, weights, tokenizer, texts, settings, Compute(), filling=filling)
    assert [json.loads(line)["text"] for line in lines] == [one.text for one in wanted]
    whole = jax.device_put(weights, copies_shardings(MODEL.spec(), 3))  # as Python's load_model
    assert generate(MODEL, whole, tokenizer, texts, settings, Compute(), filling=filling) == wanted
