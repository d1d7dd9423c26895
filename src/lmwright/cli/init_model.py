"""Parts of a run file that `lmwright init` writes for the model from which the run starts."""

from lmwright.config.text import literal
from lmwright.data.tokens.around import ids_around
from lmwright.formats.open import RUN, find_model, open_place
from lmwright.formats.tokenizer_files import open_tokenizer

RANK = 16


def adapter(model: str) -> list[str]:
    """The section of an adapter, with ranks that its smaller matrices take, scaled alike."""
    from lmwright.program.targets import choose

    found = find_model(model)
    most: dict[str, int] = {}
    for target in choose(found, found.spec(), ["all"]):
        name = target.path.rpartition(".")[2]
        most[name] = min(*target.param.matrix_shape, most.get(name, RANK))
    rank = max(most.values())
    lines = ["[lora]", f"rank = {rank}"]
    if rank < RANK:
        lines.append(f"alpha = {2 * rank}")
    if small := {name: size for name, size in most.items() if size < rank}:
        lines.append(f"ranks = {literal(small)}")
        lines.append(f"alphas = {literal({name: 2 * size for name, size in small.items()})}")
    return lines


def begins_texts(model: str) -> bool:
    """True for a model whose texts begin with a token of their own, such as `[CLS]`."""
    place = open_place(model)
    if place.kind == RUN:
        return place.run.data.tokenize.prepend == "bos"
    if place.tokenizer_path is None:
        return False
    tokenizer = open_tokenizer(place.tokenizer_path)
    return ids_around(tokenizer)[0] == (tokenizer.bos_id,)


def without_template(model: str) -> bool:
    """True for a model whose tokenizer has no chat template."""
    path = open_place(model).tokenizer_path
    return path is not None and not open_tokenizer(path).chat_template
