"""Adapters of classifiers: factors in the encoder and a head of their own, here and in PEFT."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from lmwright.config.run import Tokenizer
from lmwright.core.compute import Compute
from lmwright.core.param import nest, walk
from lmwright.data.rows.store import TokenStore
from lmwright.errors import UserError
from lmwright.evals.predict import predict_command
from lmwright.formats.adapter_note import read_note
from lmwright.formats.adapter_verbs import combine_command, export_adapter_command, merge_command
from lmwright.formats.convert import export_command
from lmwright.formats.hf_layout import slots
from lmwright.formats.load import load_model
from lmwright.formats.peft import module_slots
from lmwright.formats.weights import load_frozen, load_run_weights
from lmwright.models.bert import Bert, Roberta
from lmwright.models.classifier import Classifier
from lmwright.models.deberta import Deberta
from lmwright.models.eurobert import EuroBert
from lmwright.models.modernbert import ModernBert
from lmwright.objectives.classify import Classify
from lmwright.objectives.mlm import Mlm
from lmwright.program.lora_section import Adapter, LowRank
from lmwright.program.plan import resolve
from lmwright.program.state import init_state
from lmwright.program.step import summed_gradients
from lmwright.train.start import first_state, starting_note
from tests.labeled_run import LABELS, SIZES, TEXTS, labeled_run
from tests.objectives.labeled_rows import packed
from tests.parity.compare import assert_near
from tests.saved_run import save_run, weights_at

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

MODELS = {
    "eurobert": EuroBert(mlp_dim=24, **SIZES),
    "modernbert": ModernBert(mlp_dim=20, window=9, **SIZES | {"num_kv_heads": 4}),
}
HEADS = {
    "eurobert": {"dense.weight", "dense.bias", "classifier.weight", "classifier.bias"},
    "modernbert": {"classifier.weight", "classifier.bias"},
}
ONE = jax.devices()[:1]
STD = 0.3  # of all weights: float32 is exact enough
LORA = LowRank(base="fp32", rank=3, alpha=5.0)


@pytest.fixture(scope="module", params=MODELS)
def run(request, tmp_path_factory):
    return run_over(MODELS[request.param], tmp_path_factory.mktemp("lora"))


def run_over(model, root):
    """A run of an adapter with random weights, over the export of a masked run."""
    run = labeled_run(root, model)
    masked = replace(run, dir=str(root / "mlm"), objective=Mlm(mask_token_id=1))
    save_run(masked, steps=(1,), std=STD)
    export_command(masked.dir, root / "base")
    data = replace(run.data, tokenizer=Tokenizer(path=str(root / "base")))
    train = replace(run.train, init_from=str(root / "base"))
    run = replace(run, lora=LORA, train=train, data=data)
    save_run(run, steps=(1,), std=STD)
    return run


@pytest.fixture(scope="module")
def adapter(run):
    """Its folder of PEFT."""
    out = f"{run.dir}-adapter"
    export_adapter_command(run.dir, out)
    return out


def theirs_of(run, adapter, **said):
    """The base in transformers with the adapter."""
    pooling = run.model.document_head.poolings[0]
    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        run.train.init_from, num_labels=3, classifier_pooling=pooling, dtype=torch.float32
    )
    return peft.PeftModel.from_pretrained(base, adapter, **said).eval()


@pytest.mark.parametrize(
    "kind", [Roberta, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (Bert, Deberta))]
)
def test_peft_opens_adapters_of_every_head(kind, tmp_path):
    """Also of one that is a module of its own, and of classes that know no poolings."""
    run = run_over(kind(mlp_dim=24, **SIZES | {"num_kv_heads": 4}), tmp_path)
    export_adapter_command(run.dir, tmp_path / "adapter")
    assert read_note(tmp_path / "adapter")["only_pooling"] is True
    proof = merge_command(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    assert proof.merged_to_peft is not None, proof.peft
    assert proof.merged_to_peft.max_abs_diff <= 1e-5 * proof.merged_to_peft.max_abs_logit


def test_logits_and_gradients_are_those_of_peft(run, adapter):
    theirs = theirs_of(run, adapter, is_trainable=True)
    rng = np.random.default_rng(4)
    texts = [(rng.integers(4, 290, 11), k) for k in (2, 0, 1)]
    out = theirs(
        input_ids=torch.tensor(np.stack([text for text, _ in texts])),
        labels=torch.tensor([label for _, label in texts]),
    )
    out.loss.backward()
    plan = resolve(run, ONE)
    (trainee,), training = plan.training.trainees, plan.training
    frozen, weights = load_frozen(plan), weights_at(1, trainee.spec, STD)
    rows = packed([texts], 40)

    def loss(weights):
        w = training.bind(frozen.weights, training.parts(trainee, weights))
        keys = jax.random.split(jax.random.key(0), 1)
        made = run.objective.loss(run.model, w, rows, keys, Compute())
        return made.total / made.weight

    value, grads = jax.jit(jax.value_and_grad(loss))(weights)
    np.testing.assert_allclose(value, out.loss.item(), rtol=1e-5)
    w = training.bind(frozen.weights, training.parts(trainee, weights))
    model = run.objective.model_over(run.model)
    logits = model.classify(w, rows, Compute())[0][0, :3]
    assert_near(logits, out.logits.detach().numpy(), "logits")
    compare(dict(walk(grads)), model, trainee, theirs)


def compare(grads, model, trainee, theirs):
    """Gradients of every factor and of the head, by their names in PEFT."""
    named = {k: p.grad.numpy() for k, p in theirs.named_parameters() if p.grad is not None}
    stem = "base_model.model."
    for name, slot in module_slots(model).items():
        if slot.path not in trainee.by_path:
            continue
        a, b = (np.asarray(grads[f"{slot.path}.{each}"])[slot.at] for each in "ab")
        assert_near(a.reshape(-1, 3).T, named.pop(f"{stem}{name}.lora_A.default.weight"), name)
        assert_near(b.reshape(3, -1).T, named.pop(f"{stem}{name}.lora_B.default.weight"), name)
    whole = [slot for slot in slots(model) if slot.path.startswith("classifier.")]
    assert {slot.name for slot in whole} == HEADS[model.encoder.kind]
    for slot in whole:
        module, _, kind = slot.name.rpartition(".")
        ours = slot.to_layout(np.asarray(grads[slot.path]))
        assert_near(ours, named.pop(f"{stem}{module}.modules_to_save.default.{kind}"), slot.name)
    assert not named


def test_what_it_trains_whole_beside_its_head_is_merged_into_its_base(run, tmp_path):
    lora = replace(run.lora, whole=("embed",))
    run = replace(run, dir=str(tmp_path / "run"), lora=lora)
    save_run(run, steps=(1,), std=STD)
    export_adapter_command(run.dir, tmp_path / "adapter")
    proof = merge_command(run.train.init_from, tmp_path / "adapter", tmp_path / "merged")
    assert proof.merged_to_peft.max_abs_diff < 1e-4, proof.peft
    plain = load_model(run.train.init_from).weights["embed"]
    assert np.abs(load_model(tmp_path / "merged").weights["embed"] - plain).max() > STD


def test_an_encoders_table_and_norms_that_are_trained_whole_are_those_of_peft(run, tmp_path):
    """ModernBERT's head is its table, in a module of another name than a decoder's."""
    lora = replace(run.lora, whole=("embed", "norm"))
    run = replace(run, dir=str(tmp_path / "run"), lora=lora, objective=Mlm(mask_token_id=1))
    save_run(run, steps=(1,), std=STD)
    export_adapter_command(run.dir, tmp_path / "adapter")
    proof = merge_command(run.train.init_from, tmp_path / "adapter", tmp_path / "merged")
    assert proof.merged_to_peft.max_abs_diff < 1e-4, proof.peft
    tied = run.model.kind == "modernbert"
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config.get("ensure_weight_tying", False) is tied
    merged, (_, trained) = load_model(tmp_path / "merged"), load_run_weights(run.dir)
    assert merged.model.head == ("tied" if tied else "untied")
    for name in ("embed", "norm"):
        np.testing.assert_array_equal(merged.weights[name], trained[name])


def test_predictions_of_the_run_its_export_the_merged_model_and_peft_agree(run, adapter, tmp_path):
    export_command(run.dir, tmp_path / "exported")
    proof = merge_command(run.train.init_from, adapter, tmp_path / "merged")
    assert proof.merged_to_peft is not None, proof.peft
    file = tmp_path / "texts.txt"
    file.write_text("".join(text + "\n" for text in TEXTS))
    found = []
    for place in (run.dir, tmp_path / "exported", tmp_path / "merged"):
        out = tmp_path / "out.jsonl"
        predict_command(str(place), str(file), out=str(out), precision="fp32", overwrite=True)
        found.append([json.loads(line)["scores"] for line in out.read_text().splitlines()])
    tokenizer = transformers.AutoTokenizer.from_pretrained(adapter)
    theirs = theirs_of(run, adapter)
    for i, text in enumerate(TEXTS):
        with torch.no_grad():
            logits = theirs(**tokenizer(text, truncation=True, return_tensors="pt")).logits
        for scores in (each[i] for each in found):
            assert [*scores] == [*LABELS]
            np.testing.assert_allclose(
                [*scores.values()], torch.softmax(logits[0], 0).numpy(), atol=1e-5
            )
    assert load_model(tmp_path / "merged").model == load_model(tmp_path / "exported").model


def started(run, origin, tmp_path, **lora):
    """The first state of a run with adapters over a place."""
    (tmp_path / "run").mkdir(exist_ok=True)
    train = replace(run.train, init_from=str(origin))
    run = replace(run, dir=str(tmp_path / "run"), train=train, lora=replace(LORA, **lora))
    plan = resolve(run, ONE)
    state = first_state(plan, TokenStore.open(run.data.dir), load_frozen(plan))
    return state["trained"]["default"]["weights"], plan


def test_an_adapter_goes_on_from_its_folder(run, adapter, tmp_path):
    found, plan = started(run, run.train.init_from, tmp_path, init_from=adapter)
    wanted = weights_at(1, plan.training.trainees[0].spec, STD)
    for (path, one), (_, other) in zip(walk(found), walk(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, err_msg=path)
    other = replace(run, objective=Classify(labels=("x", "y")))
    with pytest.raises(UserError, match=r"lora.init_from: .*classifier.* which has other classes"):
        started(other, run.train.init_from, tmp_path, init_from=adapter)


def test_a_folder_of_peft_itself_is_read(run, tmp_path):
    """PEFT saves a task's classifier by itself; of EuroBERT the dense layer must be named, too."""
    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        run.train.init_from, num_labels=3, dtype=torch.float32
    )
    more = ["dense"] if run.model.kind == "eurobert" else None
    names = ["q_proj", "down_proj"] if more else ["Wqkv", "mlp.Wo"]
    made = {}
    for named in (more, None):
        config = peft.LoraConfig(
            r=3, lora_alpha=5, target_modules=names, task_type="SEQ_CLS", modules_to_save=named
        )
        model = peft.get_peft_model(base, config)
        torch.manual_seed(1)
        for name, p in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                p.data = torch.randn_like(p)
        made = made or {name: p.detach().numpy() for name, p in model.named_parameters()}
        model.save_pretrained(tmp_path / str(bool(named)))
        base = model.unload()
    found, _ = started(
        run, run.train.init_from, tmp_path, init_from=str(tmp_path / str(bool(more))),
        targets=tuple(names),
    )  # fmt: skip
    out = made["base_model.model.classifier.modules_to_save.default.weight"]
    np.testing.assert_array_equal(found["classifier"]["out"], out.T)
    if more:
        with pytest.raises(UserError, match=r"has no dense.bias.*modules_to_save = \['classif"):
            started(
                run, run.train.init_from, tmp_path, init_from=str(tmp_path / "False"),
                targets=tuple(names),
            )  # fmt: skip


