"""Tables of models over an encoder in Hugging Face: that of the encoder, with names for what is in
place of the head over its vocabulary, whose settings are pairs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmwright.errors import UserError
from lmwright.models.hf import TABLES
from lmwright.models.hf.pairs import Json, Pair
from lmwright.models.text_part import architecture_of


@dataclass(frozen=True)
class Over:
    """Hugging Face form of a kind of models over an encoder: `Kind.hf`, and of one `model.hf`."""

    named: Callable[[Any], str | None]
    """The architecture over an encoder with this table, None where there is none."""
    weights: Callable[[Any], dict[str, str]]
    """Names of the weights over an encoder with this table."""
    pairs: tuple[Pair, ...] = ()
    """Pairs of its own settings; the encoder is among the fields that are given to them."""
    unless: str = ""
    """Key of config.json with which it is of another form."""

    def __get__(self, model: Any, kind: Any) -> Any:
        return self if model is None else OverTable(self, model)

    def encoders(self) -> dict[str, str]:
        """Architectures of models over encoders, and those of their encoders with the head over the
        vocabulary."""
        tables = [table() for table in TABLES.values()]
        return {name: table.architectures[0] for table in tables if (name := self.named(table))}

    def of_encoder(self, config: Json, where: str) -> Json | None:
        """config.json of the encoder alone, None for one of another form. Raises UserError for
        what is not known."""
        alone = self.encoders().get(architecture_of(config))
        if alone is None or self.unless in config:
            return None
        return config | {"architectures": [alone]}

    def fields(self, config: Json, encoder: Any, where: str) -> Json:
        """Fields of the model over this encoder for a config.json at `where`. Raises UserError for
        what is not computed."""
        fields = {"encoder": encoder}
        for pair in self.pairs:
            fields |= pair.read(config, fields, where)
        return fields


OF_FILES = (
    "modules", "inputs_first", "convs", "rows", "by_head", "stacked_experts", "peft_experts",
    "peft_refuses", "stacked_names", "needs_ids",
)  # fmt: skip
"""What a table says of weights in files, which is the same under another head."""


class OverTable:
    """The table of one model over an encoder."""

    def __init__(self, form: Over, model: Any):
        table = model.encoder.hf
        self.form, self.name = form, table.name
        self.weights: Mapping[str, str] = form.weights(table)
        for said in OF_FILES:
            setattr(self, said, getattr(table, said))

    def config(self, model: Any) -> Json:
        """config.json of the model, tokenizer ids left out. Raises UserError for what it cannot
        say."""
        config = model.encoder.hf.config(model.encoder)
        of_encoders = {alone: name for name, alone in self.form.encoders().items()}
        architecture = of_encoders[config["architectures"][0]]
        for pair in self.form.pairs:
            config |= pair.write(model, architecture, self.name)
        return config | {"architectures": [architecture]}


def read_labels(config: Json, called: str, where: str) -> tuple[str, ...]:
    """Classes or tags in the order of their numbers. Raises UserError where they do not begin with
    0."""
    names = config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    by_number = names if isinstance(names, Mapping) else {}
    by_number = {str(number): str(label) for number, label in by_number.items()}
    numbers = [str(i) for i in range(len(by_number))]
    if not numbers or sorted(by_number) != sorted(numbers):
        raise UserError(f"{where}: id2label does not number the {called} from 0; correct it")
    return tuple(by_number[number] for number in numbers)


def refuse_few(labels: Sequence[str], called: str, where: str) -> None:
    """Raises UserError for classes or tags between which there is nothing to choose."""
    if len(set(labels)) < max(2, len(labels)):
        raise UserError(f"{where}: id2label has fewer than two {called}, or one twice; correct it")


def write_labels(labels: Sequence[str]) -> Json:
    """The keys of classes or tags."""
    by_number = {str(i): label for i, label in enumerate(labels)}
    return {"id2label": by_number, "label2id": {label: int(i) for i, label in by_number.items()}}
