"""Damaged and odd files of models, tokenizers and adapters: one sentence each, never a traceback,
never without end. A sample by default, many inputs with `-m slow`."""

import base64
import copy
import json
import random
import shutil
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from lmwright.config.run import Tokenizer
from lmwright.core.param import map_params
from lmwright.data.tokens.tokenizer import save_tokenizer, train_tokenizer
from lmwright.data.tokens.tokenizer_formats import import_tokenizer
from lmwright.errors import UserError
from lmwright.formats import reference
from lmwright.formats.adapter_verbs import combine_command
from lmwright.formats.hf_read import model_from_config
from lmwright.formats.load import load_model
from lmwright.formats.loaded import LoadedModel
from lmwright.formats.open import open_place
from lmwright.formats.peft import merge_into, module_slots
from lmwright.formats.peft_folder import PeftFolder, PeftModule, make_config, read_folder
from lmwright.formats.peft_folder import write_folder as write_peft
from lmwright.models.llama import Llama
from tests.in_memory import export_hf
from tests.time_limit import time_limit

MODEL = Llama(
    vocab_size=307, embed_dim=32, mlp_dim=40, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=16, seq_len=48, head="untied",
)  # fmt: skip
TEXT = ["Once upon a time there was a function that returned the number of bytes."] * 20
FEW, MANY, SECONDS = 14, 160, 30
DEEP = "[" * 200_000
ODD = (
    None, True, False, 0, -1, 3, 1 << 63, 10**40, 1e308, -0.5, float("nan"), "", "x", "\0", "x" * 300,  # noqa: E501
    "\ud800", "../x", "/etc/passwd", "\x1b[31m", [], [None], [[]], {}, {"a": 1}, ["x"] * 3, [1, 2],
)  # fmt: skip


# How a file is spoiled.


def places(value, at=()):
    """Paths to every value within a JSON value."""
    yield at
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in list(items)[:400]:
            yield from places(inner, (*at, key))


def odd_json(text, rng):
    body = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        *where, last = rng.choice([at for at in places(body) if at] or [("x",)])
        inner = body
        for key in where:
            inner = inner[key] if isinstance(inner, dict | list) else {}
        what = rng.random()
        if not isinstance(inner, dict | list):
            continue
        if what < 0.2 and isinstance(inner, dict):
            inner.pop(last, None)
        elif what < 0.3 and isinstance(inner, dict):
            inner[rng.choice(("added", "\ud800", "rope_scaling", "eos_token"))] = copy.deepcopy(
                rng.choice(ODD)
            )
        elif isinstance(inner, dict) or last < len(inner):
            inner[last] = copy.deepcopy(rng.choice(ODD))
    return json.dumps(body)


def spoil_bytes(raw, rng, first):
    """Flipped, cut, grown or zeroed, mostly within the `first` bytes."""
    raw, what = bytearray(raw), rng.random()
    at = rng.randrange(min(first, len(raw))) if raw else 0
    if what < 0.5:
        for _ in range(rng.choice((1, 1, 4))):
            raw[rng.randrange(min(first, len(raw)))] = rng.choice((0, 1, 127, 128, 255, 34, 92))
    elif what < 0.65:
        del raw[at:]
    elif what < 0.75:
        del raw[at : at + rng.choice((1, 4, 8))]
    elif what < 0.85:
        raw[at:at] = rng.randbytes(rng.choice((1, 8, 300)))
    else:
        raw[at : at + 8] = struct.pack("<Q", rng.choice((0, 1 << 31, 1 << 40, (1 << 63) - 1)))
    return bytes(raw)


