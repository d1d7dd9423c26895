"""A GGUF file written, for llama.cpp and what is built on it: floats, Q8_0, ternary or in blocks.

weights --Hugging Face layout--> GGUF's names and order of rows --quantized--> file --read again-->
proof, beside the file. Matrices take the type asked for; vectors stay F32, as llama.cpp wants.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import lmwright
from lmwright.core.contract import HfModel
from lmwright.core.param import Tree
from lmwright.data.tokens.gguf_header import gguf_package, write_tensor
from lmwright.data.tokens.gguf_tokenizer import metadata_of_tokenizer, name_of_model
from lmwright.errors import UserError
from lmwright.formats import gguf_apertus, gguf_falcon, gguf_hybrid, gguf_mamba, gguf_read
from lmwright.formats.card import Facts
from lmwright.formats.compressed import refuse_grid
from lmwright.formats.encoding import cast_tensor, refuse_dtype
from lmwright.formats.gguf_apart import Apart
from lmwright.formats.gguf_blocks import BLOCKS, MIXES, block_in, type_of_file
from lmwright.formats.gguf_names import SHIFT, NameMap, metadata_of
from lmwright.formats.gguf_order import in_order
from lmwright.formats.gguf_read import SCALE, is_headless, open_written, slots_in_file
from lmwright.formats.gguf_rope import ROPE_FACTORS, rope_factors
from lmwright.formats.hf_layout import Slot, slots
from lmwright.formats.hf_stream import check_tensors, from_hf
from lmwright.formats.hf_write import checked_tokenizer
from lmwright.formats.places import being_written, new_place, refuse_existing
from lmwright.formats.proof import ALIKE, OF_TRAINING, Proof, Source, prove
from lmwright.formats.tensor_hash import CONVERT, add_tensor
from lmwright.formats.ternary import TernaryValues, codes_of, codes_of_values, has_ternary
from lmwright.formats.tokenizer_files import prompt_prefix
from lmwright.guard.files import sync
from lmwright.models.counts import is_layer_matrix

TYPES = {
    "fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "tq1_0": "TQ1_0",
    "tq2_0": "TQ2_0", **{kind.lower(): kind for kind in (*BLOCKS, *MIXES)},
}  # fmt: skip
TERNARY = ("TQ1_0", "TQ2_0")
Q8_ROW = 32  # values of a row that share a scale
TERNARY_ROW = 256  # values of a row that share a scale
# rounding to 8 bits: half a step of a scale that is itself rounded to float16
Q8_ERROR = (0.5 + 127 * 2**-11) / 127


@dataclass(frozen=True)
class Entry:
    """One tensor of the file and the slots that it is made of (several experts, mostly one)."""

    name: str
    parts: tuple[Slot, ...]
    stacked: bool
    kind: str
    of_part: tuple[int, ...]
    """Shape of each."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.of_part) if self.stacked else self.of_part


def write_gguf(
    model: HfModel,
    tensors: Mapping[str, np.ndarray],
    load: Callable[[], Tree],
    tokenizer_dir: Path | None,
    out: str | Path,
    *,
    dtype: str,
    facts: Facts | None = None,
    prefix: tuple[int, ...] | None = None,
    end_ids: tuple[int, ...] = (),
    overwrite: bool = False,
    source: Source | None = None,
) -> Proof:
    """Writes the file `out` and `out`.convert.json; returns the proof.

    `dtype` is one of TYPES; the rest as in `write_hf`. Raises UserError, leaving
    nothing behind, if `out` exists (`overwrite` replaces it), cannot be written, or model or
    tokenizer have no GGUF form; RuntimeError where the proof fails.
    """
    out = new_place(out)
    refuse_dtype(dtype, TYPES)
    refuse_existing(out, overwrite)
    proved, of_source, load = gguf_mamba.as_granite(model, tensors, load)
    model, tensors = gguf_falcon.folded(proved, of_source)
    tokenizer = checked_tokenizer(model, tokenizer_dir)
    config = model.hf.config(model)
    name, arch, meta = metadata_of(config, str(out))
    refuse_type(proved, TYPES[dtype])
    if TYPES[dtype] in ("Q8_0", *BLOCKS, *MIXES):
        refuse_grid(dtype, of_source)
    entries = _entries(model, name, TYPES[dtype])
    if has_ternary(model):
        tensors = TernaryValues(model, tensors)
    if cuts := gguf_read.cuts_of(model):
        tensors = Apart(tensors, cuts)
    facts = facts or Facts(name=out.stem)
    keys = _keys(name, meta, tokenizer, model, prefix, facts, str(tokenizer_dir))
    keys |= _ends(tokenizer, end_ids) | gguf_apertus.metadata(tensors, slots(model))
    with being_written(out, ".gguf") as hidden:
        _write(hidden, name, keys, entries, tensors, config, arch)
        kinds = Counter(entry.kind for entry in entries)
        proof = prove(
            proved,
            of_source,
            load,
            lambda: _read_again(hidden, model, tensors),
            tokenizer,
            dtype=dtype,
            compared=", ".join(f"{n} in {kind}" for kind, n in sorted(kinds.items()))
            + (", within half a step" if dtype == "q8_0" else ", equal bit for bit"),
            xxh3=_compare(hidden, model, entries, tensors),
            result=hidden,
            source=source,
            exact=dtype == "fp32",
        )
        refuse_existing(out, overwrite)  # another command may have made it meanwhile
        _take_names(hidden, out, proof)
    return proof


