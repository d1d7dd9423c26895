"""BitNet by the command line: trained in two sessions, continued from a llama, tuned with an
adapter, exported in every form."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.core.param import count_params, walk
from lmwright.formats.load import load_model
from lmwright.formats.open import load_run
from lmwright.formats.proof import logits
from lmwright.formats.ternary import codes_of
from lmwright.optim import KINDS
from lmwright.optim.build import build_optimizer, make_schedule
from lmwright.optim.kinds import TwoStage
from lmwright.presets import of_section
from lmwright.program.plan import resolve
from lmwright.program.stores import open_stores
from lmwright.program.trainee import Frozen
from lmwright.train.start import first_state
from tests.train.texts import PLAIN, write_run, write_texts

MODEL = """
kind = "bitnet"
mlp = "swiglu"
vocab_size = 320
embed_dim = 32
mlp_dim = 48
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 8
seq_len = 48
"""
SCHEDULE = """
[optim.schedule]
kind = "two-stage"
warmup_steps = 1
"""


def write(folder, model=MODEL, top="", train=""):
    folder.mkdir()
    write_texts(folder / "text.jsonl")
    return write_run(
        folder, model, recipe="pretrain-bitnet", top=top, train=PLAIN + train, more=SCHEDULE
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run, trained in two sessions."""
    folder = tmp_path_factory.mktemp("bitnet") / "a"
    path = write(folder)
    assert main(["prepare", path]) == 0
    assert main(["train", path]) == 0
    assert main(["train", path, "train.steps=6"]) == 0
    return folder


@pytest.fixture
def exported(trained, tmp_path):
    """Every form of the run's model, by name."""
    forms = {"run": str(trained / "run")}
    for name, dtype in (("floats", "fp32"), ("packed", "ternary"), ("m.gguf", "fp16")):
        forms[name] = str(tmp_path / name)
        assert main(["export", forms["run"], forms[name], "--dtype", dtype]) == 0
    return forms


def test_every_form_computes_the_same(exported):
    pytest.importorskip("gguf")
    loaded = {name: load_model(place) for name, place in exported.items()}
    ids = np.random.default_rng(0).integers(0, 320, (16, 2)).astype(np.int32)
    found = {
        name: logits(each.model, each.load(dtype=jnp.float32), ids) for name, each in loaded.items()
    }
    for name, model in ((name, each.model) for name, each in loaded.items()):
        assert model == loaded["run"].model, name
        apart = np.abs(found[name] - found["run"]).max((1, 2)) / np.abs(found["run"]).max()
        if name != "m.gguf":
            assert apart.max() < 1e-5, (name, apart)
            continue
        # F16 rounds the one scale of a matrix and the embedding, and activations between two of
        # their codes take one or the other
        assert np.median(apart) < 2e-2 and apart.max() < 5e-2, apart
    there, here = (dict(walk(loaded[name].load(dtype=jnp.float32))) for name in ("m.gguf", "run"))
    for path, param in walk(loaded["run"].model.spec()):
        if param.ternary:
            for pair in zip(there[path], here[path], strict=True):  # layer by layer
                codes = [codes_of(np.asarray(layer))[0] for layer in pair]
                np.testing.assert_array_equal(*codes, err_msg=path)
    packed = load_model(exported["packed"]).tensors
    assert packed.described("model.layers.0.mlp.up_proj.weight") == ("float32", (48, 32))


def test_an_adapter_is_merged_exactly(trained, tmp_path, capsys):
    """Rounded with its base in training as after merging; PEFT would add it behind."""
    path = write(
        tmp_path / "b", model="", top="lora.rank = 2\nlora.base = 'fp32'",
        train=f'init_from = "{trained}/run"',
    )  # fmt: skip
    assert main(["prepare", path]) == 0
    for change, told in (
        ("lora.base=int4", "lora.base: int4 would round the weights of a 'bitnet' model"),
        ("lora.dropout=0.1", "lora.dropout: an adapter of a 'bitnet' model is rounded with"),
    ):
        assert main(["train", path, change]) == 2
        assert told in capsys.readouterr().err
    assert main(["train", path]) == 0
    run, out = str(tmp_path / "b" / "run"), str(tmp_path / "merged")
    assert main(["export", run, out, "--dtype", "ternary"]) == 0
    capsys.readouterr()
    assert main(["adapters", "export", run, str(tmp_path / "peft")]) == 2
    assert "PEFT adds behind the rounding" in capsys.readouterr().err
    assert not (tmp_path / "peft").exists()


def test_a_llama_becomes_ternary(shared_data, tmp_path):
    """Its weights, with new norms that are one; the head and the data stay."""
    stories = shared_data / "models" / "stories260k"
    path = write(tmp_path / "c", model='\nkind = "bitnet"', train=f'init_from = "{stories}"')
    assert main(["prepare", path, "data.pack.seq_len=48"]) == 0
    run, start = load_run(path, ["data.pack.seq_len=48"]), load_model(stories)
    assert run.model.mlp == "swiglu" and run.model.num_layers == 5
    added = run.model.num_layers * (run.model.embed_dim + run.model.mlp_dim)
    assert count_params(run.model.spec()) == count_params(start.model.spec()) + added
    Path(run.dir).mkdir()
    plan = resolve(run, jax.devices()[:1])
    state = first_state(plan, open_stores(plan)["model"], Frozen({}))
    found, before = dict(walk(state["trained"]["model"]["weights"])), dict(walk(start.weights))
    for path, leaf in before.items():
        np.testing.assert_array_equal(found.pop(path), leaf, err_msg=path)
    assert set(found) == {"layers.attention_sub_norm", "layers.mlp_sub_norm"}
    assert all(np.all(np.asarray(leaf) == 1) for leaf in found.values())


def test_two_stages_of_rate_and_decay():
    """2B4T's: 1.5e-3 to 8e-4 at the middle, then 5e-4 to 0, and no decay in the second half."""
    optim = KINDS["adamw"](
        learning_rate=1.5e-3, schedule=TwoStage(warmup_steps=10), weight_decay_until=0.5
    )
    rate = make_schedule(optim, 110)
    found = [float(rate(step)) for step in (0, 5, 10, 54, 55, 110)]
    np.testing.assert_allclose(
        found, [0, 7.5e-4, 1.5e-3, 8e-4 + 7e-4 / 45, 5e-4, 0], rtol=1e-5, atol=1e-9
    )
    spec = of_section("model")["bitnet-500k"]().spec()["layers"]
    spec = {"q": spec["q"]}
    rule = build_optimizer(optim, spec, 110)
    w = {"q": jnp.ones(spec["q"].shape)}
    zeros = jax.tree.map(jnp.zeros_like, w)
    for step, decays in ((54, True), (55, False)):
        change, _ = rule.update(zeros, rule.init(w), w, schedule_step=jnp.int32(step))
        assert bool(jnp.any(change["q"] != 0)) == decays


def test_a_switch_before_the_warm_up_ends_is_refused(tmp_path, capsys):
    path = write(tmp_path / "d")
    assert main(["train", path, "optim.schedule.warmup_steps=2"]) == 2
    assert "optim.schedule.warmup_steps: 2 steps do not fit" in capsys.readouterr().err


def test_the_example_is_planned(capsys):
    example = Path(__file__).parents[2] / "examples" / "bitnet.toml"
    assert main(["plan", str(example), "--on", "v6e-64", "--quick"]) == 0
    assert "2,412,820,480" in capsys.readouterr().out
