"""`depth = n`: the rule by hand, what overrides it, what it refuses."""

import itertools
import math

import pytest

from lmwright.core.param import count_params
from lmwright.errors import UserError
from lmwright.formats.open import load_run, resolve_layers

FILE = """
recipe = "pretrain"
depth = 12
name = "x"
dir = "runs/x"
data.dir = "data/x"
data.tokenizer.vocab_size = 4096
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    return path


def test_the_rule_by_hand(path):
    run, origin = resolve_layers(path)
    model = run.model
    assert (model.num_layers, model.embed_dim, model.mlp_dim) == (12, 768, 2048)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (6, 3, 128)
    assert model.vocab_size == 4096 and model.seq_len == 2048
    # 12 layers of q, o: 768 x 768, k, v: 768 x 384, three of 768 x 2048; the tied table
    params = 12 * (2 * 768 * 768 + 2 * 768 * 384 + 3 * 768 * 2048) + 4096 * 768
    assert count_params(model.spec()) == params + 25 * 768  # and the norms
    tokens = run.train.steps * run.train.global_batch_size * 2048
    assert 20 * params <= tokens < 20 * params + run.train.global_batch_size * 2048
    flops = 20 * params * 12 * (72 * 768**2 + 12 * 768 * 2048)
    assert run.optim.learning_rate == pytest.approx(0.3118 * flops**-0.125, rel=5e-3)
    batch = 0.2920 * flops**0.3271
    assert abs(math.log2(run.train.global_batch_size * 2048 / batch)) <= 0.5
    assert origin["model", "embed_dim"] == "depth 12"
    assert run.optim.weight_decay == 0.1  # the recipe's


def test_what_is_said_wins(path):
    run = load_run(path, ["depth=4", "model.mlp_dim=640", "train.steps=700", "model.seq_len=256"])
    assert (run.model.num_layers, run.model.mlp_dim, run.train.steps) == (4, 640, 700)
    assert run.model.seq_len == 256


def test_the_model_may_say_its_vocabulary(path):
    assert load_run(path, ["model.vocab_size=5000"]).model.vocab_size == 5000


def test_deeper_is_more_of_everything(path):
    runs = [load_run(path, [f"depth={n}"]) for n in (2, 5, 12, 20, 32)]
    for small, large in itertools.pairwise(runs):
        assert count_params(small.model.spec()) < count_params(large.model.spec())
        assert small.optim.learning_rate > large.optim.learning_rate
        assert small.train.global_batch_size <= large.train.global_batch_size


@pytest.mark.parametrize(
    "overrides, says",
    [
        (["depth=0"], "command line: depth must be a number of layers from 1, not 0"),
        (["depth=deep"], "not 'deep'"),
        (["model.preset=llama-5m"], r"run\.toml:3: depth and model\.preset both"),
    ],
)
def test_refused(path, overrides, says):
    with pytest.raises(UserError, match=says):
        load_run(path, overrides)