def _take_names(hidden: Path, out: Path, proof: Proof) -> None:
    """Gives a finished file its name, and its proof the name beside it. At no moment does the proof
    of another file lie there, which would call this one damaged."""
    note = out.with_name(f"{out.name}.{CONVERT}")
    with being_written(note, ".tmp") as hidden_note:
        hidden_note.write_text(json.dumps(proof.to_dict(), indent=2) + "\n")
        for path in (hidden, hidden_note):
            sync(path)
        note.unlink(missing_ok=True)
        os.replace(hidden, out)
        os.replace(hidden_note, note)
    sync(out.absolute().parent)


def _entries(model: HfModel, name: str, kind: str) -> list[Entry]:
    config = model.hf.config(model)
    place = NameMap(name, config["num_hidden_layers"])
    grouped: dict[str, list[tuple[int | None, Slot]]] = {}
    for slot in slots_in_file(model):
        there, expert = place(slot.name)
        grouped.setdefault(there, []).append((expert, slot))
    entries = []
    for there, members in grouped.items():
        experts = [expert for expert, _ in members]
        if experts != [None] and experts != list(range(len(members))):
            raise UserError(f"{there}: two weights go by this name in GGUF")
        parts = tuple(slot for _, slot in members)
        stored = kind_in_file(parts[0], there, kind, config)
        shape = gguf_hybrid.shape_in_file(parts[0].name, parts[0].shape, config)
        entries.append(Entry(there, parts, experts != [None], stored, shape))
    return entries


def kind_in_file(slot: Slot, name: str, kind: str, config: Mapping[str, Any]) -> str:
    """Type of the tensor `name` in a file of a `kind`, of a model with this config.json."""
    kind = block_in(kind, name, config["num_hidden_layers"])
    # llama.cpp keeps vectors, filters, positions and the router in float32
    vector = len(slot.shape) < 2 or slot.shape[0] == 1 or gguf_hybrid.is_filter(slot.name)
    vector |= slot.name.endswith("_norm.weight")  # of heads, each with its own
    if vector or "experts" in slot.param.outputs or slot.param.inputs == ("distances",):
        return "F32"
    run = gguf_hybrid.in_order(slot.name, slot.shape[-1], config)
    if kind in BLOCKS and (run % BLOCKS[kind].codes or not is_layer_matrix(slot.param)):
        kind = "Q8_0" if BLOCKS[kind].codes > Q8_ROW else "F16"
    if (kind == "Q8_0" and run % Q8_ROW) or (kind in TERNARY and not slot.param.ternary):
        return "F16"
    return kind


def refuse_type(model: HfModel, kind: str) -> None:
    """Raises UserError for a type that does not hold the model's weights."""
    ternary = [slot for slot in slots_in_file(model) if slot.param.ternary]
    if kind in TERNARY and not ternary:
        raise UserError(
            f"dtype: {kind.lower()} is for ternary weights, and a {model.kind!r} model has none; "
            "use q8_0"
        )
    if kind == "Q8_0" and ternary:
        raise UserError(
            f"dtype: q8_0 would round the ternary weights of a {model.kind!r} model again; use "
            "tq2_0, which is smaller and exact"
        )
    if kind in (*BLOCKS, *MIXES):
        gguf_read.refuse_blocks(model, "dtype", kind.lower())
    odd = next((slot for slot in ternary if slot.shape[-1] % TERNARY_ROW), None)
    if kind in TERNARY and odd is not None:
        raise UserError(
            f"dtype: {kind.lower()} takes rows of a multiple of {TERNARY_ROW}, and {odd.name} has "
            f"{odd.shape[-1]}; use fp32, which holds the same values, or fp16, which rounds the "
            "scales"
        )


