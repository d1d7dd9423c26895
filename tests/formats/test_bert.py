"""BERT, RoBERTa and XLM-R: folders as they were released, and what transformers and
sentence-transformers make of ours."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.evals.embed import embed_command
from lmwright.evals.predict import predict_command
from lmwright.formats.load import load_model
from tests.parity.compare import randomize
from tests.parity.families import BERT
from tests.parity.row import SIZES

torch = pytest.importorskip("torch", reason="torch is the reference")
transformers = pytest.importorskip("transformers")

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = [chr(c) for c in range(ord("a"), ord("z") + 1)]
WORDS = (*SPECIAL, *LETTERS, *(f"##{c}" for c in LETTERS), "the", "red", "cat")
TEXTS = ["the red cat", "a cat", "the cat sees red and the sea", "red"]
BODIES = {"Bert": "bert", "Roberta": "roberta", "XLMRoberta": "roberta"}
EXACT = {"precision": "fp32"}


def save_tokenizer(folder):
    """A tokenizer with BERT's pairs."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    made = Tokenizer(models.WordPiece({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    named = {f"{w[1:-1].lower()}_token": w for w in SPECIAL}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=64,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"], **named,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return tokenizer


def saved(folder, kind, use, released=True, **said):
    """(their random model, its tokenizer) of a new folder, with a released model's names."""
    said = SIZES | BERT | {"num_hidden_layers": 2, "pad_token_id": 0} | said
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(
        **{key: value for key, value in said.items() if value is not None}
    )
    cls = getattr(transformers, f"{kind}{use}")
    theirs = cls._from_config(config, attn_implementation="eager").float().eval()
    randomize(theirs)
    theirs.save_pretrained(folder)
    if released:
        as_released(folder, BODIES[kind] + ".", use)
    return theirs, save_tokenizer(folder)


def as_released(folder, body, use):
    """Renames norms as they were first named, and adds what released files hold beside."""
    from safetensors.numpy import load_file, save_file

    body = "" if use == "Model" else body
    tensors = load_file(folder / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, name in old.items():
        tensors = {key.replace(new, name): value for key, value in tensors.items()}
    tensors[f"{body}embeddings.position_ids"] = np.arange(192)[None]
    if use == "ForMaskedLM":
        tensors[f"{body}pooler.dense.weight"] = np.zeros((48, 48), np.float32)
        tensors["cls.seq_relationship.bias"] = np.zeros(2, np.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def logits_of(model, w, ids):
    places = np.broadcast_to(np.arange(len(ids)), (1, len(ids)))
    batch = Batch(*map(jnp.asarray, ([ids], np.ones_like(places), places, np.ones(places.shape))))
    fn = jax.jit(lambda w: model.logits(w, model.hidden(w, batch, Compute())[0])[0])
    return np.asarray(fn(w))


def test_a_folder_whose_tokenizer_is_a_vocabulary_alone(tmp_path):
    """As BERT's first derivatives were released: what is written splits texts as their
    BertTokenizer does, and the model knows where a second text begins."""
    folder = tmp_path / "released"
    saved(folder, "Bert", "ForMaskedLM")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS))
    assert main(["import", str(folder), str(tmp_path / "out")]) == 0
    theirs = transformers.BertTokenizer.from_pretrained(folder)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [again(t)["input_ids"] for t in TEXTS] == [theirs(t)["input_ids"] for t in TEXTS]
    assert load_model(tmp_path / "out").model.separator_id == theirs.sep_token_id