def spoil(path, rng):
    """Spoils one file; returns what was done."""
    raw, what = path.read_bytes(), rng.random()
    if path.suffix == ".json" and what < 0.75:
        path.write_text(odd_json(raw.decode(), rng))
        return "odd values"
    if what < 0.8 and path.suffix not in (".safetensors", ".gguf"):
        whole = rng.choice(
            (b"", DEEP.encode(), b"\xff\xfe\x00", b"null", b"3", b"{}", b"[]", b'"x"')
        )
        path.write_bytes(whole)
        return f"is {whole[:9]!r}"
    if what > 0.97:
        path.unlink()
        return "gone"
    header = 8 + struct.unpack("<Q", raw[:8])[0] if path.suffix == ".safetensors" else 1 << 20
    header = min(header, 9000) if path.suffix == ".gguf" else header
    path.write_bytes(spoil_bytes(raw, rng, header))
    return "other bytes"


# What is read, and as users' commands read it.


def make_model(folder):
    rng = np.random.default_rng(0)
    w = map_params(lambda p: rng.standard_normal(p.shape).astype("f4") * 0.2, MODEL.spec())
    save_tokenizer(train_tokenizer(TEXT, Tokenizer(vocab_size=300)), folder / "tokenizer")
    export_hf(MODEL, w, folder / "tokenizer", folder / "model", max_shard_bytes=60_000)
    shutil.rmtree(folder / "tokenizer")
    return folder / "model"


def make_gguf(folder):
    pytest.importorskip("gguf")
    from lmwright.formats.convert import export_command

    model = make_model(folder)
    (folder / "gguf").mkdir()
    export_command(model, folder / "gguf" / "m.gguf", dtype="q8_0")
    shutil.rmtree(model)
    return folder / "gguf"


def make_peft(folder):
    rng = np.random.default_rng(0)
    modules = {}
    for name, slot in module_slots(MODEL).items():
        if "_proj" in name:
            a, b = (
                rng.standard_normal(s).astype("f4")
                for s in ((3, slot.shape[1]), (slot.shape[0], 3))
            )
            modules[name] = PeftModule(a, b, 2.0)
    (folder / "peft").mkdir()
    config = make_config(modules, "base", dict.fromkeys(modules, 6.0))
    config |= {
        "rank_pattern": {"q_proj": 3, "layers.*.up_proj": 3},
        "alpha_pattern": {"down_proj": 6},
    }
    config |= {"layers_to_transform": None, "use_rslora": False}
    write_peft(folder / "peft", PeftFolder(config, modules))
    return folder / "peft"