def _keys(
    name: str,
    meta: dict[str, Any],
    tokenizer: Any,
    model: HfModel,
    prefix: tuple[int, ...] | None,
    facts: Facts,
    where: str,
) -> dict[str, Any]:
    keys = {"general.name": facts.name, "general.type": "model"}
    keys["general.quantized_by"] = f"lmwright {lmwright.__version__}"
    keys |= {f"{name}.{key}": value for key, value in meta.items()}
    if model.fills_masks:
        keys[SHIFT] = model.predicts == "next"
    if tokenizer is None:
        return keys | {"tokenizer.ggml.model": "none"}
    begins = prompt_prefix(tokenizer) if prefix is None else prefix
    bos = begins == (tokenizer.bos_id,)
    if begins and not bos:
        raise UserError(f"{where}: texts begin with ids {list(begins)}; GGUF can only say bos")
    if model.both_ways and tokenizer.mask_id is not None:
        keys["tokenizer.ggml.mask_token_id"] = tokenizer.mask_id
    keys["general.name"] = name_of_model(facts.name, tokenizer)
    return keys | metadata_of_tokenizer(tokenizer, model.vocab_size, bos, where)


def _ends(tokenizer: Any, end_ids: Sequence[int]) -> dict[str, int]:
    """Keys of the ids that end a text, beside the tokenizer's own, for which there are two."""
    if tokenizer is None:
        return {}
    others = [i for i in dict.fromkeys(end_ids) if i != tokenizer.eos_id]
    return {f"tokenizer.ggml.{n}_token_id": i for n, i in zip(("eot", "eom"), others, strict=False)}


def _write(
    path: Path,
    name: str,
    keys: dict[str, Any],
    entries: list[Entry],
    tensors: Mapping[str, Any],
    config: Mapping[str, Any],
    arch: Any,
) -> None:
    gguf = gguf_package()
    writer = gguf.GGUFWriter(path, name)
    types = {key: gguf.GGMLQuantizationType[key] for key in TYPES.values() if key not in MIXES}
    kinds = {entry.kind for entry in entries} - {"F32"}
    small = [kind for kind in (*BLOCKS, *TERNARY, "Q8_0") if kind in kinds]
    main = next(iter((*small, *kinds)), "F32")
    of_file = type_of_file(main, kinds)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if main == "F32" else of_file])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in keys.items():
        _add(writer, key, value)
    factors = rope_factors(config)
    if factors is not None:
        writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
    for entry in entries:
        kind = types[entry.kind]
        size = int(np.prod(gguf.quant_shape_to_byte_shape(entry.shape, kind)))
        writer.add_tensor_info(entry.name, entry.shape, np.dtype("f4"), size, raw_dtype=kind)
        if entry.kind in TERNARY:
            scale = entry.name.removesuffix(".weight") + SCALE
            writer.add_tensor_info(scale, (1,), np.dtype("f4"), 4)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            write_tensor(writer, factors)
        for entry in entries:
            write_tensor(writer, _laid_out(entry, tensors, config, arch))
            if entry.kind in TERNARY:
                write_tensor(writer, codes_of_values(tensors[entry.parts[0].name])[1])
    finally:
        writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, str: writer.add_string, float: writer.add_float32,
             int: writer.add_uint32, list: writer.add_array}  # fmt: skip
    kinds[type(value)](key, value)


def _laid_out(
    entry: Entry, tensors: Mapping[str, Any], config: Mapping[str, Any], arch: Any
) -> np.ndarray:
    gguf = gguf_package()
    parts = []
    for slot in entry.parts:
        array = cast_tensor(slot.name, tensors[slot.name], np.dtype(np.float32))
        if entry.kind == "F16":
            cast_tensor(slot.name, array, np.dtype(np.float16))  # refuses what is too large
        if entry.kind in TERNARY:
            array = codes_of_values(array)[0]
        if entry.kind in BLOCKS:
            array = BLOCKS[entry.kind].rows(*tensors.codes(slot.name))  # type: ignore[attr-defined]
        array = in_order(slot.name, array, config, arch, into=True)
        if shift := arch.shift_of(slot.name):
            array = array + np.float32(shift)
        if entry.kind in BLOCKS:
            parts.append(BLOCKS[entry.kind].packed(array, slot.shape[-1]))
            continue
        parts.append(gguf.quantize(array, gguf.GGMLQuantizationType[entry.kind]))
    return np.ascontiguousarray(np.stack(parts) if entry.stacked else parts[0])


