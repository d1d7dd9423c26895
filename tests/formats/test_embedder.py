"""A model of vectors from a run to sentence-transformers and back, and as the start of runs."""

import json
import re
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.config.check import check_run
from lmwright.config.rows import refuse_sources
from lmwright.config.run import Data, Pack, Run, Source, Tokenizer, Train
from lmwright.core.param import walk
from lmwright.data.prepare import notes, prepare
from lmwright.data.rows.store import TokenStore
from lmwright.data.tokens.tokenizer import load_tokenizer
from lmwright.errors import UserError
from lmwright.evals.embed import embed_command
from lmwright.evals.held_out import open_held_out
from lmwright.evals.loss import batch_of
from lmwright.formats.convert import export_command
from lmwright.formats.load import load_model
from lmwright.models.deberta import Deberta
from lmwright.models.embedder import Embedder
from lmwright.models.eurobert import EuroBert
from lmwright.models.modernbert import ModernBert
from lmwright.objectives.embed import Embed
from lmwright.objectives.mlm import Mlm
from lmwright.objectives.rtd import Rtd
from lmwright.optim import KINDS
from lmwright.program.plan import resolve
from lmwright.program.stores import open_stores
from lmwright.program.trainee import Frozen
from lmwright.train.start import first_state
from tests.saved_run import save_run, weights_at

