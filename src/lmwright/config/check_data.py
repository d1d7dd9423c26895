"""Checks of `data` alone, before any text is read; `config.check` has those of a whole run."""

from collections import Counter

from lmwright.config.errors import join, nearest, problems
from lmwright.config.fields import default_of
from lmwright.config.rows import PLAIN, ROW_PARTS
from lmwright.config.run import Chat, Data, Pack, Source, Tokenizer
from lmwright.errors import UserError

ONLY_TRAINED = ("train", "vocab_size", "special_tokens", "sample_bytes")
"""Fields that set how a tokenizer is trained, without effect on an imported one."""
EARLIER_VOCAB_SIZE = 8192
"""Ids of a trained tokenizer where neither it nor a model says how many."""


def check_data(data: Data, seq_len: int) -> None:
    """Raises UserError for data whose fields contradict each other or have no effect, in rows of
    `seq_len` tokens. The error lists every problem found."""
    lines = data_problems(data, seq_len)
    if lines:
        raise join(lines)


def data_problems(data: Data, seq_len: int) -> list[str]:
    """A sentence for each problem."""
    checks = (
        _check_tokenizer,
        _check_sources,
        _check_weights,
        _check_lengths,
        _check_splitting,
        lambda data: _check_portions(data, seq_len),
    )
    return problems(checks, data)


def _check_tokenizer(data: Data) -> None:
    tokenizer = data.tokenizer
    if tokenizer.path is None:
        special = tokenizer.special_tokens
        if not special or len(set(special)) < len(special):
            raise UserError(
                "data.tokenizer.special_tokens: needs at least one token and no duplicates; the "
                "first one ends a document"
            )
        return
    for name in ONLY_TRAINED:
        field = Tokenizer.__dataclass_fields__[name]
        # run files of earlier versions spell out the size that was the default
        earlier = name == "vocab_size" and tokenizer.vocab_size == EARLIER_VOCAB_SIZE
        if getattr(tokenizer, name) != default_of(field) and not earlier:
            raise UserError(
                f"data.tokenizer.{name}: has no effect beside data.tokenizer.path, which imports "
                f"a tokenizer; remove one of them"
            )


def _check_sources(data: Data) -> None:
    names: set[str] = set()
    for place, source in enumerate(data.sources):
        where = f"data.sources.{place}"
        name = source.name
        if name is not None and (name in names or not name):
            raise UserError(
                f"{where}.name: {name!r} is empty or used twice; give each source its own name"
            )
        names.add(name or "")
        if source.weight is not None and source.use == "eval":
            raise UserError(
                f"{where}.weight: has no effect on a source that is only evaluated; remove it"
            )
        if source.documents != "file" and source.format not in ("auto", "txt"):
            raise UserError(
                f"{where}.documents: has no effect on {source.format}, whose rows are the "
                f"documents; remove it"
            )
        _check_rows(source, where)
        _check_sample(source, where, data.tokenizer)
    kinds = {source.rows for source in data.sources}
    apart = (
        ("preference", "pairs of answers"), ("rated", "rated answers"), ("labeled", "labeled"),
        ("related", "related texts"), ("tagged", "tagged words"),
        ("answered", "questions with answers"),
    )  # fmt: skip
    for kind, what in apart:
        if kind in kinds and len(kinds) > 1:
            raise UserError(
                f'data.sources: rows = "{kind}" are {what}, and other rows are not; '
                "put them in separate runs"
            )
    if any(source.prompts != data.sources[0].prompts for source in data.sources):
        raise UserError(
            "data.sources: have different prompts, and a model has one for queries and one for "
            "passages; give all sources the same"
        )
    if data.sources and data.chat != Chat():
        if all(source.rows in PLAIN for source in data.sources):
            raise UserError(
                "data.chat: has no effect, since no source holds examples; set data.sources.rows"
            )


