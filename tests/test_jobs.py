"""The run files of examples/jobs: planned as they are, and run at a tiny size by a user's own
commands."""

import json
import random
import shutil
from pathlib import Path

import pytest

from lmwright.cli.main import main
from lmwright.formats.open import load_run
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.quick import Quick
from tests.data.chat_problem import chat_tokenizer
from tests.test_long_examples import command, tiny_folder, words_of

JOBS = Path(__file__).resolve().parents[1] / "examples" / "jobs"
PARAMETERS = {
    "kisoku-3b": 3_325_627_392,
    "kisoku-3b-alpaca": 3_325_627_392,
    "kisoku-3b-code": 3_325_627_392,
    "kisoku-3b-biomedical": 3_325_627_392,
    "sizes": 7_544_016_896,  # 6,738,415,616 of Llama 2 7B, and eight reasoning layers
    "qwen3-lora": 4_022_468_096,
    "pod-llama": 113_555_520,
    "pod-deberta": 326_295_297,
    "pod-modernbert": 209_354_240,
    "pod-eurobert": 309_873_408,
    "pod-diffusion": 187_283_520,
    "pod-xlstm": 281_644_896,
    "pod-bitnet": 113_579_328,
}


def test_every_job_is_planned():
    assert {path.stem for path in JOBS.glob("*.toml")} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_job_fits_the_machine_that_it_names(name):
    run = load_run(JOBS / f"{name}.toml")
    quick = Quick.of(run, parse_machine(run.plan.on))
    assert quick.plan.num_params == PARAMETERS[name] and quick.fits


