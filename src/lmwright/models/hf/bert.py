"""BERT, RoBERTa and XLM-R in Hugging Face."""

import json
from pathlib import Path
from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.deberta import TIED
from lmwright.models.hf.pairs import (
    EVEN_HEADS,
    PLAIN_ACT,
    Derived,
    Fixed,
    Json,
    Words,
    only_written,
)
from lmwright.models.hf.table import EVEN_KEYS, ClassifierForm, Table

LAYER = {
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
    "o": "attention.output.dense", "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense", "down": "output.dense", "mlp_norm": "output.LayerNorm",
}  # fmt: skip
ROWS = {
    "embed": "word_embeddings", "positions": "position_embeddings", "types": "token_type_embeddings"
}  # fmt: skip
OTHER = "{key} = {said} is not computed, only {value}"
SEPARATOR = "[SEP]"


def _weights(body: str, head: dict[str, str], bias: str) -> dict[str, str]:
    """Names over there of ours, whose biases end in `_bias`."""
    both = {"embed_norm": f"{body}.embeddings.LayerNorm", **head}
    both |= {f"layers.{ours}": f"{body}.encoder.layer.{{i}}.{name}" for ours, name in LAYER.items()}
    return {
        "decoder_bias": bias,
        **{ours: f"{body}.embeddings.{theirs}.weight" for ours, theirs in ROWS.items()},
        **{ours: f"{theirs}.weight" for ours, theirs in both.items()},
        **{f"{ours}_bias": f"{theirs}.bias" for ours, theirs in both.items()},
    }


def _read_separator(config: Json, fields: Json, where: str) -> Json:
    """The id of [SEP], which config.json of a released model leaves to the tokenizer beside it."""
    said = config.get("sep_token_id")
    return {"separator_id": _of_tokenizer(Path(where).parent) if said is None else said}


def _of_tokenizer(folder: Path) -> int | None:
    whole, words = folder / "tokenizer.json", folder / "vocab.txt"
    try:
        if whole.is_file():
            added = json.loads(whole.read_text(encoding="utf-8"))["added_tokens"]
            return next((each["id"] for each in added if each["content"] == SEPARATOR), None)
        if words.is_file():
            lines = words.read_text(encoding="utf-8").splitlines()
            return lines.index(SEPARATOR) if SEPARATOR in lines else None
    except (OSError, ValueError, LookupError, TypeError):
        pass  # whoever reads the tokenizer says what is wrong with it
    return None


def _write_separator(model: Any, *_: str) -> Json:
    return {} if model.separator_id is None else {"sep_token_id": model.separator_id}


def _read_positions(config: Json, fields: Json, where: str) -> Json:
    """RoBERTa's table begins with rows up to that of padding, which no token has."""
    first, rows = (config.get("pad_token_id") or 0) + 1, fields["seq_len"]
    if rows <= first:
        raise UserError(f"{where}: max_position_embeddings = {rows} leaves no room for positions")
    return {"first_position": first, "seq_len": rows - first}


def _write_positions(model: Any, *_: str) -> Json:
    first = model.first_position
    return {"max_position_embeddings": model.seq_len + first, "pad_token_id": first - 1}


USUAL: Json = {
    "layer_norm_eps": 1e-12, "type_vocab_size": 2, "hidden_size": 768, "num_hidden_layers": 12,
    "num_attention_heads": 12, "intermediate_size": 3072, "max_position_embeddings": 512,
}  # fmt: skip
"""Values of both families where config.json has none."""
KEYS = EVEN_KEYS | {"norm_eps": "layer_norm_eps", "token_types": "type_vocab_size"}
SAME = (
    TIED,
    EVEN_HEADS,
    Fixed("position_embedding_type", "absolute", OTHER, written=False),
    Fixed("is_decoder", False, OTHER, written=False),
    Fixed("add_cross_attention", False, OTHER, written=False),
)


class BertHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "BERT"
    model_types: ClassVar = {"BertForMaskedLM": "bert"}
    weights = _weights(
        "bert",
        {"dense": "cls.predictions.transform.dense",
         "head_norm": "cls.predictions.transform.LayerNorm"},
        "cls.predictions.bias",
    )  # fmt: skip
    classifier: ClassVar = ClassifierForm(
        "BertForSequenceClassification", "cls", "bert.pooler.dense"
    )
    answers = "qa_outputs"
    body = "BertModel"
    keys = KEYS
    pairs = (
        PLAIN_ACT,
        *SAME,
        Derived(_read_separator, _write_separator),
        only_written(bos_token_id=None, eos_token_id=None),
    )
    defaults: ClassVar[Json] = USUAL | {"vocab_size": 30_522}


class RobertaHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "RoBERTa"
    model_types: ClassVar = {"RobertaForMaskedLM": "roberta"}
    weights = _weights(
        "roberta", {"dense": "lm_head.dense", "head_norm": "lm_head.layer_norm"}, "lm_head.bias"
    )
    classifier: ClassVar = ClassifierForm(
        "RobertaForSequenceClassification", "cls", "classifier.dense", "classifier.out_proj"
    )
    answers = "qa_outputs"
    body = "RobertaModel"
    keys = KEYS
    pairs = (
        # another one than that of the head's own layer is not computed
        Words("mlp", "hidden_act", {"gelu_erf": "gelu"}, "gelu"),
        *SAME,
        Derived(_read_positions, _write_positions),
        Derived(lambda *_: {"separator_id": None}),
    )
    defaults: ClassVar[Json] = USUAL | {"vocab_size": 50_265, "pad_token_id": 1}


class XlmRobertaHf(RobertaHf):
    """Both directions of the family's Hugging Face form."""

    name = "XLM-R"
    model_types: ClassVar = {"XLMRobertaForMaskedLM": "xlm-roberta"}
    classifier: ClassVar = ClassifierForm(
        "XLMRobertaForSequenceClassification", "cls", "classifier.dense", "classifier.out_proj"
    )
    body = "XLMRobertaModel"
    defaults = RobertaHf.defaults | {"vocab_size": 30_522}
