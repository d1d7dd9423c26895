"""Masked diffusion by the command line: pretrained, resumed, tuned on answers, converted from a
causal model, measured, sampled, exported."""

import json
import math

import jax
import pytest

from lmwright.cli.main import main
from lmwright.core.param import init_weights
from lmwright.errors import UserError
from lmwright.formats.load import load_model
from lmwright.formats.open import load_run
from lmwright.models.llama import Llama
from tests.in_memory import export_hf
from tests.train.texts import PLAIN, ROWS, STEADY, sentences, write_run, write_texts

MODEL = """
kind = "llada"
vocab_size = 320
embed_dim = 32
mlp_dim = 48
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 8
seq_len = 48
"""
MORE = (
    STEADY.format(rate=1e-3)
    + """
[eval]
prompts = ["the cat"]
sample_tokens = 6
"""
)


def write(folder, model=MODEL, top="", data="", train="", rows=""):
    """A run file with its texts or conversations."""
    folder.mkdir()
    text, file = sentences(), folder / "text.jsonl"
    if rows:
        lines = [{"prompt": next(text), "completion": next(text)} for _ in range(ROWS)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        write_texts(file)
    source = f'{{path = "{folder}/text.jsonl"{rows}}}'
    return write_run(
        folder, model, recipe="pretrain-diffusion", top=top,
        source=f"holdout_fraction = 0.1\nsources = [{source}]\n{data}", train=PLAIN + train,
        more=MORE,
    )  # fmt: skip


def logged(folder, kind):
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """The folder of a run, trained in two sessions."""
    folder = tmp_path_factory.mktemp("diffusion") / "a"
    path = write(folder)
    assert main(["prepare", path]) == 0
    assert main(["train", path, "train.steps=2"]) == 0
    assert main(["train", path]) == 0
    return folder


@pytest.mark.slow
def test_a_run_resumes_to_the_same_losses(pretrained, tmp_path):
    assert main(["train", str(pretrained / "run.toml"), f"dir={tmp_path}/run"]) == 0
    ours, theirs = logged(pretrained, "train"), logged(tmp_path, "train")
    assert [row["loss"] for row in ours] == [row["loss"] for row in theirs]
    assert len(ours) == 4
    (held,) = logged(tmp_path, "eval")
    assert held["bits_per_byte"] > 0
    (sample,) = logged(tmp_path, "sample")
    assert sample["prompt"] == "the cat"


def test_measured_sampled_and_exported(pretrained, tmp_path, capsys):
    run = str(pretrained / "run")
    assert main(["eval", run, "--samples", "9"]) == 0
    assert main(["eval", run, "--text", str(pretrained / "text.jsonl"), "--context", "20",
                 "--max-chars", "400"]) == 0  # fmt: skip
    assert "bits per byte" in capsys.readouterr().out
    out, file = str(tmp_path / "out"), str(tmp_path / "out.gguf")
    assert main(["export", run, out]) == main(["export", run, file]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "pipeline_tag: text-generation" in card and "LLaDA2Pipeline" in card
    proof = json.loads((tmp_path / "out" / "convert.json").read_text())
    if (there := proof["folder_to_transformers"]) is not None:
        assert there["max_abs_diff"] < 1e-5 * max(there["max_abs_logit"], 1)
    models = [load_model(place).model for place in (run, out, file)]
    assert models[0] == models[1] == models[2]
    capsys.readouterr()
    texts = []
    for place in (run, out, file):
        assert main(["generate", place, "--prompt", "the cat", "--max-new-tokens", "8",
                     "--block-tokens", "4", "--steps", "2"]) == 0  # fmt: skip
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]


def test_answers_are_learned_with_an_adapter(pretrained, tmp_path, capsys):
    """Of a conversation the answer alone is masked; the end tokens behind it are learned."""
    folder = tmp_path / "b"
    path = write(
        folder, model="", top="objective.end_tokens = 6\nlora.rank = 2\nlora.alpha = 4",
        data='chat.template = "none"\npack = {method = "best-fit", attention = "document"}',
        train=f'init_from = "{pretrained}/run"', rows=', rows = "prompt"',
    )  # fmt: skip
    assert main(["prepare", path]) == 0
    assert main(["train", path, "train.steps=2"]) == 0
    run = load_run(folder / "run")
    assert run.model.kind == "llada" and run.objective.end_token_id is not None
    losses = [row["loss"] for row in logged(folder, "train")]
    assert len(losses) == 2 and all(map(math.isfinite, losses))
    merged = str(tmp_path / "merged")
    assert main(["export", str(folder / "run"), merged]) == 0
    assert load_model(merged).model == run.model


def test_blocks_are_learned_and_written(pretrained, tmp_path, capsys):
    """Block diffusion with complementary masks goes on from masked diffusion."""
    folder = tmp_path / "blocks"
    path = write(
        folder, model="", top='objective.block_tokens = 8\nobjective.views = "complementary"',
        data='pack = {method = "chunk", attention = "document"}',
        train=f'init_from = "{pretrained}/run"',
    )  # fmt: skip
    assert main(["prepare", path]) == 0
    assert main(["train", path, "objective.block_tokens=48"]) == 2
    assert "block_tokens: 48 is not below the 48 tokens of a row" in capsys.readouterr().err
    assert main(["train", path, "train.steps=2", "eval.prompts=[]"]) == 0
    losses = [row["loss"] for row in logged(folder, "train")]
    assert len(losses) == 2 and all(map(math.isfinite, losses))
    run = str(folder / "run")
    assert main(["eval", run]) == 0
    capsys.readouterr()
    assert main(["generate", run, "--prompt", "the cat", "--max-new-tokens", "16",
                 "--block-tokens", "8", "--sees", "blocks"]) == 0  # fmt: skip
    assert capsys.readouterr().out


@pytest.mark.slow
def test_qwen_2_becomes_a_masked_diffusion_model(pretrained, tmp_path, capsys):
    """Its biases come along, into a folder of Qwen 2's class and GGUF's `dream`, which write the
    same text."""
    sizes = {name: getattr(load_run(pretrained / "run").model, name) for name in (
        "vocab_size", "embed_dim", "mlp_dim", "num_layers", "num_heads", "num_kv_heads",
        "head_dim", "seq_len")}  # fmt: skip
    causal = Llama(**sizes, bias="qkv", head="untied")
    w = init_weights(causal.spec(), jax.random.key(1))
    start, folder = tmp_path / "qwen", tmp_path / "d"
    export_hf(causal, w, pretrained / "run" / "tokenizer", start)
    path = write(folder, model='\nkind = "llada"\n', train=f'init_from = "{start}"')
    assert main(["prepare", path]) == main(["train", path, "train.steps=2"]) == 0
    run, out = str(folder / "run"), str(tmp_path / "out")
    assert load_run(folder / "run").model.bias == "qkv"
    assert main(["export", run, out]) == main(["export", run, f"{out}.gguf"]) == 0
    proof = json.loads((tmp_path / "out" / "convert.json").read_text())
    assert proof["folder_to_transformers"]["max_abs_diff"] < 1e-4
    capsys.readouterr()
    texts = set()
    for place in (run, out, f"{out}.gguf"):
        assert main(["generate", place, "--prompt", "the cat", "--max-new-tokens", "8"]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1


def test_a_causal_model_is_converted(shared_data, tmp_path, capsys):
    """Its first loss is below ln V + 1, with a mask token whose row is the mean of its pieces."""
    stories = str(shared_data / "models" / "stories260k")
    start = str(tmp_path / "start")
    folder = tmp_path / "c"
    path = write(folder, model='\nkind = "llada"', train=f'init_from = "{stories}"',
                 data="pack.seq_len = 48")  # fmt: skip
    assert main(["prepare", path]) == 0
    assert main(["train", path]) == 2
    assert "lmwright vocab MODEL OUT --special --add '<|mask|>'" in capsys.readouterr().err
    assert main(["vocab", stories, start, "--special", "--add", "<|mask|>"]) == 0
    changed = [f"train.init_from={start}", f"data.tokenizer.path={start}", f"dir={folder}/run"]
    assert main(["prepare", path, *changed]) == 0
    assert main(["train", path, "train.steps=1", *changed]) == 0
    (first,) = logged(folder, "train")
    run = load_run(folder / "run")
    assert run.model.predicts == "next" and run.model.head == "tied"
    assert first["loss"] < math.log(run.model.vocab_size) + 1


@pytest.mark.parametrize(
    "changes, told",
    [
        (["objective.kind=clm"], "which 'llada' can already see; use 'diffusion'"),
        (["objective.kind=mlm"], "'mlm' does not train 'llada'; use 'diffusion', or model.kind = "),
        (["model.kind=eurobert", "eval.prompts=[]"], "'diffusion' does not train 'eurobert'; use"),
        (["model.kind=llama"], "'diffusion' needs a model that looks both ways, .*kind = 'llada'"),
    ],
)
def test_objectives_and_models_that_do_not_fit(changes, told, tmp_path):
    path = write(tmp_path / "d")
    sizes = [line.replace(" ", "") for line in MODEL.strip().splitlines()[1:]]
    with pytest.raises(UserError, match=told):
        load_run(path, [*changes, *(f"model.{size}" for size in sizes)])


def test_models_that_are_not_converted(shared_data, tmp_path):
    stories = shared_data / "models" / "stories260k"
    for kind, told in (("gemma", "'llama' does not become a 'gemma'"), ("llada", None)):
        path = write(tmp_path / kind, model=f'\nkind = "{kind}"',
                     train=f'init_from = "{stories}"')  # fmt: skip
        if told:
            with pytest.raises(UserError, match=told):
                load_run(path)
        else:
            assert load_run(path).model.num_layers == 5
