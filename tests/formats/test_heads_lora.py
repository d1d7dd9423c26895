"""Adapters of taggers and of models of vectors, here and in PEFT."""

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
from lmwright.core.param import walk
from lmwright.data.rows.store import TokenStore
from lmwright.data.tokens.tags import words_as_tokens
from lmwright.errors import UserError
from lmwright.evals.embed import embed_command
from lmwright.evals.held_out import open_held_out
from lmwright.evals.predict import predict_command
from lmwright.formats.adapter_verbs import export_adapter_command, merge_command
from lmwright.formats.convert import export_command
from lmwright.formats.hf_layout import slots
from lmwright.formats.load import load_model
from lmwright.formats.peft import module_slots
from lmwright.formats.weights import load_frozen
from lmwright.models.embedder import Embedder
from lmwright.models.eurobert import EuroBert
from lmwright.models.modernbert import ModernBert
from lmwright.models.tagger import Tagger
from lmwright.objectives.embed import Embed
from lmwright.objectives.mlm import Mlm
from lmwright.objectives.tag import Tag
from lmwright.program.lora_section import Adapter, LowRank
from lmwright.program.plan import resolve
from lmwright.train.start import first_state
from tests.labeled_run import SEQ_LEN, SIZES, prepared_run
from tests.objectives.labeled_rows import packed
from tests.parity.compare import assert_near
from tests.saved_run import save_run, weights_at
from tests.tagged_run import LABELS, ROWS

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

MODELS = {
    "tag": ModernBert(mlp_dim=20, window=9, **SIZES | {"num_kv_heads": 4}),
    "embed": EuroBert(mlp_dim=24, **SIZES),
}
OBJECTIVES = {"tag": Tag(labels=LABELS), "embed": Embed(temperature=0.5)}
RELATED = [{"anchor": f"where is {i}?", "positive": f"{i} is here"} for i in range(60)]
DATA = {"tag": (ROWS, "tagged"), "embed": (RELATED, "related")}
RANK, STD = 3, 0.3  # of all weights: float32 is exact enough
TEXTS = [" ".join(row["tokens"]) for row in ROWS[:12]]


def run_of(root, kind):
    """A run of an adapter with random weights, over the export of a masked run."""
    lines, rows = DATA[kind]
    run = prepared_run(root, MODELS[kind], OBJECTIVES[kind], lines, rows=rows)
    masked = replace(run, dir=str(root / "mlm"), objective=Mlm(mask_token_id=1))
    save_run(masked, steps=(1,), std=STD)
    export_command(masked.dir, root / "base")
    data = replace(run.data, tokenizer=Tokenizer(path=str(root / "base")))
    train = replace(run.train, init_from=str(root / "base"))
    run = replace(run, lora=LowRank(base="fp32", rank=RANK, alpha=5.0), train=train, data=data)
    save_run(run, steps=(1,), std=STD)
    return run


@pytest.fixture(scope="module", params=OBJECTIVES)
def run(request, tmp_path_factory):
    return run_of(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def adapter(run):
    """Its folder of PEFT."""
    out = f"{run.dir}-adapter"
    export_adapter_command(run.dir, out)
    return out


def theirs_of(run, adapter, **said):
    """The base in transformers with the adapter."""
    auto, more = transformers.AutoModel, {}
    if run.objective.kind == "tag":
        auto, more = transformers.AutoModelForTokenClassification, {"num_labels": len(LABELS)}
    base = auto.from_pretrained(run.train.init_from, dtype=torch.float32, **more)
    return peft.PeftModel.from_pretrained(base, adapter, **said).eval()


def their_loss(run, theirs, texts, tags):
    """That of texts (of which each second one belongs to the one before) in PEFT."""
    ids = torch.tensor(np.stack(texts))
    if run.objective.kind == "tag":
        return theirs(input_ids=ids, labels=torch.tensor(np.stack(tags))).loss
    vectors = torch.nn.functional.normalize(theirs(input_ids=ids).last_hidden_state.mean(1), dim=-1)
    scores = vectors[::2] @ vectors[1::2].T / run.objective.temperature
    return torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)))


