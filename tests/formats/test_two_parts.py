"""Replaced tokens from weights that others trained: the discriminator's logits at step 0 are those
of a composition of transformers' model with Microsoft's head, the generator's those of its folder,
or of the first layers of the model."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.torch

from lmwright.cli.main import main
from lmwright.core.compute import Compute
from lmwright.core.param import walk
from lmwright.errors import UserError
from lmwright.formats.load import load_model
from lmwright.formats.open import load_run, open_place
from lmwright.formats.two_parts import two_parts
from lmwright.formats.weights import load_run_weights
from lmwright.program.plan import resolve
from tests.golden import curves
from tests.golden.cases import CASES
from tests.objectives.test_rtd import Head
from tests.parity.compare import assert_near, make_batch, randomize
from tests.saved_run import save_run

torch = pytest.importorskip("torch", reason="torch is the reference")
transformers = pytest.importorskip("transformers")

TOKENS = np.random.default_rng(1).integers(5, 380, (2, 40))
SIZES = {
    "vocab_size": 384, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 80, "max_position_embeddings": 96, "max_relative_positions": 64,
    "position_buckets": 16, "relative_attention": True, "position_biased_input": False,
    "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm",
    "type_vocab_size": 0, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0,
}  # fmt: skip
POSITIONS = "deberta.embeddings.position_embeddings.weight"


def masked_lm(seed, **fields):
    torch.manual_seed(seed)
    config = transformers.DebertaV2Config(**SIZES | fields)
    theirs = transformers.DebertaV2ForMaskedLM(config).float().eval()
    randomize(theirs)
    return theirs


@pytest.fixture(scope="module")
def theirs():
    """An encoder with its head over the vocabulary, a head over tokens, and another encoder."""
    encoder = masked_lm(1, legacy=False)
    head = Head(encoder.config)
    randomize(head)
    return encoder, head, masked_lm(2, legacy=False)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, theirs):
    """A folder with prepared data and folders of models in the forms that there are."""
    folder = tmp_path_factory.mktemp("parts")
    curves.write_sources(folder)
    case = CASES["objective rtd"] | {"train": {"steps": 6, "global_batch_size": 8}}
    path = curves.run_file(folder, "rtd", case)
    assert main(["prepare", str(path)]) == 0
    text = re.sub(r"tokenizer = \{.*?\}", "tokenizer = {}", path.read_text())
    lines = [line for line in text.splitlines(True) if not line.startswith("model =")]
    path.with_name("from.toml").write_text("".join(lines))  # both from the weights
    encoder, head, other = theirs
    released = encoder.state_dict() | {POSITIONS: torch.ones(96, 48)}
    released |= {f"mask_predictions.{k}": v for k, v in head.state_dict().items()}
    released.pop("lm_predictions.lm_head.decoder.weight", None)
    save(folder / "released", encoder.config, released)
    config = json.loads((folder / "released" / "config.json").read_text())
    del config["architectures"]  # as in Microsoft's
    (folder / "released" / "config.json").write_text(json.dumps(config))
    encoder.deberta.save_pretrained(folder / "alone")
    other.save_pretrained(folder / "other")
    classes = transformers.DebertaV2ForSequenceClassification(encoder.config)
    classes.deberta.load_state_dict(encoder.deberta.state_dict())
    classes.save_pretrained(folder / "classes")
    legacy = masked_lm(3, legacy=True)
    legacy.deberta.load_state_dict(encoder.deberta.state_dict())
    legacy.save_pretrained(folder / "legacy")
    tokenizer = Path(load_run(folder / "rtd.toml").data.dir) / "tokenizer"
    for name in ("released", "alone", "other", "classes", "legacy"):
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name / file).write_bytes((tokenizer / file).read_bytes())
    return folder


def save(folder, config, tensors):
    config.architectures = ["DebertaV2ForMaskedLM"]
    config.save_pretrained(folder)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def started(prepared, name, generator=None, **objective):
    """(model, objective, weights of both, names of fresh ones, what is said) at step 0."""
    run = load_run(prepared / "rtd.toml")
    plan = resolve(replace(run, objective=replace(run.objective, **objective)), jax.devices()[:1])
    second = None if generator is None else open_place(prepared / generator)
    with jax.set_mesh(plan.mesh):
        return (plan.run.model, plan.run.objective, *two_parts(
            plan, open_place(prepared / name), second))  # fmt: skip


def logits(model, w):
    hidden = model.hidden(w, make_batch(TOKENS), Compute())[0]
    return np.asarray(model.logits(w, hidden))


def their_states(encoder):
    with torch.no_grad():
        return encoder.deberta(input_ids=torch.tensor(TOKENS)).last_hidden_state


def their_detection(encoder, head):
    with torch.no_grad():
        return head(their_states(encoder), torch.zeros(TOKENS.shape, dtype=int))[..., None].numpy()


def test_released_weights_are_both_models(theirs, prepared):
    encoder, head, _ = theirs
    model, objective, w, fresh, said = started(prepared, "released")
    assert fresh == [] and said == "the generator has the first 1 of 2 layers"
    assert_near(logits(*objective.exported(model, w)), their_detection(encoder, head), "detector")
    assert not np.any(w["discriminator"]["embed"])
    short = masked_lm(1, num_hidden_layers=1, legacy=False)
    short.load_state_dict(encoder.state_dict(), strict=False)
    with torch.no_grad():
        wanted = short(input_ids=torch.tensor(TOKENS)).logits.numpy()
    found = logits(*objective.part("generator").exported(model, w))
    assert_near(found, wanted, "generator")


def test_a_generator_of_its_own_leaves_the_discriminator_as_it_was(theirs, prepared):
    encoder, head, other = theirs
    model, objective, w, fresh, said = started(prepared, "released", "other", generator_layers=2)
    assert fresh == [] and said == f"generator of {prepared / 'other'}"
    assert_near(logits(*objective.exported(model, w)), their_detection(encoder, head), "detector")
    with torch.no_grad():
        wanted = other(input_ids=torch.tensor(TOKENS)).logits.numpy()
    assert_near(logits(*objective.part("generator").exported(model, w)), wanted, "generator")
    with pytest.raises(UserError, match=r"has 2 layers and the generator 1; set .* = 2"):
        started(prepared, "released", "other")


FRESH = [
    "discriminator.detector", "generator.decoder_bias", "generator.dense",
    "generator.dense_bias", "generator.head_norm", "generator.head_norm_bias",
]  # fmt: skip


@pytest.mark.parametrize(
    "name, fresh", [("alone", FRESH), ("classes", FRESH), ("legacy", FRESH[:1])]
)
def test_heads_that_a_folder_lacks_start_fresh(theirs, prepared, name, fresh):
    model, objective, w, found, _ = started(prepared, name)
    assert sorted(found) == fresh
    detector, w = objective.exported(model, w)
    states = detector.encoder.hidden(w, make_batch(TOKENS), Compute())[0]
    assert_near(states, their_states(theirs[0]).numpy(), "hidden states")


def test_a_run_from_released_weights_and_runs_from_it(prepared, capsys):
    """From the run as from its two exports: the same weights."""
    run, toml = prepared / "runs" / "rtd", str(prepared / "from.toml")
    assert main(["train", toml, f"train.init_from={prepared / 'released'}"]) == 0
    said = capsys.readouterr().out
    assert f"weights of {prepared / 'released'}; the generator has the first 1 of 2 layers" in said
    for part in ("discriminator", "generator"):
        assert main(["export", str(run), str(prepared / part), "--part", part]) == 0
    last = dict(walk(load_run_weights(run)[1]))
    *_, w, fresh, said = started(prepared, "runs/rtd")
    assert not fresh and said == "generator of the same run"
    *_, again, fresh, _ = started(prepared, "discriminator", "generator")
    assert not fresh
    for (path, a), (_, b) in zip(walk(w), walk(again), strict=True):
        np.testing.assert_allclose(a, last[path], atol=1e-7, err_msg=path)
        np.testing.assert_allclose(b, last[path], atol=1e-7, err_msg=path)
    detector = load_model(prepared / "discriminator")
    assert "detector" in detector.weights


def test_a_mask_decoder_is_written_and_read_with_its_positions(theirs, prepared, tmp_path, capsys):
    """Positions of a released generator, or fresh ones; transformers' class is not this model."""
    *_, w, fresh, said = started(prepared, "released", mask_decoder="enhanced")
    assert fresh == [] and np.all(np.asarray(w["generator"]["positions"]) == 1)
    *_, fresh, _ = started(prepared, "legacy", mask_decoder="enhanced")
    assert fresh == ["generator.positions", "discriminator.detector"]
    run = load_run(prepared / "rtd.toml")
    run = replace(run, dir=str(tmp_path / "run"))
    run = replace(run, objective=replace(run.objective, mask_decoder="enhanced"))
    save_run(run, steps=(1,))
    out = tmp_path / "out"
    assert main(["export", run.dir, str(out), "--part", "generator"]) == 0
    assert "not compared, it has no class with an enhanced mask dec" in capsys.readouterr().out
    assert "what it opens here is another model" in (out / "README.md").read_text()
    loaded, (_, w) = load_model(out), load_run_weights(run.dir)
    assert loaded.model == run.objective.generator(run.model)
    for (path, a), (_, b) in zip(walk(loaded.weights), walk(w["generator"]), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=path)
    *_, said = started(prepared, "released", out)
    assert said.endswith(" without its positions, as objective.mask_decoder = 'none'")


def test_what_is_refused(prepared, tmp_path, capsys):
    toml, released = str(prepared / "from.toml"), prepared / "released"
    refused = [
        ([f"train.init_from={released}", "model.mlp_dim=72"],
         r"layers\.down is \(80, 48\) in .*released and \(72, 48\) in this run's model"),
        ([f"train.init_from={released}", f"objective.generator_from={tmp_path}"],
         "error: objective.generator_from: .*: holds neither run.toml nor config.json"),
    ]  # fmt: skip
    alone = [f"objective.generator_from={released}"]
    assert main(["train", str(prepared / "rtd.toml"), *alone]) == 2
    assert "objective.generator_from: " + str(released) + " has no" in capsys.readouterr().err
    for number, (words, said) in enumerate(refused):
        assert main(["train", toml, f"dir={tmp_path / str(number)}", *words]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        assert re.search(said, error), error
