"""Checks of `data.portions`: the number of rows must be known before any text is read."""

from lmwright.config.rows import PLAIN
from lmwright.config.run import Run, seq_len_of
from lmwright.errors import UserError


def check_portions(run: Run) -> None:
    """Raises UserError for a run whose portions could not be counted, or would hold nothing."""
    data = run.data
    if data.portions is None:
        return
    if data.pack.method != "chunk":
        raise UserError(
            f'data.portions: rows of data.pack.method = "{data.pack.method}" cannot be counted '
            'before their text is read; set "chunk", or leave portions out'
        )
    if data.normalize.dedup != "none":
        raise UserError(
            f'data.portions: data.normalize.dedup = "{data.normalize.dedup}" compares all text '
            'before any is trained on; set "none", or leave portions out'
        )
    if data.sources and data.tokenizer.path is None:
        raise UserError(
            "data.portions: a tokenizer is trained on all text; set data.tokenizer.path, or leave "
            "portions out"
        )
    for place, source in enumerate(data.sources):
        where = f"data.sources.{place}"
        if source.rows != PLAIN[0]:
            raise UserError(
                f'{where}.rows: "{source.rows}" are never cut, so their rows cannot be counted '
                "before they are read; leave data.portions out"
            )
        if source.use == "eval":
            continue
        if source.sample_tokens is None:
            raise UserError(
                f"{where}.sample_tokens: missing, and data.portions are cut from samples; say how "
                "many tokens"
            )
        rows = source.sample_tokens // seq_len_of(run)
        if rows < data.portions:
            raise UserError(
                f"{where}.sample_tokens: {source.sample_tokens:,} are {rows:,} rows of "
                f"{seq_len_of(run)} tokens, fewer than data.portions = {data.portions}; raise it"
            )