def test_the_loss_and_the_gradients_are_those_of_peft(run, adapter):
    theirs = theirs_of(run, adapter, is_trainable=True)
    rng = np.random.default_rng(4)
    texts = [rng.integers(4, 290, 8) for _ in range(4)]
    tags = [rng.integers(0, len(LABELS), 8) for _ in texts]
    wanted = their_loss(run, theirs, texts, tags)
    wanted.backward()
    plan = resolve(run, jax.devices()[:1])
    (trainee,), training = plan.training.trainees, plan.training
    frozen, weights = load_frozen(plan), weights_at(1, trainee.spec, STD)
    rows = packed([[(text, (i + 1) % 2) for i, text in enumerate(texts)]], SEQ_LEN)
    if run.objective.kind == "tag":
        weight = np.zeros((1, SEQ_LEN), np.float32)
        weight[0, :32] = np.concatenate(tags) + 1
        rows = Batch(rows.tokens, rows.segment_ids, rows.positions, weight)

    def loss(weights):
        w = training.bind(frozen.weights, training.parts(trainee, weights))
        keys = jax.random.split(jax.random.key(0), 1)
        made = run.objective.loss(run.model, w, rows, keys, Compute())
        return made.total / made.weight

    value, grads = jax.jit(jax.value_and_grad(loss))(weights)
    np.testing.assert_allclose(value, wanted.item(), rtol=1e-5)
    compare(dict(walk(grads)), run.objective.exported(run.model, {})[0], trainee, theirs)


def compare(grads, model, trainee, theirs):
    """Gradients of every factor and of the head, by their names in PEFT."""
    named = {k: p.grad.numpy() for k, p in theirs.named_parameters() if p.grad is not None}
    stem = "base_model.model."
    for name, slot in module_slots(model).items():
        if slot.path not in trainee.by_path:
            continue
        a, b = (np.asarray(grads[f"{slot.path}.{each}"])[slot.at] for each in "ab")
        assert_near(a.reshape(-1, RANK).T, named.pop(f"{stem}{name}.lora_A.default.weight"), name)
        assert_near(b.reshape(RANK, -1).T, named.pop(f"{stem}{name}.lora_B.default.weight"), name)
    for slot in (slot for slot in slots(model) if slot.path.startswith("classifier.")):
        module, _, kind = slot.name.rpartition(".")
        ours = slot.to_layout(np.asarray(grads[slot.path]))
        assert_near(ours, named.pop(f"{stem}{module}.modules_to_save.default.{kind}"), slot.name)
    assert not named


