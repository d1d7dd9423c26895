"""The files by which sentence-transformers opens a Hugging Face folder, and gives its vectors.

modules.json             Transformer, Pooling, and Normalize for vectors of length 1
1_Pooling/config.json    which tokens a vector is made of
sentence_bert_config.json    tokens of the longest text; longer ones are cut
config_sentence_transformers.json    prompts by name, and the one that is put before texts unasked
"""

from pathlib import Path
from typing import Any

from lmwright.data.json_text import parse_json, write_json
from lmwright.errors import UserError
from lmwright.models.hf.embedder import TokenPooling

MODULES, POOLING = "modules.json", "1_Pooling"
PROMPTS = "config_sentence_transformers.json"
LIMITS, TOKENIZER = "sentence_bert_config.json", "tokenizer_config.json"
MODES: dict[TokenPooling, str] = {"mean": "mean_tokens", "first": "cls_token"}
SHORT = {"mean_tokens": "mean", "cls_token": "cls"}  # in sentence-transformers 6


def write_modules(folder: Path, model: Any) -> None:
    """Writes the files by which sentence-transformers, old and new, opens a folder as this
    Embedder."""
    modules = [("", "Transformer"), (POOLING, "Pooling")]
    modules += [("2_Normalize", "Normalize")] if model.length == "one" else []
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules)
    ]
    for path, _ in modules[1:]:
        (folder / path).mkdir()
    modes = {f"pooling_mode_{mode}": ours == model.pooling for ours, mode in MODES.items()}
    write_json(folder / MODULES, listed)
    write_json(
        folder / POOLING / "config.json", {"word_embedding_dimension": model.embed_dim} | modes
    )
    limits = {"max_seq_length": model.seq_len, "do_lower_case": False}
    write_json(folder / LIMITS, limits)
    said = {"prompts": dict(model.prompts), "default_prompt_name": model.default_prompt}
    write_json(folder / PROMPTS, said | {"similarity_fn_name": "cosine"})


def read_modules(folder: Path) -> dict[str, Any]:
    """`pooling`, `length`, `max_tokens` and prompts of an Embedder as the files say; nothing where
    there are none. Raises UserError for parts that lmwright does not compute, and for damaged
    files."""
    if not (folder / MODULES).exists():
        return {}
    try:
        return _read(folder)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder / MODULES}: cannot be read ({error!r:.200}); download the folder again"
        ) from None


def _read(folder: Path) -> dict[str, Any]:
    listed = parse_json(folder / MODULES)
    kinds = [str(each["type"]).rpartition(".")[2] for each in listed]
    others = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if others or kinds.count("Pooling") != 1:
        raise UserError(
            f"{folder / MODULES}: {others[0] if others else 'no single Pooling'} is not supported, "
            "only Transformer, Pooling and Normalize"
        )
    inner = str(listed[kinds.index("Pooling")]["path"])
    if Path(inner).name != inner:  # a path that leaves the folder would read whatever lies there
        raise ValueError(f"{inner!r} is not a folder in it")
    path = folder / inner / "config.json"
    pooling, prompts = parse_json(path), _prompts(folder / PROMPTS)
    if prompts["prompts"] and pooling.get("include_prompt", True) is not True:
        raise UserError(
            f"{path}: include_prompt is false, which leaves prompts out of the mean and is not "
            f"computed; remove the prompts from {PROMPTS} if you need none"
        )
    return {
        "pooling": _pooling(pooling, path),
        "length": "one" if "Normalize" in kinds else "any",
        "max_tokens": _max_tokens(folder),
    } | prompts


def _max_tokens(folder: Path) -> int | None:
    """Tokens of the longest text that sentence-transformers does not cut, None if the files do not
    say it. Raises UserError where they read texts in ways that are not computed."""
    path = folder / LIMITS
    said = parse_json(path) if path.exists() else {}
    if said.get("do_lower_case"):
        raise UserError(
            f"{path}: do_lower_case is true, which is not computed; set it to false and put a "
            "Lowercase normalizer into tokenizer.json"
        )
    if how := said.get("processing_kwargs"):
        raise UserError(
            f"{path}: processing_kwargs is {how}, settings for reading texts that are not "
            "supported; remove it, and set the longest text by max_seq_length"
        )
    tokenizer = parse_json(folder / TOKENIZER) if (folder / TOKENIZER).exists() else {}
    if tokenizer.get("truncation_side") == "left":
        raise UserError(
            f"{folder / TOKENIZER}: truncation_side is left, but longer texts lose their end here; "
            "remove it if none of yours is longer"
        )
    most = said.get("max_seq_length")
    if most is None:
        most = tokenizer.get("model_max_length")
    if most is not None and (isinstance(most, bool) or not most >= 1):
        raise ValueError(f"{most!r} tokens are not a length")
    return None if most is None else int(most)


def _prompts(path: Path) -> dict[str, Any]:
    """`prompts` and `default_prompt` of an Embedder, without empty ones. Raises UserError where the
    vectors are cut."""
    said = parse_json(path) if path.exists() else {}
    found = {str(name): text for name, text in (said.get("prompts") or {}).items() if text}
    default = said.get("default_prompt_name")
    if (dim := said.get("truncate_dim")) is not None:
        raise UserError(
            f"{path}: truncate_dim is {dim}, but vectors are whole here; remove it, and cut them "
            f"with lmwright embed --dim {dim}"
        )
    if not all(isinstance(text, str) for text in found.values()):
        raise ValueError(f"prompts in {path.name} are not text")
    return {
        "prompts": tuple(found.items()),
        "default_prompt": default if default in found else None,
    }


def _pooling(config: dict[str, Any], where: Path) -> TokenPooling:
    """Our name of the pooling that a file of sentence-transformers says."""
    said = [
        name.removeprefix("pooling_mode_")
        for name, value in config.items()
        if name.startswith("pooling_mode_") and value is True
    ]
    mode = config.get("pooling_mode", said or "mean")
    modes = [mode] if isinstance(mode, str) else list(mode)
    for ours, theirs in MODES.items():
        if modes in ([theirs], [SHORT[theirs]]):
            return ours
    raise UserError(
        f"{where}: pooling {', '.join(map(str, modes)) or 'none'} is not supported, only mean and "
        "cls"
    )