def _check_rows(source: Source, where: str) -> None:
    if source.unlabeled and source.rows != "labeled":
        raise UserError(
            f'{where}.unlabeled: has no effect on rows = "{source.rows}", only on "labeled" ones; '
            "remove it"
        )
    if source.prompts and source.rows != "related":
        raise UserError(
            f'{where}.prompts: has no effect on rows = "{source.rows}", only on "related" ones; '
            "remove it"
        )
    if source.rows == "text":
        for name in ("columns", "roles"):
            if getattr(source, name):
                raise UserError(
                    f'{where}.{name}: has no effect on rows = "text"; set {where}.rows to one of '
                    f"{', '.join(ROW_PARTS)}, or remove it"
                )
        return
    if source.format == "txt":
        raise UserError(f'{where}.rows: "{source.rows}" needs columns, which txt does not have')
    if source.text_column != default_of(Source.__dataclass_fields__["text_column"]):
        raise UserError(
            f'{where}.text_column: has no effect on rows = "{source.rows}"; use {where}.columns'
        )
    known = [name for names in ROW_PARTS[source.rows] for name in names]
    for name in source.columns:
        if name not in known:
            cure = nearest(name, known, what="there are")
            raise UserError(
                f'{where}.columns.{name}: rows = "{source.rows}" has no such column; {cure}'
            )
    if source.roles and source.rows in ("alpaca", *PLAIN):
        raise UserError(f'{where}.roles: has no effect on rows = "{source.rows}"; remove it')


def _check_sample(source: Source, where: str, tokenizer: Tokenizer) -> None:
    if source.sample_tokens is None:
        if source.sample_seed:
            raise UserError(
                f"{where}.sample_seed: has no effect without sample_tokens; set that or remove it"
            )
        return
    if source.rows != "text":
        raise UserError(
            f"{where}.sample_tokens: counts the tokens of texts, and the rows are "
            f'"{source.rows}"; leave it out'
        )
    if tokenizer.path is None:
        raise UserError(
            f"{where}.sample_tokens: its tokens cannot be counted while the tokenizer is not "
            "trained; set data.tokenizer.path, which may be one that was prepared before"
        )


def _check_weights(data: Data) -> None:
    trained = [source.weight for source in data.sources if source.use != "eval"]
    weighted = [weight for weight in trained if weight is not None]
    if weighted and data.shuffle.order == "none":
        raise UserError(
            'data.shuffle.order: "none" reads source after source, so weights have no effect; '
            "remove data.sources.weight or shuffle"
        )
    if len(weighted) == 1 and len(trained) > 1:
        raise UserError(
            "data.sources: a weight is relative to the other weighted sources, and only one source "
            "has one; give a weight to at least two"
        )


def _check_lengths(data: Data) -> None:
    limited = set()
    for place, source in enumerate(data.sources):
        fewest, most = source.min_tokens, source.max_tokens
        if fewest and most and fewest > most:
            raise UserError(
                f"data.sources.{place}.min_tokens: {fewest} is above max_tokens = {most}; swap them"
            )
        if fewest or most:
            limited.add(source.path)
    shared = limited & {path for path, n in Counter(s.path for s in data.sources).items() if n > 1}
    if data.normalize.dedup == "exact" and shared:
        raise UserError(
            'data.normalize.dedup: "exact" keeps the documents of a file that two sources name for '
            'the first of them, whatever their length; set "none"'
        )


def _check_portions(data: Data, seq_len: int) -> None:
    """The number of rows must be known before any text is read."""
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
        rows = source.sample_tokens // seq_len
        if rows < data.portions:
            raise UserError(
                f"{where}.sample_tokens: {source.sample_tokens:,} are {rows:,} rows of "
                f"{seq_len} tokens, fewer than data.portions = {data.portions}; raise it"
            )


def _check_splitting(data: Data) -> None:
    if any(source.rows != "text" for source in data.sources):
        refuse_splitting(data.pack)


def refuse_splitting(pack: Pack) -> None:
    """Raises UserError unless examples stay whole and separate."""
    if pack.method != "best-fit":
        raise UserError(
            f'data.pack.method: "{pack.method}" cuts examples wherever a row ends; set "best-fit"'
        )
    if pack.attention != "document":
        raise UserError(
            f'data.pack.attention: "{pack.attention}" lets an example see the one before it in '
            'its row; set "document"'
        )
