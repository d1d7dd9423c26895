"""A Hugging Face model folder read: config.json to a model, safetensors to weights."""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from lmwright.config.section import validate
from lmwright.core.param import Tree
from lmwright.data.json_text import read_downloaded
from lmwright.errors import UserError
from lmwright.formats.compressed import PackedIntegers, is_compressed
from lmwright.formats.float8_blocks import Float8Blocks, is_float8
from lmwright.formats.fused_tensors import FusedTensors
from lmwright.formats.hf_stream import from_hf
from lmwright.formats.inputs_first import OutputsFirst
from lmwright.formats.recut_tensors import RecutTensors
from lmwright.formats.safetensors import TensorFiles
from lmwright.formats.sentence import read_modules
from lmwright.formats.stacked_experts import UnstackedExperts
from lmwright.formats.ternary import PackedTernary
from lmwright.formats.text_tensors import TextTensors
from lmwright.formats.tokenizer_files import has_tokenizer
from lmwright.models import KINDS
from lmwright.models.answerer import Answerer
from lmwright.models.classifier import Classifier
from lmwright.models.detector import Detector
from lmwright.models.embedder import Embedder
from lmwright.models.hf import TABLES
from lmwright.models.hf.bitnet import QUANTIZATION, is_packed
from lmwright.models.hf.detector import DETECTOR, HEAD_PREFIX
from lmwright.models.hf.embedder import EMBEDDER, VECTORS
from lmwright.models.mask_decoder import MaskDecoder
from lmwright.models.tagger import Tagger
from lmwright.models.text_part import NONE, TEXT_PARTS, architecture_of, text_config, text_part_of

MAX_LAYERS = 10_000
UNNAMED = {
    "deberta-v2": "DebertaV2ForMaskedLM", "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM", "xlm-roberta": "XLMRobertaForMaskedLM",
}  # fmt: skip
"""Architecture of a config.json that names none, by its model type; Microsoft's name none."""
OVER = (Classifier, Tagger, Answerer, Detector, MaskDecoder, Embedder)
"""Models over an encoder; of a name that two of them have, the first that takes it."""
BOOLEANS = (
    "tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob",
)  # fmt: skip


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder. Raises UserError where there is none or it is not one."""
    config = read_downloaded(folder / "config.json", "a Hugging Face model folder")
    if architecture_of(config) == NONE and config.get("model_type") in UNNAMED:
        config = config | {"architectures": [UNNAMED[config["model_type"]]]}
    return config | {VECTORS: read_modules(folder)} if is_body(config, folder) else config


def is_body(config: dict[str, Any], folder: Path) -> bool:
    """True for the config.json of an encoder without a head, which is used for its vectors; one
    of the architectures is a detector's, too, whose head is among the tensors."""
    architecture = architecture_of(config)
    if architecture not in DETECTOR.encoders():
        return architecture in EMBEDDER.encoders()
    try:
        return not any(name.startswith(HEAD_PREFIX) for name in TensorFiles(folder))
    except UserError:  # found again when weights are wanted
        return True


def model_from_config(config: dict[str, Any], where: str) -> Any:
    """The model that a config.json describes, by its architecture. Raises UserError for an
    architecture or a feature that lmwright does not compute."""
    config = text_config(config, where)
    architecture = architecture_of(config)
    for kind in OVER:
        if (alone := kind.hf.of_encoder(config, where)) is not None:
            return kind(**kind.hf.fields(config, model_from_config(alone, where), where))
    known = _kinds(config)
    if architecture not in known:
        close = get_close_matches(architecture, [*known, *TEXT_PARTS], n=2, cutoff=0.7)
        near = f"the nearest: {' and '.join(close)}; " if close else ""
        named = "names no architecture" if architecture == NONE else (
            f"architecture {architecture!r} is not supported"
        )  # fmt: skip
        raise UserError(f"{where}: {named}; {near}these are: {', '.join([*known, *TEXT_PARTS])}")
    _refuse_quantized(config, known[architecture], where)
    _refuse_direction(config, known[architecture], where)
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MAX_LAYERS:  # would be listed one by one
        raise UserError(
            f"{where}: num_hidden_layers = {layers} is not possible; download config.json again"
        )
    for name in BOOLEANS:
        if not isinstance(config.get(name), bool | None):
            raise UserError(f"{where}: {name} = {config[name]!r} is neither true nor false")
    kind = KINDS[known[architecture]]
    try:
        fields = kind.hf.fields(config, where)
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise UserError(
            f"{where}: a value has the wrong type ({error}); download config.json again"
        ) from None
    try:
        return validate(kind, fields, "")
    except UserError as error:  # also of fields that do not fit together
        raise UserError(f"{where}: {error}") from None


def _kinds(config: dict[str, Any]) -> dict[str, str]:
    """The kind of model of each architecture that a config.json may name."""
    return {
        name: kind
        for kind, table in TABLES.items()
        if table.is_of(config)
        for name in table().architectures
    }


def _refuse_quantized(config: dict[str, Any], kind: str, where: str) -> None:
    """Raises UserError for weights in a form that neither the family nor any table reads."""
    read = TABLES[kind].quantized or is_compressed(config) or is_float8(config)
    if config.get(QUANTIZATION) and not read:
        raise UserError(
            f"{where}: quantization_config is set; start from the unquantized model instead"
        )


def _refuse_direction(config: dict[str, Any], kind: str, where: str) -> None:
    """Raises UserError where is_causal, which transformers reads from 5.2 on, says otherwise than
    the family about what tokens see."""
    both_ways = KINDS[kind].both_ways
    if bool(config.get("is_causal", not both_ways)) == both_ways:
        raise UserError(
            f"{where}: is_causal = {json.dumps(config['is_causal'])} is not the direction of "
            f"{architecture_of(config)} here, whose tokens see "
            f"{'all others' if both_ways else 'those before them'}; remove it if it is wrong"
        )


def open_tensors(folder: Path, config: dict[str, Any]) -> Mapping[str, np.ndarray]:
    """The tensors of an HF folder under the names of the model that its config.json describes.
    Raises UserError where files are missing, damaged or do not agree."""
    where = str(folder / "config.json")
    part = text_part_of(config)
    files: Mapping[str, np.ndarray] = TensorFiles(folder)
    if is_packed(config):
        return PackedTernary(files)
    if is_compressed(config):
        files = PackedIntegers(files, config, where)
    if is_float8(config):
        files = Float8Blocks(files, config, where)
    named = files if part is None else TextTensors(files, part, str(folder))
    own = text_config(config, where)
    kind = _kinds(own).get(architecture_of(own))
    if kind is None:
        return named
    table = TABLES[kind]()
    if table.stacked_experts in ("turns", "columns"):
        return UnstackedExperts(named, str(folder), table.stacked_experts)
    if table.inputs_first:
        return OutputsFirst(named, table)
    cuts, renamed = table.recut(own, where)
    if cuts:
        return RecutTensors(named, cuts, renamed, str(folder))
    fused = table.fused(own, where)
    return FusedTensors(named, fused, str(folder)) if fused else named


def import_hf(folder: str | Path) -> tuple[Any, Tree, Path | None]:
    """(model, weights, folder of the tokenizer or None) of an HF folder.

    Raises UserError in one sentence for whatever keeps it from being exactly this model.
    """
    folder = Path(folder)
    config = read_config(folder)
    model = model_from_config(config, str(folder / "config.json"))
    tensors = open_tensors(folder, config)
    return model, from_hf(model, tensors, str(folder)), folder if has_tokenizer(folder) else None
