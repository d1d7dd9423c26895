"""The tokenizer of a model that reads documents, as other programs use it."""

from pathlib import Path
from typing import Any

from lmwright.formats.tokenizer_files import begin_once, limit_tokens, name_inputs
from lmwright.models.over import OverEncoder


def fit_tokenizer(folder: Path, model: Any) -> None:
    """Makes the tokenizer of a folder join and cut texts as the training of a model did that reads
    documents; that of another model stays."""
    if not isinstance(model, OverEncoder):
        return
    if model.pairs_begin_once:
        begin_once(folder)
    if getattr(model.encoder, "tells_texts_apart", False):
        name_inputs(folder, ["input_ids", "token_type_ids", "attention_mask"])
    if model.reads_documents:
        limit_tokens(folder, model.seq_len)
