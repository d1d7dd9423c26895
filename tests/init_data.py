"""Data and models for which `lmwright init` writes run files."""

import json

import pyarrow as pa

from lmwright.config.run import Tokenizer
from lmwright.data.tokens.tokenizer import save_tokenizer, train_tokenizer
from lmwright.models.eurobert import EuroBert
from lmwright.models.llama import Llama
from tests.in_memory import export_hf
from tests.labeled_run import SIZES
from tests.saved_run import weights_at

WIDE = SIZES | {"seq_len": 400, "mlp_dim": 24}
NAMES = {"names": ["loc", "PER"], "_type": "ClassLabel"}
TAGS = {"feature": {"names": ["O", "B-PER", "B-LOC"], "_type": "ClassLabel"}, "_type": "List"}


def make_models(root):
    """A folder of a decoder and one of an encoder in `root`."""
    trained = train_tokenizer(["who are you? I am a model"] * 9, Tokenizer(vocab_size=280))
    save_tokenizer(trained, root / "tokenizer")
    for name, model in (
        ("decoder", Llama(**WIDE)),
        ("encoder", EuroBert(**WIDE)),
    ):
        export_hf(model, weights_at(1, model.spec()), root / "tokenizer", root / name)
    return root


def write(path, *rows):
    """Writes rows as lines of JSON; returns the path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def described(rows, **features):
    """A table with types of columns as `datasets` writes them."""
    types = {name: {"dtype": "string", "_type": "Value"} for name in rows[0]} | features
    about = json.dumps({"info": {"features": types}})
    return pa.Table.from_pylist(rows).replace_schema_metadata({"huggingface": about})