@pytest.mark.parametrize("kind", BODIES)
def test_a_released_folder_and_back(kind, tmp_path, capsys):
    """Import reads it, computes what transformers does of a pair of texts, and writes a folder that
    is the same model there."""
    theirs, tokenizer = saved(tmp_path / "released", kind, "ForMaskedLM")
    assert main(["import", str(tmp_path / "released"), str(tmp_path / "out")]) == 0
    capsys.readouterr()
    again = getattr(transformers, f"{kind}ForMaskedLM").from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    )
    asked = tokenizer("the red [MASK]", "a cat", return_tensors="pt")
    if kind != "Bert":  # all of whose tokenizers give type 0
        asked["token_type_ids"].zero_()
    with torch.no_grad():
        wanted, got = (each(**asked).logits[0].numpy() for each in (theirs, again.float().eval()))
    np.testing.assert_array_equal(got, wanted)
    loaded = load_model(tmp_path / "out")
    ids = asked["input_ids"][0].numpy()
    ours = logits_of(loaded.model, loaded.weights, ids)
    np.testing.assert_allclose(ours, wanted, atol=2e-5 * np.abs(wanted).max())
    if kind == "Bert":
        assert loaded.model.separator_id == tokenizer.sep_token_id
        assert int(asked["token_type_ids"].sum()) > 2


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_pairs_are_judged_as_in_transformers(kind, tmp_path):
    labels = {0: "no", 1: "maybe", 2: "yes"}
    types = {"type_vocab_size": 1} if kind == "Roberta" else {}
    theirs, tokenizer = saved(
        tmp_path / "model", kind, "ForSequenceClassification", id2label=labels, **types
    )
    if kind == "Bert":  # as a store keeps it: written anew, it asks for types again
        config = tmp_path / "model" / "tokenizer_config.json"
        said = json.loads(config.read_text())
        del said["model_input_names"]
        config.write_text(json.dumps(said))
        assert main(["import", str(tmp_path / "model"), str(tmp_path / "again")]) == 0
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    file, out = tmp_path / "pairs.jsonl", tmp_path / "out.jsonl"
    pairs = list(zip(TEXTS, reversed(TEXTS), strict=True))
    file.write_text("".join(json.dumps({"text": a, "second": b}) + "\n" for a, b in pairs))
    said = {"out": str(out), "pair_column": "second", **EXACT}
    assert predict_command(str(tmp_path / "model"), str(file), **said) == 0
    for line, (a, b) in zip(out.read_text().splitlines(), pairs, strict=True):
        asked = tokenizer(a, b, return_tensors="pt")
        if kind == "Roberta":
            del asked["token_type_ids"]
        with torch.no_grad():
            wanted = theirs(**asked).logits[0].softmax(0).numpy()
        scores = json.loads(line)["scores"]
        np.testing.assert_allclose([scores[name] for name in labels.values()], wanted, atol=1e-5)


@pytest.mark.parametrize("kind", BODIES)
def test_vectors_are_means_of_their_tokens(kind, tmp_path):
    theirs, tokenizer = saved(tmp_path / "model", kind, "Model")
    file, out = tmp_path / "texts.txt", tmp_path / "out.npy"
    file.write_text("".join(f"{text}\n" for text in TEXTS))
    assert embed_command(str(tmp_path / "model"), str(file), out=str(out), **EXACT) == 0
    for ours, text in zip(np.load(out), TEXTS, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            mean = theirs(input_ids=ids).last_hidden_state[0].mean(0)
        wanted = mean.numpy()
        cosine = ours @ wanted / np.linalg.norm(ours) / np.linalg.norm(wanted)
        assert cosine == pytest.approx(1, abs=1e-5)


def test_positions_begin_behind_padding(tmp_path, capsys):
    """A RoBERTa of another tokenizer is told before it trains: there, positions would be others."""
    (tmp_path / "text.txt").write_text("\n".join(TEXTS * 30))
    run = tmp_path / "run.toml"
    run.write_text(f"""
        recipe = "pretrain-encoder"
        name = "run"
        dir = "{tmp_path / "run"}"
        model.kind = "roberta"
        model.vocab_size = 300
        model.embed_dim = 16
        model.mlp_dim = 24
        model.num_layers = 1
        model.num_heads = 2
        model.num_kv_heads = 2
        model.head_dim = 8
        model.seq_len = 32
        train = {{steps = 1, global_batch_size = 8}}
        [data]
        dir = "{tmp_path / "data"}"
        workers = 1
        tokenizer.vocab_size = 290
        sources = [{{path = "{tmp_path / "text.txt"}", documents = "line"}}]
    """)
    assert main(["prepare", str(run)]) == 0
    assert main(["train", str(run)]) == 2
    told = capsys.readouterr().err
    assert "pads with 1" in told and "use model.kind = 'bert' with token_types = 1" in told
    run.write_text(run.read_text().replace('"roberta"', '"bert"\n        model.token_types = 1'))
    assert main(["train", str(run)]) == 0