def test_a_folder_of_peft_merges_into_a_classifier(run, tmp_path):
    """As PEFT computes it: of EuroBERT the base's dense layer stays, of ModernBERT the whole head
    is replaced."""
    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        run.train.init_from, num_labels=3, dtype=torch.float32
    )
    base.save_pretrained(tmp_path / "base")
    modern = run.model.kind == "modernbert"
    config = peft.LoraConfig(
        r=3, target_modules=["Wqkv" if modern else "q_proj"], task_type="SEQ_CLS",
        modules_to_save=["head"] if modern else None,
    )  # fmt: skip
    model = peft.get_peft_model(base, config)
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            p.data = 0.3 * torch.randn_like(p)
    model.save_pretrained(tmp_path / "adapter")
    proof = merge_command(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    assert proof.merged_to_peft is not None, proof.peft
    assert proof.merged_to_peft.max_abs_diff <= 1e-5 * proof.merged_to_peft.max_abs_logit
    assert load_model(tmp_path / "merged").model.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_a_base_with_a_head_for_the_same_classes_lends_it(run, tmp_path):
    full = replace(run, dir=str(tmp_path / "full"), lora=None)
    save_run(full, steps=(1,), std=STD)
    theirs = weights_at(1, full.objective.spec(full.model), STD)["classifier"]
    found, _ = started(run, full.dir, tmp_path)
    for name, leaf in theirs.items():
        np.testing.assert_array_equal(found["classifier"][name], leaf)
    assert starting_note(tmp_path / "run") == ""
    other = replace(run, objective=Classify(labels=("x", "y", "z")))
    found, plan = started(other, full.dir, tmp_path)
    fresh = init_state(plan)["trained"]["default"]["weights"]["classifier"]
    for name, leaf in fresh.items():
        np.testing.assert_array_equal(found["classifier"][name], leaf)
    assert "fresh ones for classifier" in starting_note(tmp_path / "run")


def test_what_is_refused(run, adapter, tmp_path):
    with pytest.raises(UserError, match=r"weights of their own .* cannot be added; merge each"):
        combine_command(tmp_path / "sum", [adapter, adapter])
    config = json.loads((Path(adapter) / "lmwright.json").read_text())
    assert config["labels"] == [*LABELS]
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (bare / name).write_bytes((Path(adapter) / name).read_bytes())
    with pytest.raises(UserError, match="a head for classes that neither it nor the base names"):
        merge_command(run.train.init_from, bare, tmp_path / "m")


def test_adapters_train_side_by_side_as_alone(run):
    """Gradients of each, with a head of its own, over rows of its own."""
    two = tuple(Adapter(name=name, rank=rank, rows=2) for name, rank in (("a", 2), ("b", 4)))
    rng = np.random.default_rng(4)
    rows = [[(rng.integers(4, 290, n), int(rng.integers(3))) for n in (9, 5, 7)] for _ in range(4)]

    def gradients(adapters, rows):
        train = replace(run.train, global_batch_size=len(rows))
        plan = resolve(replace(run, lora=replace(LORA, adapters=adapters), train=train), ONE)
        active, keys = plan.training.trainees, [jax.random.key(i) for i in range(len(adapters))]
        weights = {each.name: weights_at(1, each.spec, STD) for each in active}
        batch = jax.tree.map(lambda a: a[None], packed(rows, 40))
        with jax.set_mesh(plan.mesh):
            frozen = load_frozen(plan).weights
            of = lambda w: summed_gradients(plan, active, frozen, w, batch, keys)  # noqa: E731
            return jax.jit(of)(weights)[0]

    both, alone = gradients(two, rows), gradients(two[1:], rows[1::2])
    ours, theirs = (dict(walk(each["b"])) for each in (both, alone))
    assert any(path.startswith("classifier.") for path in ours)
    for path, leaf in theirs.items():
        assert_near(ours[path], np.asarray(leaf), path)


def test_the_base_has_no_head(run):
    plan = resolve(run, ONE)
    frozen = load_frozen(plan)
    names = set(frozen.weights)
    assert "classifier" not in names and "head" not in names
    assert isinstance(run.objective.model_over(run.model), Classifier)
    held = {held.path: held.trained for held in plan.training.held()}
    assert held["default.classifier.out"] and not held["embed"]
    assert nest([]) == frozen.whole
