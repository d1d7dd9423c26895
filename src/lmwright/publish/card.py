"""A card's metadata, which the hub reads: license, base model, datasets, results."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lmwright.errors import UserError, first_line
from lmwright.formats.card import Facts, Rows, published_card
from lmwright.publish.account import client
from lmwright.publish.local_names import drop_from_card, names_of

CARD = "README.md"
TASK = "text-generation"
METRICS = {
    "loss": "Loss", "ppl": "Perplexity", "bits_per_byte": "Bits per byte", "accuracy": "Accuracy",
    "micro_f1": "Micro F1", "macro_f1": "Macro F1", "matthews": "Matthews correlation",
    "pearson": "Pearson correlation", "spearman": "Spearman correlation",
    "accuracy_at_1": "Accuracy at 1", "mrr_at_10": "Reciprocal rank at 10",
}  # fmt: skip
HUB_METRICS = {
    "ppl": "perplexity",
    "micro_f1": "f1",
    "macro_f1": "f1",
    "matthews": "matthews_correlation",
    "accuracy_at_1": "cosine_accuracy@1",
    "mrr_at_10": "cosine_mrr@10",
}  # where the hub calls it otherwise

Relation = Literal["finetune", "adapter", "quantized"]


@dataclass(frozen=True)
class Listing:
    """Metadata of a card that the files do not say."""

    license: str | None
    license_name: str | None = None
    license_link: str | None = None
    base_model: str | list[str] | None = None
    """Name on the hub; a list if the card names several."""
    relation: Relation | None = None
    """The hub's word for how this model was made from the base model."""
    datasets: tuple[str, ...] = ()
    """Names on the hub."""
    languages: tuple[str, ...] = ()
    """ISO 639 codes."""

    @property
    def first_base(self) -> str:
        """The base model, the first one of several; empty without any."""
        return next(iter(names_of(self.base_model)), "")

    @property
    def license_text(self) -> str:
        """The license as a text with a link."""
        name = self.license_name or self.license or "not set yet"
        return f"[{name}]({self.license_link})" if self.license_link else name


NO_METADATA = "---\n\n---\n"


def read_card(text: str, place: str) -> Any:
    """The client's card of a README.md. Raises UserError where its metadata cannot be read."""
    hub = client()
    if not text.lstrip().startswith("---"):
        text = NO_METADATA + text  # the client would warn of a card without any
    try:
        return hub.ModelCard(text, ignore_metadata_errors=False)
    except Exception as error:  # YAML's, or the client's about its content
        reason = first_line(error)
        raise UserError(
            f"{place}: its metadata cannot be read ({reason:.200}); correct it"
        ) from None


def write_card(folder: Path, repo: str, listing: Listing, facts: Facts | None, bare: str) -> Any:
    """Completes README.md of a folder for a repository, or writes it with the text `bare`; returns
    its metadata. What the card says already stays, unless the listing has another value."""
    path = folder / CARD
    text = path.read_text(encoding="utf-8") if path.exists() else bare
    card = read_card(published_card(text, repo, listing.license_text), str(path))
    data, bases = card.data, names_of(listing.base_model)
    drop_from_card(card, bases)
    listed = {
        "license": listing.license,
        "license_name": listing.license_name,
        "license_link": listing.license_link,
        "base_model": listing.base_model,
        "base_model_relation": listing.relation if listing.base_model else None,
        "datasets": list(listing.datasets) or None,
        "language": list(listing.languages) or None,
    }
    for name, value in listed.items():
        if value is not None:
            data[name] = value
    if data.get("base_model") and listing.relation and not data.get("base_model_relation"):
        data["base_model_relation"] = listing.relation
    if facts is not None and (results := eval_results(facts)):
        data.eval_results = results
        data.model_name = repo.rpartition("/")[2]
    path.unlink(missing_ok=True)  # which may be a link to the user's own
    path.write_text(str(card), encoding="utf-8")
    for other in folder.glob(f"*/**/{CARD}"):  # of checkpoints, say
        _without_local_names(other, bases)
    return data


def _without_local_names(path: Path, bases: Sequence[str]) -> None:
    try:
        card = read_card(path.read_text(encoding="utf-8"), str(path))
    except (UserError, UnicodeDecodeError):  # as it is: the hub reads the first card alone
        return
    before = str(card)
    drop_from_card(card, bases)
    if str(card) != before:
        path.unlink()
        path.write_text(str(card), encoding="utf-8")


def eval_results(facts: Facts) -> list[Any]:
    """Held-out figures in the form of the hub's model index; figures that are not finite are left
    out."""
    hub = client()
    return [
        hub.EvalResult(
            task_type=_task(row)[0],
            task_name=_task(row)[1],
            dataset_type=facts.datasets.get(row["source"], row["source"]),
            dataset_name=f"{row['source']} (held out)",
            metric_type=HUB_METRICS.get(name, name),
            metric_name=title,
            metric_value=row[name],
        )
        for row in facts.results
        for name, title in METRICS.items()
        if math.isfinite(row.get(name, math.nan))
    ]


def _task(row: Mapping[str, Any]) -> tuple[str, str]:
    """The hub's name of what was measured, and one for people."""
    if "accuracy_at_1" in row:
        return "sentence-similarity", "Information retrieval"
    if "accuracy" in row or "spearman" in row:
        return "text-classification", "Text classification"
    return TASK, "Language modeling"


def files_table(folder: Path) -> Rows:
    """Names and sizes of the files of a folder."""
    return tuple(
        {"file": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    )
