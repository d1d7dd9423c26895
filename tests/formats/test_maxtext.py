"""MaxText's checkpoints: its own logits for what it saved, computed here and by transformers."""

import json
import tarfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from lmwright.cli.main import main
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import walk
from lmwright.errors import UserError
from lmwright.formats.hf_stream import from_hf
from lmwright.formats.maxtext import MaxTextTensors
from lmwright.formats.weights import load_run_weights
from lmwright.models.gemma import Gemma
from lmwright.models.llama import Llama
from lmwright.nn.rope import Llama3Rope

MADE = Path(__file__).parent / "maxtext"  # by make.py
SIZES = dict(
    vocab_size=32, embed_dim=16, mlp_dim=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    seq_len=12,
)  # fmt: skip
LLAMA = SIZES | dict(norm_eps=1e-5, head="untied")
MODELS = {
    "llama": Llama(**LLAMA),
    "llama_apart_tied": Llama(**LLAMA | {"head": "tied"}),
    "llama31": Llama(
        **LLAMA, rope_theta=500_000.0, rope_scaling=Llama3Rope(factor=8.0, original_seq_len=8192)
    ),
    "qwen2": Llama(**LLAMA, bias="qkv"),
    "qwen3": Llama(**LLAMA, qk_norm="head"),
    "gemma2": Gemma(
        **SIZES | {"num_layers": 4}, layer_pattern=("local", "global"), window=5,
        logits_soft_cap=30.0, attention_soft_cap=50.0,
    ),
    "gemma3": Gemma(
        **SIZES | {"num_layers": 8}, layer_pattern=("local",) * 5 + ("global",), window=5,
        qk_norm="head", rope_theta=1e6, local_rope_theta=1e4,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of the checkpoints."""
    folder = tmp_path_factory.mktemp("maxtext")
    for name in MODELS:
        with tarfile.open(MADE / f"{name}.tar.xz") as tar:
            tar.extractall(folder, filter="data")
    return folder


def expected(name):
    """(ids, logits) of MaxText."""
    made = np.load(MADE / f"{name}.npz")
    return made["ids"], made["logits"]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_maxtext(saved, name):
    model, (ids, logits) = MODELS[name], expected(name)
    tied = "divided" if name == "llama_apart_tied" else None
    tensors = MaxTextTensors(saved / name, model, tied)
    w = from_hf(model, tensors, name, dtype=jnp.float32)
    tokens = jnp.asarray(ids)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    batch = Batch(tokens, jnp.ones_like(tokens), positions, jnp.ones(ids.shape))
    with jax.default_matmul_precision("highest"):
        hidden, _ = model.hidden(w, batch, Compute())
        # a tied table is rounded to bfloat16 there, whatever `dtype` says (`attend_on_embedding`)
        head = jax.tree.map(
            lambda leaf: (
                leaf.astype(jnp.bfloat16).astype(leaf.dtype) if model.head == "tied" else leaf
            ),
            model.head_weights(w),
        )
        ours = np.asarray(model.logits(head, hidden))
    assert np.abs(ours - logits).max() <= 1e-5 * np.abs(logits).max()


def write_run(folder, model):
    """A run file of a model."""
    fields = {name: value for name, value in LLAMA.items()}
    lines = [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
    (folder / "run.toml").write_text(
        'recipe = "pretrain"\nname = "x"\ndir = "run"\ndata.dir = "data"\n'
        'train = {steps = 1, global_batch_size = 1}\n[model]\nkind = "llama"\n' + "\n".join(lines)
    )


def test_the_command_writes_what_transformers_computes_alike(saved, tmp_path, capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, MODELS["llama"])
    checkpoint = str(saved / "llama" / "items")
    assert main(["import", checkpoint, "out", "--model", "run.toml"]) == 0
    ids, logits = expected("llama")
    theirs = transformers.AutoModelForCausalLM.from_pretrained("out", dtype=torch.float32)
    with torch.no_grad():
        got = theirs(torch.tensor(ids, dtype=torch.long)).logits.numpy()
    assert np.abs(got - logits).max() <= 1e-5 * np.abs(logits).max()

    refused = {
        ("--model", "run.toml", "model.num_layers=3"): "and the model wants [16, 3]",
        ("--model", "run.toml", "model.mlp_dim=25"): "and the model wants [25, 2, 16]",
        ("--model", "run.toml", "model.head=tied"): "holds decoder.logits_dense.kernel, which",
        ("--model", "run.toml", "model.qk_norm=head"): "self_attn.k_norm.weight is missing",
        ("--model", "modernbert-base"): "those of llama and gemma are read",
        ("--tied-logits", "plain"): "--tied-logits: needs --model",
        (): "lmwright import",
    }
    for words, message in refused.items():
        assert main(["import", checkpoint, "other", *words]) == 2, words
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1, (words, said)
    (tmp_path / "empty").mkdir()
    assert main(["import", "empty", "other", "--model", "run.toml"]) == 2
    assert "MaxText (no _METADATA); give the folder of one step" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_what_a_checkpoint_does_not_say_is_asked_for(saved, tmp_path):
    model = MODELS["llama_apart_tied"]
    with pytest.raises(UserError, match="give --tied-logits divided, or plain"):
        MaxTextTensors(saved / "llama_apart_tied", model)
    metadata = tmp_path / "bad" / "_METADATA"
    metadata.parent.mkdir()
    metadata.write_text("{}")
    with pytest.raises(UserError, match="is damaged"):
        MaxTextTensors(metadata.parent, model)


@pytest.mark.slow
def test_a_run_starts_from_a_checkpoint(saved, tmp_path, capsys, monkeypatch):
    """By train.init_from, whole and in part, by the user's own commands."""
    monkeypatch.chdir(tmp_path)
    words = {f"w{i}": i for i in range(30)} | {"<unk>": 30, "<end>": 31}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<unk>", "<end>"])
    backend.save("tokenizer.json")
    Path("tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    lines = (
        json.dumps({"text": " ".join(f"w{(i * j) % 30}" for j in range(9))}) for i in range(64)
    )
    Path("text.jsonl").write_text("\n".join(lines))
    write_run(tmp_path, MODELS["qwen3"])
    origin = saved / "qwen3"
    run = [
        "run.toml", "model.qk_norm=head", f"train.init_from={origin}",
        "data.sources=[{path='text.jsonl'}]",
        "data.tokenizer.path=tokenizer.json", "data.workers=1", "train.global_batch_size=8",
        "train.precision=fp32", "optim.learning_rate=1e-9", "metrics.trackers=[]",
    ]  # fmt: skip
    assert main(["prepare", *run]) == 0 and main(["train", *run]) == 0
    assert main(["train", *run, "dir=parts", 'train.init_parts=["layers"]']) == 0
    out = capsys.readouterr().out
    assert "fresh ones for embed, head, norm" in out, out
    expected = dict(walk(from_hf(MODELS["qwen3"], MaxTextTensors(origin, MODELS["qwen3"]), "")))
    for folder in ("run", "parts"):
        for name, leaf in walk(load_run_weights(folder)[1]):
            far = np.abs(np.asarray(leaf - expected[name], np.float32)).max()
            taken = folder == "run" or name.startswith("layers.")
            if name != "norm":  # ones in both
                assert far < 1e-7 if taken else far > 1e-4, (folder, name)
    assert main(["train", *run, "dir=other", "model.mlp_dim=25"]) == 2
    assert "and the model wants [25, 2, 16]" in capsys.readouterr().err
