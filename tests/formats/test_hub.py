"""Models by hub name, fetched by the real client from a hub on loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from lmwright.storage.hub import without_token
from tests.fake_hub import SHA, FakeHub

pytest.importorskip("huggingface_hub")

from lmwright.core.param import map_params
from lmwright.models.llama import Llama
from tests.in_memory import to_hf

MODEL = Llama(
    vocab_size=40, embed_dim=12, mlp_dim=20, num_layers=2, num_heads=3, num_kv_heads=1,
    head_dim=4, seq_len=16,
)  # fmt: skip
TOKEN = "hf_verysecret"

SCRIPT = """
import os, sys
import numpy as np
from lmwright.formats.load import load_model
from lmwright.errors import UserError
for name in sys.argv[1:]:
    if name.startswith("hf_"):
        os.environ["HF_TOKEN"] = name
        continue
    try:
        loaded = load_model(name)
        total = sum(float(np.abs(loaded.tensors[n]).sum()) for n in loaded.tensors)
        print(loaded.facts.origin, loaded.model.embed_dim, f"{total:.2f}")
    except UserError as error:
        print(error)
"""


def files():
    rng = np.random.default_rng(0)
    w = map_params(lambda p: rng.standard_normal(p.shape).astype("f4"), MODEL.spec())
    tensors = to_hf(MODEL, w)
    names = sorted(tensors)
    halves = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    index = {"weight_map": {name: file for file, held in halves.items() for name in held}}
    return {
        **{file: save({n: tensors[n] for n in held}) for file, held in halves.items()},
        "model.safetensors.index.json": json.dumps(index).encode(),
        "config.json": json.dumps(MODEL.hf.config(MODEL)).encode(),
        "LICENSE.txt": b"be kind",
        "pytorch_model.bin": b"\x80\x04never",
        "modeling_evil.py": b"raise SystemExit('run')",
        "consolidated.safetensors": b"twice the same weights",
        "onnx/model.json": b"{}",
        "original/params.json": b"{}",
    }, sum(float(np.abs(t).sum()) for t in tensors.values())


def ask(hub, tmp_path, *names, script=SCRIPT, **more):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    env |= {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src"),
    } | more
    command = [sys.executable, "-c", script, *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.fixture(scope="module")
def fetched(tmp_path_factory):
    """(folder of what was fetched, the hub, which is gone, what was printed); it takes a token."""
    folder = tmp_path_factory.mktemp("fetched")
    with FakeHub("acme/tiny", files()[0], "models", token=TOKEN) as hub:
        names = ("hf://acme/tiny", "hf://acme/tiny@main")
        return folder, hub, ask(hub, folder, *names, HF_TOKEN=TOKEN)


def test_a_gated_model_with_a_token(fetched, tmp_path):
    """Only what is needed is fetched, the commit is pinned, and the token is in no output."""
    _, hub, (said, noise) = fetched
    held, total = files()
    assert said == [f"Imported from hf://acme/tiny@{SHA}. 12 {total:.2f}"] * 2
    names = {path.rpartition("/")[2] for path in hub.asked if path.startswith("GET /acme")}
    assert names >= {"a.safetensors", "b.safetensors", "config.json", "LICENSE.txt"}
    assert not any(".bin" in p or ".py" in p or "consolidated" in p for p in hub.asked)
    assert not any("onnx" in p or "original" in p for p in hub.asked)
    with FakeHub("acme/tiny", held, "models", token=TOKEN) as hub:
        names = ("hf://acme/tiny", "hf_wrongsecret", "hf://acme/tiny")
        (refused, wrong), more = ask(hub, tmp_path / "other", *names)
        assert "is gated; accept its terms" in refused and "HF_TOKEN" in refused
        assert "is gated" in wrong and {None, "Bearer hf_wrongsecret"} <= hub.given
    everything = "".join([*said, refused, wrong, noise, more])
    assert TOKEN not in everything and "hf_wrongsecret" not in everything


def test_params_fetches_the_config_alone(tmp_path):
    held, _ = files()
    count = "import sys; from lmwright.formats.open import params_command as p; p(*sys.argv[1:])"
    with FakeHub("acme/tiny", held, "models") as hub:
        said, _ = ask(hub, tmp_path, "hf://acme/tiny", script=count)
        fetched = {path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path}
    assert said[0].startswith("hf://acme/tiny: llama, 2 layers") and fetched == {"config.json"}


def test_what_there_is_not(tmp_path):
    held, _ = files()
    pickled = {"config.json": held["config.json"], "pytorch_model.bin": b"\x80\x04never"}
    names = (
        "hf://acme/tiny", "hf://acme/other", "hf://acme/tiny@nowhere", "hf://acme",
        "hf://datasets/acme/tiny", "hf://acme/tiny/model.bin", "hf://acme/tiny/m.gguf",
    )  # fmt: skip
    with FakeHub("acme/tiny", pickled, "models") as hub:
        said, _ = ask(hub, tmp_path, *names)
        assert not any("pytorch_model" in path for path in hub.asked)
    wanted = (
        "only pickled weights (pytorch_model.bin)", "no such model", "no revision 'nowhere'",
        "not the name of a model", "not the name of a model", "not the name of a model",
        "no such file; GGUF files there: none",
    )  # fmt: skip
    assert len(said) == len(names)
    for line, part in zip(said, wanted, strict=True):
        assert part in line


def test_nobody_answers(fetched):
    """Offline, what was fetched before is there, and nothing else."""
    folder, hub, _ = fetched  # gone again, its address is known
    _, total = files()
    names = ("hf://acme/tiny", "hf://acme/other")
    said, _ = ask(hub, folder, *names, HF_HUB_OFFLINE="1", HF_TOKEN=TOKEN)
    assert said[0] == f"Imported from hf://acme/tiny@{SHA}. 12 {total:.2f}"
    assert "was not fetched before" in said[1] and TOKEN not in said[1]


def test_errors_hold_no_token_of_a_login(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_of_the_login")
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_shell")
    assert without_token("hf_of_the_login, hf_of_the_shell: refused") == "***, ***: refused"
