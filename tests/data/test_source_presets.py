"""Ready sources: a preset is a whole source by the user's own run file, read from a hub."""

import io
import json
import os
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmwright.cli.main import main
from lmwright.config.run import Source
from lmwright.errors import UserError
from lmwright.formats.open import RUN_FILES, load_run
from lmwright.presets.sources import HUB, SOURCES, preset_of
from tests.data.user_run import RUN
from tests.fake_hub import FakeHub

pytest.importorskip("datasets")


def write_run(folder, sources):
    text = RUN.replace('sources = [{ path = "PATH", name = "words" }]', f"sources = [{sources}]")
    (folder / "run.toml").write_text(text.replace('"run"', f'"{folder}/run"').replace(
        'dir = "data"', f'dir = "{folder}/data"'))  # fmt: skip
    return str(folder / "run.toml")


@pytest.mark.parametrize("name", SOURCES)
def test_every_preset_is_a_source(name, tmp_path):
    run = load_run(write_run(tmp_path, f'{{ preset = "{name}" }}'))
    (source,) = run.data.sources
    assert source == Source(name=name, **SOURCES[name].fields)
    assert source.path.startswith(HUB) and preset_of(f"{source.path}@abc") is SOURCES[name]


def test_fields_beside_it_take_precedence_and_say_where_they_are_from(tmp_path, capsys):
    path = write_run(tmp_path, '{ preset = "the-stack", name = "code", text_column = "body" }')
    run, origin = RUN_FILES.resolve_layers(path)
    assert (run.data.sources[0].name, run.data.sources[0].text_column) == ("code", "body")
    assert origin["data", "sources", 0, "path"] == "preset the-stack"
    assert "toml:17" in origin["data", "sources", 0, "text_column"]
    with pytest.raises(UserError, match=r"toml:17: data\.sources\.preset: .*did you mean 'dclm'"):
        load_run(write_run(tmp_path, '{ preset = "dcml" }'))
    source = RUN_FILES.schema()["$defs"]["Source"]["properties"]
    assert source["preset"]["enum"] == list(SOURCES)
    assert main(["config", "presets"]) == 0
    said = capsys.readouterr().out
    assert (
        re.search(r"the-stack +source code", said)
        and "other, gated) https://huggingface.co/" in said
    )


def test_the_command_reads_it_and_says_the_license(tmp_path):
    out = io.BytesIO()
    lines = [f"the cat number {i} sat on the mat and looked around\n" * 5 for i in range(40)]
    pq.write_table(pa.table({"text": lines}), out)
    files = {"README.md": b"---\n---\n", "data/train-00000-of-00001.parquet": out.getvalue()}
    repo = SOURCES["dclm"].fields["path"].removeprefix(HUB)
    run = write_run(tmp_path, '{ preset = "dclm" }')
    for token, wanted in (("", "license of dclm: cc-by-4.0"), ("hf_secret", "is gated; accept")):
        with FakeHub(repo, files, token=token or None) as hub:
            loopback = {
                "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / f"cache{token}"), "HF_TOKEN": "",
                "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1",
                "NO_PROXY": "127.0.0.1",
            }  # fmt: skip
            words = ["prepare", run, f"data.dir={tmp_path}/data{token}"]
            done = subprocess.run(
                [sys.executable, "-m", "lmwright", *words],
                env=os.environ | loopback, capture_output=True, text=True,
            )  # fmt: skip
        said = done.stdout + done.stderr
        assert wanted in said and done.returncode == (2 if token else 0), said
        assert "Traceback" not in said
    assert f"https://huggingface.co/datasets/{repo}" in said
    manifest = json.loads((tmp_path / "data" / "normalize" / "manifest.json").read_text())
    assert list(manifest["counts"]["input"]) == ["dclm"]


def test_train_says_the_license_of_what_it_prepares(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path, '{ preset = "dclm" }')
    sampled = "data.sources.0.sample_tokens=1000"
    tokenizer = ["data.tokenizer.path=mine", "data.tokenizer.vocab_size=none"]
    monkeypatch.chdir(tmp_path)
    made = []
    monkeypatch.setattr("lmwright.data.missing.prepare_command", made.append)
    monkeypatch.setattr("lmwright.train.command.train_command", lambda *_args, **_options: 0)
    assert main(["train", str(run)]) == 2  # all of it is too much
    assert not made and "fetched from elsewhere" in capsys.readouterr().err
    assert main(["train", str(run), sampled, *tokenizer]) == 0
    assert len(made) == 1 and "license of dclm: cc-by-4.0" in capsys.readouterr().out