def make_tokenizers(folder):
    """tokenizer.json and sides; GPT-2's files; ranks of tiktoken; a sentencepiece model."""
    root = folder / "tokenizers"
    made = train_tokenizer(TEXT, Tokenizer(vocab_size=300))
    save_tokenizer(made, root / "json")
    (root / "json" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (root / "gpt2").mkdir()
    model = made.spec["model"]
    (root / "gpt2" / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(m) if isinstance(m, list) else m for m in model["merges"])
    (root / "gpt2" / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (root / "gpt2" / "tokenizer_config.json").write_text('{"eos_token": "e", "chat_template": "x"}')
    (root / "ranks").mkdir()
    lines = [f"{base64.b64encode(bytes([b])).decode()} {b}" for b in range(256)]
    (root / "ranks" / "a.tiktoken").write_text("\n".join([*lines, "YWI= 256"]) + "\n")
    side = {"pattern": r"\w+|\W", "special_tokens": {"<|end|>": 257}, "eos_token": "<|end|>"}
    (root / "ranks" / "a.tiktoken.json").write_text(json.dumps(side))
    return root


def read_model(folder):
    path = next(folder.glob("*.gguf"), folder)
    assert open_place(path).model
    loaded = load_model(path)
    assert isinstance(loaded, LoadedModel)
    loaded.load()
    if loaded.tokenizer_dir:
        tokenizer = loaded.tokenizer
        tokenizer.decode(tokenizer.encode("There was a caf\u00e9\n")), loaded.prompt_prefix


def read_peft(folder):
    found = read_folder(folder)
    rng = np.random.default_rng(0)
    w = map_params(lambda p: rng.standard_normal(p.shape).astype("f4") * 0.2, MODEL.spec())
    merge_into(MODEL, w, found, str(folder))
    combine_command(folder.parent / "combined", [str(folder)])


def read_tokenizers(folder):
    for each in sorted(folder.iterdir()):
        tokenizer = import_tokenizer(each)
        tokenizer.encode_batch(TEXT[:1]), tokenizer.vocab_size, tokenizer.fingerprint
        assert all(
            r is None or isinstance(r, str) for r in (tokenizer.eos, tokenizer.chat_template)
        )


FORMATS = {
    "model": (make_model, read_model),
    "gguf": (make_gguf, read_model),
    "peft": (make_peft, read_peft),
    "tokenizers": (make_tokenizers, read_tokenizers),
}
SKIPPED = ("README.md", "convert.json", "m.gguf.convert.json")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    kept = {}

    def of(name):
        if name not in kept:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(reference.importlib.util, "find_spec", lambda name: None)
                kept[name] = FORMATS[name][0](tmp_path_factory.mktemp("made"))
        return kept[name]

    return of


def outcome(read, folder):
    """`accepted`, or the sentence; anything else is raised."""
    try:
        with time_limit(SECONDS):
            read(folder)
        return "accepted"
    except UserError as error:
        said = str(error)
        assert "\n" not in said and 20 < len(said) < 1500, said
        said.encode()
        return said


def tries(name, count, made, tmp_path):
    read, source, found = FORMATS[name][1], made(name), {"accepted": 0, "refused": 0}
    assert outcome(read, source) == "accepted"
    shutil.rmtree(source.parent / "combined", ignore_errors=True)
    files = sorted(p.relative_to(source) for p in source.rglob("*") if p.is_file())
    files = [p for p in files if p.name not in SKIPPED]
    failed = []
    for seed in range(count):
        rng = random.Random(f"{name} {seed}")
        spoiled = tmp_path / str(seed)
        shutil.copytree(source, spoiled)
        path = files[seed % len(files)]
        what = spoil(spoiled / path, rng)
        try:
            said = outcome(read, spoiled)
        except BaseException as error:  # PanicException of the tokenizers library is none of ours
            if isinstance(error, KeyboardInterrupt):
                raise
            failed.append(f"seed {seed}: {path} {what}: {type(error).__name__}: {error!s:.200}")
        else:
            found["accepted" if said == "accepted" else "refused"] += 1
        shutil.rmtree(spoiled, ignore_errors=True)
        shutil.rmtree(tmp_path / "combined", ignore_errors=True)
    assert not failed, "\n".join(failed)
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_a_few_spoiled_files(name, made, tmp_path):
    assert tries(name, FEW, made, tmp_path)["refused"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_many_spoiled_files(name, made, tmp_path, record_property):
    found = tries(name, MANY * (2 if name == "model" else 1), made, tmp_path)
    record_property("outcomes", found)
    print(name, found)
    assert found["refused"] > MANY / 4


CONFIGS = ["Phi3", "Gemma2", "Gemma3", "Olmo2", "Mixtral", "Qwen3Moe", "Qwen2", "Mistral"]


@pytest.mark.parametrize(
    "count", [2, pytest.param(40, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_odd_configurations(count):
    """config.json of other families, each with odd values."""
    transformers = pytest.importorskip("transformers")
    for family in CONFIGS:
        kind = getattr(transformers, f"{family}TextConfig", None)
        body = (kind or getattr(transformers, f"{family}Config"))().to_dict()
        body["architectures"] = [f"{family}ForCausalLM"]
        text = json.dumps(body)
        for seed in range(count):
            spoiled = json.loads(odd_json(text, random.Random(f"{family} {seed}")))
            said = outcome(lambda config: model_from_config(config, "config.json"), spoiled)
            assert said, (family, seed)


def test_tensors_of_odd_types(made, tmp_path):
    """Integers, complex numbers and scalars where weights should be."""
    for number, dtype in enumerate(("i4", "?", "u1")):
        folder = tmp_path / str(number)
        shutil.copytree(made("peft"), folder)
        save_file(
            {
                "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.ones(
                    (3, 32), dtype
                )
            },
            folder / "adapter_model.safetensors",
        )
        assert "save it again" in outcome(read_peft, folder)
