"""Adapters of models that answer questions: factors in the encoder and a head of their own, here
and in PEFT."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.config.run import Tokenizer
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.formats.adapter_verbs import export_adapter_command, merge_command
from lmwright.formats.convert import export_command
from lmwright.formats.load import load_model
from lmwright.formats.weights import load_frozen
from lmwright.models.deberta import Deberta
from lmwright.models.modernbert import ModernBert
from lmwright.objectives.mlm import Mlm
from lmwright.program.lora_section import LowRank
from lmwright.program.plan import resolve
from tests.answered_run import ANSWER, ROWS, answered_run
from tests.labeled_run import SIZES
from tests.objectives.labeled_rows import packed
from tests.parity.compare import assert_near
from tests.saved_run import save_run, weights_at

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

DENSE = SIZES | {"mlp_dim": 24, "num_kv_heads": 4}
MODELS = {
    "modernbert": ModernBert(**DENSE, window=9),
    "deberta": Deberta(**DENSE, position_buckets=8, max_distance=24),
}
STD = 0.3  # of all weights: float32 is exact enough


@pytest.fixture(
    scope="module",
    params=[pytest.param("modernbert"), pytest.param("deberta", marks=pytest.mark.slow)],
)
def run(request, tmp_path_factory):
    """A run of an adapter with random weights, over the export of a masked run."""
    root = tmp_path_factory.mktemp("lora")
    run = answered_run(root, MODELS[request.param])
    masked = replace(run, dir=str(root / "mlm"), objective=Mlm(mask_token_id=1))
    save_run(masked, steps=(1,), std=STD)
    export_command(masked.dir, root / "base")
    data = replace(run.data, tokenizer=Tokenizer(path=str(root / "base")))
    train = replace(run.train, init_from=str(root / "base"))
    run = replace(run, lora=LowRank(base="fp32", rank=3, alpha=5.0), train=train, data=data)
    save_run(run, steps=(1,), std=STD)
    return run


@pytest.fixture(scope="module")
def adapter(run):
    """Its folder of PEFT."""
    out = f"{run.dir}-adapter"
    export_adapter_command(run.dir, out)
    return out


def test_logits_and_gradients_are_those_of_peft(run, adapter):
    base = transformers.AutoModelForQuestionAnswering.from_pretrained(
        run.train.init_from, dtype=torch.float32
    )
    theirs = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True).eval()
    rng = np.random.default_rng(4)
    texts = [(rng.integers(4, 290, 11), *span) for span in ((2, 4), (0, 0), (7, 10))]
    ids, first, last = (torch.tensor(np.stack(each)) for each in zip(*texts, strict=True))
    out = theirs(input_ids=ids, start_positions=first, end_positions=last)
    out.loss.backward()
    plan = resolve(run, jax.devices()[:1])
    (trainee,), training = plan.training.trainees, plan.training
    frozen, weights = load_frozen(plan), weights_at(1, trainee.spec, STD)
    rows = packed([[(text, 0) for text, *_ in texts]], 40)
    marks = np.zeros(rows.tokens.shape, np.float32)
    for number, (_, a, b) in enumerate(texts):
        marks[0, 11 * number + a] += 1
        marks[0, 11 * number + b] += 2
    rows = Batch(rows.tokens, rows.segment_ids, rows.positions, marks)

    def loss(weights):
        w = training.bind(frozen.weights, training.parts(trainee, weights))
        keys = jax.random.split(jax.random.key(0), 1)
        made = run.objective.loss(run.model, w, rows, keys, Compute())
        return made.total / made.weight

    value, grads = jax.jit(jax.value_and_grad(loss))(weights)
    np.testing.assert_allclose(value, out.loss.item(), rtol=1e-5)
    w = training.bind(frozen.weights, training.parts(trainee, weights))
    logits = run.objective.spans(run.model, w, rows, Compute()).logits[0, :33].reshape(3, 11, 2)
    wanted = torch.stack([out.start_logits, out.end_logits], -1).detach().numpy()
    assert_near(np.asarray(logits), wanted, "logits")
    named = {k: p.grad.numpy() for k, p in theirs.named_parameters() if p.grad is not None}
    (head,) = (k for k in named if k.endswith("modules_to_save.default.weight"))
    assert_near(np.asarray(grads["classifier"]["out"]).T, named[head], head)


def test_the_run_its_export_and_the_merged_model_answer_alike(run, adapter, tmp_path):
    export_command(run.dir, tmp_path / "exported")
    proof = merge_command(run.train.init_from, adapter, tmp_path / "merged")
    assert proof.merged_to_peft is not None, proof.peft
    assert proof.merged_to_peft.max_abs_diff <= 1e-5 * proof.merged_to_peft.max_abs_logit
    file, out, found = tmp_path / "questions.jsonl", tmp_path / "out.jsonl", []
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:20]))
    for place in (run.dir, tmp_path / "exported", tmp_path / "merged"):
        words = [str(place), str(file), "--out", str(out), "--precision", "fp32", "--overwrite"]
        assert main(["predict", *words]) == 0
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        found.append([(line["answer"], pytest.approx(line["score"], rel=1e-4)) for line in lines])
    assert found[0] == found[1] == found[2]
    models = [load_model(str(tmp_path / name)).model for name in ("exported", "merged")]
    assert models[0] == models[1] and models[0].window_tokens == ANSWER.window_tokens
    config = json.loads((Path(adapter) / "adapter_config.json").read_text())
    assert config["task_type"] == "QUESTION_ANS"
    note = json.loads((Path(adapter) / "lmwright.json").read_text())
    assert note["answers"]["window_overlap"] == ANSWER.window_overlap