def test_the_command_plans_for_that_machine(capsys):
    assert main(["plan", str(JOBS / "pod-diffusion.toml"), "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["slice"] == "v4-32"


def test_settings_are_those_of_the_jobs():
    kisoku, alpaca, lora, sizes = (
        load_run(JOBS / f"{name}.toml")
        for name in ("kisoku-3b", "kisoku-3b-alpaca", "qwen3-lora", "sizes")
    )
    assert kisoku.data.sources[0].path.startswith("hf://datasets/mlfoundations/dclm")
    assert kisoku.data.tokenizer.path == "hf://openai-community/gpt2"
    assert (kisoku.train.global_batch_size, kisoku.model.seq_len) == (512, 2048)
    assert (kisoku.train.steps, kisoku.checkpoint.save_every_steps) == (100_000, 5000)
    assert (alpaca.train.steps, alpaca.train.init_from) == (20_000, kisoku.dir)
    assert (lora.lora.rank, lora.lora.alpha, lora.optim.learning_rate) == (16, 32, 2e-4)
    assert [a.name for a in lora.lora.adapters] == ["code", "maths", "general", "stories"]
    assert (sizes.model.seq_len, sizes.model.rope_scaling.factor) == (32_768, 8.0)
    assert (sizes.model.reasoning.every, sizes.mesh.fsdp, sizes.mesh.tensor) == (4, 8, 8)
    stores = [load_run(path).data for path in sorted(JOBS.glob("pod-*.toml"))]
    parts = {repr((d.dir, d.normalize, d.tokenizer, d.pack, d.sources)) for d in stores}
    assert len(stores) == 7 and len(parts) == 1


def test_600b_does_not_fit_a_v4_32():
    run = load_run(JOBS / "sizes.toml", ["model.preset=600b", "mesh.fsdp=2"])
    quick = Quick.of(run, parse_machine("v4-32"))
    state_bytes = 16 * quick.plan.num_params / 16  # float32: weights, moments, gradient; 16 chips
    assert quick.memory.peak > state_bytes > 15 * quick.limit_bytes and not quick.fits


SMALL = [
    "train.precision=fp32", "train.global_batch_size=8", "train.num_microbatches=1",
    "train.steps=2", "metrics.trackers=[]", "data.workers=1", "data.holdout_fraction=0.1",
    "eval.max_rows=8", "checkpoint.save_every_steps=1", "optim.schedule.warmup_steps=1",
]  # fmt: skip
SHAPE = {"embed_dim": 32, "mlp_dim": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}


def sized(**fields):
    return [f"model.{name}={value}" for name, value in fields.items()]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with texts, as the jobs find them."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(3)
    Path("text").mkdir()
    for name, key in (("text/a", "text"), ("code", "content"), ("papers", "text")):
        rows = [json.dumps({key: words_of(60, rng)}) for _ in range(80)]
        Path(f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    asked = [
        {"instruction": words_of(4, rng), "input": "", "output": words_of(5, rng)}
        for _ in range(80)
    ]
    Path("alpaca.json").write_text(json.dumps(asked))
    for task in ("code", "maths", "general", "stories"):
        rows = [
            json.dumps({"messages": [
                {"role": "user", "content": words_of(4, rng)},
                {"role": "assistant", "content": words_of(6, rng)},
            ]})
            for _ in range(60)
        ]  # fmt: skip
        Path(f"{task}-chat.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path


def job(name):
    """The run file of a job with its folders here."""
    text = (JOBS / f"{name}.toml").read_text().replace("gs://BUCKET/", "")
    Path(f"{name}.toml").write_text(text)
    return f"{name}.toml"


@pytest.mark.slow
def test_kisoku_from_pretraining_to_a_file_of_8_bits(folder, shared_data):
    gpt2 = shared_data / "tokenizers" / "gpt2"
    tiny = [*SMALL, *sized(**SHAPE, head_dim=8, seq_len=64), f"data.tokenizer.path={gpt2}"]
    sources = {
        "kisoku-3b": "[{path='text'}]",
        "kisoku-3b-alpaca": "[{path='alpaca.json', format='json', rows='alpaca'}]",
        "kisoku-3b-code": "[{path='code.jsonl', text_column='content'}]",
        "kisoku-3b-biomedical": "[{path='papers.jsonl'}]",
    }
    for name, source in sources.items():
        words = [job(name), *tiny, f"data.sources={source}", "mesh.fsdp=8"]
        command("prepare", *words)
        command("train", *words)
    done = load_run("runs/kisoku-alpaca")
    assert done.train.init_from == "runs/kisoku" and Path("runs/kisoku/checkpoints/2").is_dir()
    for name in ("kisoku-code", "kisoku-biomedical", "kisoku-alpaca"):
        assert json.loads(Path(f"runs/{name}/init.json").read_text())["checkpoint"] is None
    command("eval", "runs/kisoku-alpaca", "--max-rows", 8)
    command("export", "runs/kisoku-alpaca", "kisoku-q8.gguf", "--dtype", "q8_0")


@pytest.mark.slow
@pytest.mark.parametrize("size", ["7b", "600b"])
def test_a_size_from_jsonl_and_a_tokenizer_model(folder, shared_data, size):
    shutil.copy(shared_data / "tokenizers" / "llama2" / "tokenizer.model", "tokenizer.model")
    tiny = sized(**SHAPE | {"num_layers": 4}, head_dim=8, seq_len=128, vocab_size=32_000)
    tiny += ["model.reasoning.mlp_dim=16", "model.rope_scaling.original_seq_len=16"]
    words = [job("sizes"), f"model.preset={size}", *tiny, *SMALL, "mesh.fsdp=4", "mesh.tensor=2"]
    command("train", *words)  # which prepares
    run = load_run("runs/decoder")
    assert run.model.reasoning.every == 4 and run.model.rope_scaling.factor == 8.0
    command("generate", "runs/decoder", "--prompt", "abc", "--max-new-tokens", 4)


@pytest.mark.slow
def test_four_adapters_are_rehearsed_trained_merged_and_converted(folder, capsys):
    from lmwright.models.llama import Llama

    pytest.importorskip("peft")
    tokenizer = chat_tokenizer()
    model = Llama(
        **SHAPE, vocab_size=tokenizer.vocab_size, head_dim=16, seq_len=64, qk_norm="head",
        norm_eps=1e-6, rope_theta=1e6,
    )  # fmt: skip
    tiny_folder(model, "qwen3", tokenizer)
    tiny = [
        *SMALL, *sized(**SHAPE, vocab_size=tokenizer.vocab_size, head_dim=16, seq_len=64),
        "train.init_from=qwen3", "data.tokenizer.path=qwen3", "mesh.fsdp=8", "train.steps=4",
        "train.global_batch_size=32", "data.chat.template=chatml",
    ]  # fmt: skip
    run = job("qwen3-lora")
    for task in ("code", "maths", "general", "stories"):
        source = f"data.sources=[{{path='{task}-chat.jsonl', rows='messages'}}]"
        command("prepare", run, f"data.dir=data/{task}", source, *tiny)
    command("train", run, *tiny, "plan.on=cpu:8", "--rehearse", "go")
    assert capsys.readouterr().out.count("opens in PEFT") == 4
    command("adapters", "export", "runs/qwen3-lora", "code", "--adapter", "code")
    command("adapters", "merge", "qwen3", "code", "qwen3-code")
    command("export", "qwen3-code", "qwen3-code.gguf", "--dtype", "q8_0")
    assert load_run("runs/qwen3-lora").lora.alpha == 32 and Path("qwen3-code.gguf").exists()


@pytest.mark.slow
def test_the_jobs_of_a_pod_start_from_one_store(folder):
    small = [
        *SMALL, "data.tokenizer.vocab_size=400", "data.pack.seq_len=64", "mesh.fsdp=8",
        *sized(vocab_size=400, embed_dim=32, mlp_dim=48, num_layers=2, num_heads=4, seq_len=64),
    ]  # fmt: skip
    grouped = sized(num_kv_heads=2, head_dim=8)
    more = {
        "llama": grouped, "eurobert": grouped, "diffusion": grouped,
        "modernbert": sized(num_kv_heads=4), "bitnet": [*grouped, "optim.schedule.warmup_steps=0"],
        "xlstm": sized(key_dim=4, head_dim=8, chunk_tokens=16),
        "deberta": ["objective.generator_layers=1", *sized(num_kv_heads=4)],
    }  # fmt: skip
    command("tokenizer", "train", job("pod-llama"), *small, *grouped)
    command("prepare", "pod-llama.toml", *small, *grouped)
    made = sorted(Path("data/pod").rglob("*"))
    for name, fields in more.items():
        command("train", job(f"pod-{name}"), *small, *fields)
        assert load_run(f"runs/pod-{name}").data.dir == "data/pod"
    assert sorted(Path("data/pod").rglob("*")) == made