TERNARY_STEPS = {"F16": 2.0**-11, "BF16": 2.0**-8}  # of the one scale


def _compare(path: Path, model: HfModel, entries: list[Entry], tensors: Mapping[str, Any]) -> str:
    """Hash (xxh3) of the values read back through the importer. Raises RuntimeError where they are
    not the source's, rounded."""
    _, again, written = open_written(path)
    _insist_on_fields(model, again)
    digest = xxhash.xxh3_128()
    for slot, kind in _slots_of(entries):
        wanted, read = np.asarray(tensors[slot.name]).astype(np.float32), written[slot.name]
        add_tensor(digest, slot.name, read)
        read = read.astype(np.float32)
        if slot.param.ternary:
            codes, scale = codes_of(read)
            same = np.allclose(wanted, codes * scale, rtol=TERNARY_STEPS.get(kind, 2e-6), atol=0)
        elif kind == "Q8_0":
            blocks = np.abs(wanted).reshape(-1, Q8_ROW).max(-1, keepdims=True)
            apart = np.abs(wanted - read).reshape(-1, Q8_ROW)
            same = bool((apart <= blocks * Q8_ERROR + 1e-7).all())
        elif kind in ("F32", *BLOCKS) and not slot.name.endswith(("norm.weight", ".A_log")):
            same = np.array_equal(wanted, read)
        else:
            steps = {"F32": 2.0**-23, "F16": 2.0**-11, "BF16": 2.0**-8}
            same = np.allclose(wanted, read, rtol=steps[kind], atol=1e-7)
        if not same:
            raise RuntimeError(f"{slot.name}: the file does not hold what was written")
    return digest.hexdigest()


OF_HEAD = ("head", "biases")  # whose other biases `metadata_of` refuses
UNSAID = (*OF_TRAINING, "capacity_factor")
MEANS = {
    "_pattern": attrgetter("kinds"), "attention_multiplier": attrgetter("score_scale"),
    "local_rope_theta": lambda m: (m.local_rope_theta or m.rope_theta,
                                   m.local_rope_theta is None and m.rope_scaling is not None),
}  # fmt: skip
"""What fields with these ends mean, where several values mean the same."""


def _insist_on_fields(model: HfModel, again: Any) -> None:
    """Raises UserError for a field of the model that the file cannot express."""
    ours, theirs = (dict(_flat(asdict(each))) for each in (model, again))
    for name in ours.keys() | theirs.keys():
        if is_headless(model) and name in OF_HEAD:
            continue
        if name == "kind" and {ours[name], theirs[name]} in ALIKE:
            continue
        if any(name.endswith(end) and by(model) == by(again) for end, by in MEANS.items()):
            continue
        if ours.get(name) != theirs.get(name) and not name.endswith(UNSAID):
            raise UserError(
                f"model.{name}: {ours.get(name)!r} cannot be expressed in a GGUF file of this "
                f"architecture; export to a Hugging Face folder instead"
            )


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, list(value) if isinstance(value, tuple) else value


def names_in_file(model: HfModel, tensors: Any) -> list[str]:
    """Hugging Face names of the tensors of an open file, in the order of its hash."""
    entries = _entries(model, str(tensors.file.meta["general.architecture"]), "F32")
    return [slot.name for slot, _ in _slots_of(entries)]


def _slots_of(entries: list[Entry]) -> Iterator[tuple[Slot, str]]:
    for entry in entries:
        for slot in entry.parts:
            yield slot, entry.kind


def _read_again(path: Path, source: HfModel, tensors: Mapping[str, Any]) -> tuple[Any, Tree]:
    """The model and weights of the file; an encoder has its head from the source."""
    _, model, written = open_written(path)
    given: Mapping[str, Any] = written
    if is_headless(source):
        in_file = {slot.name for slot in slots_in_file(source)}
        model = source
        given = {s.name: (written if s.name in in_file else tensors)[s.name] for s in slots(source)}
    check_tensors(slots(model), given, str(path))
    return model, from_hf(model, given, str(path))