PAIRS = [(f"where is {i}?", f"{i} is" + " near here" * (i % 5)) for i in range(90)]
FP32 = ("--precision", "fp32")
PROMPTS = {"query": "query: ", "passage": "passage: "}
SMALL = {
    "vocab_size": 320, "embed_dim": 16, "mlp_dim": 24, "num_layers": 2, "num_heads": 4,
    "head_dim": 4, "seq_len": 96,
}  # fmt: skip
MODELS = {
    "eurobert": EuroBert(**SMALL, num_kv_heads=2),
    "deberta": Deberta(**SMALL, num_kv_heads=4, position_buckets=8, max_distance=30),
    "modernbert": ModernBert(**SMALL, num_kv_heads=4, window=5, layer_pattern=("global", "local")),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run over related texts, with random weights."""
    root = tmp_path_factory.mktemp("pairs")
    lines = [json.dumps({"anchor": a, "positive": b}) + "\n" for a, b in PAIRS]
    (root / "pairs.jsonl").write_text("".join(lines))
    run = Run(
        name="pairs",
        dir=str(root / "run"),
        model=MODELS["eurobert"],
        objective=Embed(pooling="first"),
        optim=KINDS["adamw"](learning_rate=0.01),
        data=Data(
            dir=str(root / "data"),
            workers=1,
            holdout_fraction=0.3,
            sources=(Source(path=str(root / "pairs.jsonl"), rows="related", prompts=PROMPTS),),
            tokenizer=Tokenizer(vocab_size=290, special_tokens=("<|endoftext|>", "<|mask|>")),
            pack=Pack(method="best-fit"),
        ),
        train=Train(steps=4, global_batch_size=2, precision="fp32"),
    )
    summary = prepare(run.data, 96)
    assert re.search(r"of 2 rows compares about 9 with each", " ".join(notes(run, summary)))
    save_run(run, steps=(1,))
    return run


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "model"
    return out, export_command(run.dir, out)


def vectors(model, folder, name):
    """Those of the anchors, by the command."""
    file, out = folder / "anchors.txt", folder / f"{name}.npy"
    file.write_text("".join(f"{anchor}\n" for anchor, _ in PAIRS))
    assert embed_command(str(model), str(file), out=str(out), precision="fp32") == 0
    return np.load(out)


def test_the_export_opens_in_sentence_transformers(run, exported, tmp_path):
    out, proof = exported
    assert proof.source_to_folder.max_abs_diff == 0 and proof.outputs == "hidden states"
    there = proof.folder_to_transformers
    assert there.max_abs_diff <= 1e-5 * there.max_abs_logit
    assert "hidden states differ by at most" in "\n".join(proof.lines())
    card = (out / "README.md").read_text()
    assert "pipeline_tag: sentence-similarity" in card
    assert "library_name: sentence-transformers" in card and "SentenceTransformer(" in card
    ours = vectors(run.dir, tmp_path, "run")
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(vectors(out, tmp_path, "folder"), ours, atol=1e-6)
    theirs = pytest.importorskip("sentence_transformers").SentenceTransformer(
        str(out), device="cpu"
    )
    assert theirs.max_seq_length == 96 and theirs.similarity_fn_name == "cosine"
    assert len(theirs) == 3  # the encoder, the pooling, the normalization
    np.testing.assert_allclose(theirs.encode([a for a, _ in PAIRS]), ours, atol=1e-5)


def test_prompts_are_put_before_texts(run, exported, tmp_path, capsys):
    """In training, by their name, and by default, as in sentence-transformers."""
    store = TokenStore.open(run.data.dir)
    tokenizer = load_tokenizer(store.tokenizer_dir)
    (row,) = next(iter(store.eval_batches("pairs", 1)))["tokens"]
    said = tokenizer.decode(row.tolist())
    assert "query: where is" in said and "passage: " in said
    folder = tmp_path / "other"
    shutil.copytree(exported[0], folder)
    path = folder / "config_sentence_transformers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"default_prompt_name": "passage"}))
    file, found = tmp_path / "anchors.txt", {}
    file.write_text("".join(f"{anchor}\n" for anchor, _ in PAIRS))
    for name, model, asked in (
        ("query", exported[0], ["--prompt", "query"]), ("passage", folder, []),
    ):  # fmt: skip
        out = str(tmp_path / f"{name}.npy")
        assert main(["embed", str(model), str(file), "--out", out, *asked, *FP32]) == 0
        found[name] = np.load(out)
    assert np.abs(found["query"] - found["passage"]).max() > 1e-3
    assert main(["embed", str(folder), str(file), "--prompt", "title"]) == 2
    assert "has no prompt 'title'; choose 'query' or 'passage'" in capsys.readouterr().err
    kind = pytest.importorskip("sentence_transformers").SentenceTransformer
    theirs, texts = kind(str(folder), device="cpu"), [anchor for anchor, _ in PAIRS]
    np.testing.assert_allclose(theirs.encode(texts), found["passage"], atol=1e-5)
    asked = theirs.encode(texts, prompt_name="query")
    np.testing.assert_allclose(asked, found["query"], atol=1e-5)


@pytest.mark.parametrize("where", ["sentence_bert_config.json", "tokenizer_config.json"])
def test_longer_texts_are_cut_where_the_folder_says(exported, tmp_path, where):
    """As sentence-transformers cuts them, and so again after an import."""
    folder, longest = tmp_path / "other", 4
    shutil.copytree(exported[0], folder)
    for name, key in (
        ("sentence_bert_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        said = json.loads((folder / name).read_text())
        said[key] = longest if name == where else None if "bert" in name else 10**30
        (folder / name).write_text(json.dumps(said))
    ours = vectors(folder, tmp_path, "ours")
    assert np.abs(ours - vectors(exported[0], tmp_path, "whole")).max() > 1e-3
    kind = pytest.importorskip("sentence_transformers").SentenceTransformer
    texts = [anchor for anchor, _ in PAIRS]
    np.testing.assert_allclose(kind(str(folder), device="cpu").encode(texts), ours, atol=1e-5)
    assert main(["import", str(folder), str(tmp_path / "again")]) == 0
    assert load_model(tmp_path / "again").model == load_model(folder).model


@pytest.mark.parametrize(
    "name, key, value",
    [
        ("1_Pooling/config.json", "include_prompt", False),
        ("sentence_bert_config.json", "do_lower_case", True),
        ("tokenizer_config.json", "truncation_side", "left"),
        # as sentence-transformers 6 writes them
        ("sentence_bert_config.json", "processing_kwargs", {"text": {"max_length": 4}}),
        ("config_sentence_transformers.json", "truncate_dim", 16),
    ],
)
def test_settings_that_are_not_computed_are_refused(exported, tmp_path, name, key, value):
    folder = tmp_path / "other"
    shutil.copytree(exported[0], folder)
    said = json.loads((folder / name).read_text()) | {key: value}
    (folder / name).write_text(json.dumps(said))
    value = str(value).lower() if isinstance(value, bool) else value
    with pytest.raises(UserError, match=f"{key} is {value}"):
        load_model(folder)


def test_it_is_read_as_it_was_written(run, exported, tmp_path, capsys):
    again = load_model(exported[0]).model
    assert isinstance(again, Embedder) and (again.pooling, again.length) == ("first", "one")
    assert again.prompts == tuple(PROMPTS.items()) and again.default_prompt is None
    assert replace(again, prompts=()) == run.objective.exported(run.model, {})[0]
    assert main(["verify", run.dir, str(exported[0])]) == 0
    assert main(["params", str(exported[0])]) == 0
    assert main(["import", str(exported[0]), str(tmp_path / "again")]) == 0
    assert load_model(tmp_path / "again").model == again
    assert main(["generate", run.dir, "--prompt", "a"]) == 2
    assert "'eurobert' is an encoder" in capsys.readouterr().err
    assert main(["export", run.dir, str(tmp_path / "a.gguf")]) == 2
    assert "EuroBertModel: has no GGUF form here" in capsys.readouterr().err
    assert main(["vocab", run.dir, str(tmp_path / "v"), "--size", "400"]) == 2


@pytest.mark.parametrize("family, form", [("eurobert", "run"), ("modernbert", "folder")])
def test_a_masked_encoder_is_the_start_without_its_head(run, tmp_path, family, form):
    masked = replace(
        run, dir=str(tmp_path / "mlm"), objective=Mlm(mask_token_id=1), model=MODELS[family]
    )
    origin = save_run(masked, steps=(1,))
    theirs = dict(walk(weights_at(1, masked.model.spec())))
    if form == "folder":
        export_command(origin, tmp_path / "hf")
        origin = tmp_path / "hf"
    found = started(replace(run, model=MODELS[family]), origin, tmp_path)
    left = {"head", "dense", "head_norm", "decoder_bias"}
    assert set(theirs) - set(found) == left & set(theirs) and set(found) <= set(theirs)
    assert all(np.array_equal(found[name], theirs[name]) for name in found)


def test_its_own_export_is_a_start_too(run, exported, tmp_path):
    found = started(run, exported[0], tmp_path)
    theirs = dict(walk(weights_at(1, run.objective.spec(run.model))))
    assert all(np.array_equal(found[name], theirs[name]) for name in theirs)


def started(run, origin, tmp_path):
    """Weights by path of a run that starts from a place."""
    (tmp_path / "run").mkdir()
    run = replace(run, dir=str(tmp_path / "run"), train=replace(run.train, init_from=str(origin)))
    plan = resolve(run, jax.devices()[:1])
    state = first_state(plan, TokenStore.open(run.data.dir), Frozen({}))
    return dict(walk(state["trained"]["model"]["weights"]))


def test_held_out_pairs_are_ranked(run, capsys):
    """Among all texts of their source, in batches of any size; as counted in loops."""
    opened = open_held_out(run.dir)
    (loss,) = opened.held_out.losses(opened.weights)
    model, w = run.objective.exported(run.model, opened.weights)
    store, found = TokenStore.open(run.data.dir), []
    vectors = jax.jit(lambda w, batch: model.vectors(w, batch, opened.plan.compute, 12)[0][0])
    for batch in store.eval_batches("pairs", 1):
        made = vectors(w, batch_of(batch))
        found += list(np.asarray(made)[: batch["segment_ids"].max()])
    unit = np.array(found) / np.linalg.norm(found, axis=1, keepdims=True)
    a, p = unit[::2], unit[1::2]
    ranks = [1 + sum(a[i] @ p[k] >= a[i] @ p[i] for k in range(len(p)) if k != i)
             for i in range(len(a))]  # fmt: skip
    scores = 20 * (a @ p.T)
    nll = np.mean(np.log(np.exp(scores - np.diag(scores)[:, None]).sum(1)))
    assert loss.tokens == len(a) > 20
    assert loss.loss == pytest.approx(nll, rel=1e-4)
    assert loss.accuracy == pytest.approx(np.mean(np.array(ranks) == 1))
    assert loss.mrr == pytest.approx(np.mean([1 / r if r <= 10 else 0 for r in ranks]))
    assert main(["eval", run.dir]) == 0
    assert f"{loss.mrr:.4f}" in capsys.readouterr().out


@pytest.fixture(scope="module")
def deberta(run, tmp_path_factory):
    """A run of vectors of a DeBERTa, and its export."""
    root = tmp_path_factory.mktemp("deberta")
    found = replace(run, dir=str(root / "run"), model=MODELS["deberta"])
    save_run(found, steps=(1,))
    return found, root / "out", export_command(found.dir, root / "out")


def test_a_deberta_opens_in_sentence_transformers(deberta, tmp_path):
    run, out, proof = deberta
    assert json.loads((out / "config.json").read_text())["architectures"] == ["DebertaV2Model"]
    there = proof.folder_to_transformers
    assert there.max_abs_diff <= 1e-5 * there.max_abs_logit
    assert load_model(out).model == load_model(run.dir).model
    ours = vectors(run.dir, tmp_path, "run")
    np.testing.assert_allclose(vectors(out, tmp_path, "folder"), ours, atol=1e-6)
    theirs = pytest.importorskip("sentence_transformers").SentenceTransformer(
        str(out), device="cpu"
    )
    np.testing.assert_allclose(theirs.encode([a for a, _ in PAIRS]), ours, atol=1e-5)


@pytest.mark.parametrize("form", ["run", "folder"])
def test_a_detector_is_the_start_without_its_head(run, tmp_path, form):
    """From a run of replaced tokens, the two tables of its discriminator added; and `embed` takes
    it as it is."""
    found = replace(
        run, dir=str(tmp_path / "rtd"), objective=Rtd(mask_token_id=1), model=MODELS["deberta"]
    )
    origin = save_run(found, steps=(1,))
    w = weights_at(1, found.objective.spec(found.model))
    theirs = dict(walk(found.objective.exported(found.model, w)[1]))
    if form == "folder":
        export_command(origin, tmp_path / "hf")
        origin = tmp_path / "hf"
    got = started(replace(run, model=MODELS["deberta"]), origin, tmp_path)
    assert {name for name in theirs if name not in got} == {
        name for name in theirs if name.startswith("detector.")
    }
    for name, array in got.items():
        np.testing.assert_allclose(array, theirs[name], atol=1e-6, err_msg=name)
    assert np.isfinite(vectors(origin, tmp_path, form)).all()


def test_prompts_without_effect_are_refused(run):
    for change, said in (
        ({"prompts": {}}, "have different prompts"),
        ({"rows": "labeled"}, "sources.1.prompts: has no"),
    ):
        sources = (run.data.sources[0], replace(run.data.sources[0], name="other", **change))
        with pytest.raises(UserError, match=said):
            check_run(replace(run, data=replace(run.data, sources=sources)))


def test_other_data_is_refused(run):
    with pytest.raises(UserError, match=r'sources.rows: are "related", which objective.kind = '
                       r"'mlm' cannot train on; choose 'embed'$"):  # fmt: skip
        refuse_sources(replace(run, objective=Mlm(mask_token_id=1)))
    text = replace(run.data.sources[0], rows="text")
    with pytest.raises(UserError, match=r'are "text", which .*, or sources of rows = "related"$'):
        refuse_sources(replace(run, data=replace(run.data, sources=(text,))))
    plan = resolve(replace(run, objective=Mlm(mask_token_id=1)), jax.devices()[:1])
    with pytest.raises(UserError, match=r"holds related texts, which .* choose 'embed'"):
        open_stores(plan)
