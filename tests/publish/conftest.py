"""A hub on loopback that takes what the real client writes, and runs to publish there."""

from dataclasses import replace
from pathlib import Path

import pytest

from lmwright.config.run import Tokenizer
from lmwright.formats.convert import export_command
from lmwright.program.lora_section import LowRank
from tests.fake_hub import WritableHub
from tests.saved_run import save_run, tiny_run

TOKEN = "hf_verysecretTOKENverysecret"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The hub, which the client of this process asks with the token; nothing holds the token
    afterwards but the header of requests."""
    constants = pytest.importorskip("huggingface_hub.constants")
    with WritableHub(TOKEN) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub
        assert not any(TOKEN.encode() in body for body in hub.bodies)


@pytest.fixture(scope="package", autouse=True)
def no_comparison():
    """Exports are compared with transformers elsewhere, and there it must not be left out."""
    from lmwright.formats import proof, reference

    nothing = reference.Reference(None, reference.NOT_INSTALLED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "transformers_says", lambda *_, **__: nothing)
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A run whose data is prepared."""
    return tiny_run(tmp_path_factory.mktemp("publish"))


@pytest.fixture(scope="session")
def run_dir(tiny):
    """A run directory with two checkpoints, of which the data is called as on the hub."""
    folder = save_run(tiny)
    text = (folder / "run.toml").read_text()
    path = tiny.data.sources[0].path
    assert path in text
    (folder / "run.toml").write_text(text.replace(path, "hf://datasets/acme/cats"))
    return folder


@pytest.fixture(scope="session")
def lora_dir(tiny, hf_dir, tmp_path_factory):
    """A run directory of an adapter on a base in a folder."""
    root = tmp_path_factory.mktemp("lora")
    train = replace(tiny.train, init_from=str(hf_dir))
    data = replace(tiny.data, tokenizer=Tokenizer(path=str(hf_dir)))
    lora = LowRank(rank=3)
    return save_run(replace(tiny, dir=str(root / "run"), data=data, train=train, lora=lora))


@pytest.fixture(scope="session")
def hf_dir(run_dir, tmp_path_factory) -> Path:
    """A Hugging Face folder as lmwright exports it."""
    out = tmp_path_factory.mktemp("hf") / "my model"
    export_command(run_dir, out)
    return out