def given(run, place, folder):
    """The probabilities of tags that predict gives, or the vectors of embed, by text."""
    (folder / "texts.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    said = {"precision": "fp32", "overwrite": True}
    if run.objective.kind == "embed":
        out = folder / "out.npy"
        embed_command(str(place), str(folder / "texts.txt"), out=str(out), **said)
        return list(np.load(out))
    out = folder / "out.jsonl"
    predict_command(str(place), str(folder / "texts.txt"), out=str(out), **said)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(tag in LABELS for line in lines for tag in line["tags"] if tag is not None)
    return [np.array([s for s in line["scores"] if s is not None]) for line in lines]


def by_peft(run, theirs, adapter, loaded):
    """The same, by PEFT with the tokenizer of the adapter's folder."""
    tokenizer, found = transformers.AutoTokenizer.from_pretrained(adapter), []
    assert tokenizer.model_max_length == SEQ_LEN
    for text in TEXTS:
        asked = tokenizer(text, truncation=True, return_tensors="pt")
        with torch.no_grad():
            out = theirs(**asked)
        if run.objective.kind == "embed":
            mean = out.last_hidden_state[0].mean(0).numpy()
            found.append(mean / np.linalg.norm(mean))
            continue
        words = words_as_tokens(loaded.tokenizer, text.split(), SEQ_LEN - 1)
        found.append(out.logits[0].softmax(-1).max(-1).values.numpy()[words.first])
    return found


def test_the_run_the_merged_model_and_peft_agree(run, adapter, tmp_path):
    proof = merge_command(run.train.init_from, adapter, tmp_path / "merged")
    assert proof.merged_to_peft is not None, proof.peft
    assert proof.merged_to_peft.max_abs_diff <= 1e-5 * proof.merged_to_peft.max_abs_logit
    merged = load_model(tmp_path / "merged")
    assert isinstance(merged.model, Tagger if run.objective.kind == "tag" else Embedder)
    alone = (replace(model, encoder=None) for model in (merged.model, load_model(run.dir).model))
    assert next(alone) == next(alone)
    wanted = by_peft(run, theirs_of(run, adapter), adapter, merged)
    for place in (run.dir, tmp_path / "merged"):
        for ours, theirs in zip(given(run, place, tmp_path), wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_table_trained_whole_is_merged_and_goes_on_from_its_folder(run, tmp_path):
    run = replace(run, dir=str(tmp_path / "run"), lora=replace(run.lora, whole=("embed",)))
    save_run(run, steps=(1,), std=STD)
    export_adapter_command(run.dir, tmp_path / "adapter")
    proof = merge_command(run.train.init_from, tmp_path / "adapter", tmp_path / "merged")
    assert proof.merged_to_peft.max_abs_diff < 1e-4, proof.peft
    again = replace(run, lora=replace(run.lora, init_from=str(tmp_path / "adapter")))
    plan = resolve(again, jax.devices()[:1])
    state = first_state(plan, TokenStore.open(run.data.dir), load_frozen(plan))
    table = state["trained"]["default"]["weights"]["embed"]
    np.testing.assert_array_equal(table, load_model(tmp_path / "merged").weights["embed"])


def test_the_folder_says_what_it_is_for(run, adapter):
    config = json.loads((Path(adapter) / "adapter_config.json").read_text())
    note = json.loads((Path(adapter) / "lmwright.json").read_text())
    if run.objective.kind == "tag":
        assert config["task_type"] == "TOKEN_CLS" and config["modules_to_save"] == ["classifier"]
        assert note["labels"] == [*LABELS] and "pooling" not in note
    else:
        assert config["task_type"] == "FEATURE_EXTRACTION" and "modules_to_save" not in config
        assert (note["pooling"], note["length"]) == ("mean", "one")


def test_an_adapter_goes_on_from_its_folder(run, adapter, tmp_path):
    lora = replace(run.lora, init_from=adapter)
    run = replace(run, dir=str(tmp_path / "run"), lora=lora)
    (tmp_path / "run").mkdir()
    plan = resolve(run, jax.devices()[:1])
    state = first_state(plan, TokenStore.open(run.data.dir), load_frozen(plan))
    wanted = weights_at(1, plan.training.trainees[0].spec, STD)
    for (path, one), (_, other) in zip(
        walk(state["trained"]["default"]["weights"]), walk(wanted), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6, err_msg=path)


def test_eval_measures_the_adapter(run, adapter):
    opened = open_held_out(run.dir, precision="fp32")
    (loss,) = opened.held_out.losses(opened.weights)
    assert np.isfinite(loss.loss) and loss.tokens > 0


def test_several_adapters_do_not_share_a_batch(run):
    lora = replace(run.lora, adapters=(Adapter(name="a"), Adapter(name="b")))
    training = resolve(replace(run, lora=lora), jax.devices()[:1]).training
    if run.objective.kind == "tag":
        assert [trainee.rows for trainee in training.trainees] == [1, 1]
        return
    with pytest.raises(UserError, match=r"lora.adapters: .*'embed' compares all texts of a batch"):
        print(training.trainees)


@pytest.mark.slow
def test_train_takes_the_run_file(run, tmp_path):
    words = [f"dir={tmp_path / 'run'}", "train.steps=2", "train.global_batch_size=8"]
    assert main(["train", str(Path(run.dir) / "run.toml"), *words]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
