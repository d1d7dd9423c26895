"""The text of a checkpoint that also sees: taken whole, the rest counted, nothing unnoticed."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lmwright.config.run import Data, Run, Train
from lmwright.errors import UserError
from lmwright.formats.adapter_note import write_note
from lmwright.formats.adapter_verbs import merge_command, names_in_whole
from lmwright.formats.compressed import pack_integers, scheme
from lmwright.formats.convert import import_command
from lmwright.formats.hf_read import model_from_config
from lmwright.formats.load import load_model
from lmwright.formats.open import open_place
from lmwright.formats.peft import merge_into, read_adapter, to_peft
from lmwright.formats.peft_folder import read_folder, write_folder
from lmwright.formats.proof import logits
from lmwright.formats.tensor_hash import weights_hash
from lmwright.objectives.clm import Clm
from lmwright.optim import KINDS
from lmwright.program.lora import resolved
from lmwright.program.lora_section import LowRank
from lmwright.program.trainee import Frozen
from tests.saved_run import weights_at

TEXT = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 7,
    "max_position_embeddings": 192, "query_pre_attn_scalar": 20, "rms_norm_eps": 3e-4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
SIGHT = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
WHOLE = "Gemma3ForConditionalGeneration"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3Config(text_config=TEXT, vision_config=SIGHT, mm_tokens_per_image=4)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("gemma3") / "source"
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(written, tmp_path):
    """A copy that may be spoiled."""
    out = tmp_path / "source"
    out.mkdir()
    for path in written.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    return out


def set_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")


def test_the_text_is_taken_and_the_rest_is_counted(folder, tmp_path, capsys):
    stored = load_file(folder / "model.safetensors")
    sizes = {
        "vision tower": [a.size for n, a in stored.items() if n.startswith("vision_tower.")],
        "projector of the vision tower": [
            a.size for n, a in stored.items() if n.startswith("multi_modal_projector.")
        ],
    }
    proof = import_command(folder, tmp_path / "out")
    found = {each.part: (each.tensors, each.parameters) for each in proof.accounting.not_taken}
    assert found == {part: (len(n), sum(n)) for part, n in sizes.items()}
    assert proof.accounting.tensors + sum(map(len, sizes.values())) == len(stored)
    # read by transformers as the model that sees, and as the text alone
    for against in (proof.source_to_transformers, proof.folder_to_transformers):
        assert against.max_abs_diff < 1e-5 * max(against.max_abs_logit, 1.0)
    count = len(sizes["vision tower"])
    assert f"not taken: vision tower, {count} tensors" in capsys.readouterr().out
    assert "not taken: vision tower" in (tmp_path / "out" / "README.md").read_text()
    said = json.loads((tmp_path / "out" / "convert.json").read_text())["accounting"]["not_taken"]
    assert {each["part"]: each["tensors"] for each in said} == {p: len(n) for p, n in sizes.items()}
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["Gemma3ForCausalLM"] and "vision_config" not in written
    assert open_place(folder).model == load_model(tmp_path / "out").model


def test_names_as_within_transformers(folder):
    """model.language_model.layers..., a form that some tools write, is the same model."""
    before = load_model(folder).weights["embed"]

    def other(tensors):
        return {
            name.replace("language_model.model.", "model.language_model."): array
            for name, array in tensors.items()
        }

    set_tensors(folder, other)
    np.testing.assert_array_equal(load_model(folder).weights["embed"], before)


def test_packed_weights_of_the_text_are_read(folder):
    """As compressed-tensors leaves a model that sees: the text rounded, its sight as floats."""
    codes, scale = np.arange(-40, 40, dtype=np.int8)[:, None].repeat(48, 1), np.full((80, 1), 0.5)
    name = "language_model.model.layers.0.mlp.up_proj.weight"

    def packed(tensors):
        rows = np.array(tensors.pop(name).shape)
        parts = {"packed": pack_integers(codes, 8), "scale": scale.astype("f4"), "shape": rows}
        return tensors | {f"{name}_{end}": array for end, array in parts.items()}

    set_tensors(folder, packed)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = scheme("int8", 0, ["re:.*vision.*"])
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load_model(folder)
    read = loaded.tensors[name.removeprefix("language_model.")]
    np.testing.assert_array_equal(read, codes * np.float32(0.5))
    assert {each.part for each in loaded.tensors.not_taken} > {"vision tower"}


def test_an_adapter_over_the_whole_is_read_and_written(folder, tmp_path, recwarn):
    """PEFT names modules as in transformers' class of the whole, and ignores others."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # noqa: E731
    said = peft.LoraConfig(r=3, lora_alpha=5, target_modules=r".*language_model.*(q_proj|up_proj)")
    theirs = peft.get_peft_model(base(), said)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    model, ids = load_model(folder).model, np.arange(5, 30)[None]
    run = Run(
        name="x", dir="x", model=model, objective=Clm(), data=Data(dir="x"),
        optim=KINDS["adamw"](learning_rate=1e-3), train=Train(steps=1, global_batch_size=2),
        lora=LowRank(targets=("q_proj", "up_proj"), base="fp32", rank=3, alpha=5.0),
    )  # fmt: skip
    (adapter,) = resolved(run)
    weights = read_adapter(tmp_path / "theirs", model, adapter)
    (tmp_path / "ours").mkdir()
    ours = to_peft(model, adapter, weights, str(folder), names_in_whole(str(folder), model))
    write_folder(tmp_path / "ours", ours)
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "ours")
    assert not [w for w in recwarn if "adapter keys" in str(w.message)]
    with torch.no_grad():
        expected, plain, found = (
            each(input_ids=torch.tensor(ids)).logits.numpy() for each in (theirs, base(), again)
        )
    assert np.abs(expected - plain).max() > 0.01
    np.testing.assert_allclose(found, expected, atol=1e-5)
    _, merged = merge_into(model, load_model(folder).weights, read_folder(tmp_path / "ours"), "x")
    np.testing.assert_allclose(logits(model, merged, ids), expected, atol=1e-5)


def test_a_table_trained_whole_over_the_whole_is_merged_into_it(folder, tmp_path):
    """The note's hash is that of the base without the table, whose name has another beginning."""
    pytest.importorskip("peft")
    loaded = load_model(folder)
    run = Run(
        name="x", dir="x", model=loaded.model, objective=Clm(), data=Data(dir="x"),
        optim=KINDS["adamw"](learning_rate=1e-3), train=Train(steps=1, global_batch_size=2),
        lora=LowRank(targets=("q_proj",), base="fp32", rank=3, whole=("embed",)),
    )  # fmt: skip
    (adapter,) = resolved(run)
    whole = names_in_whole(str(folder), loaded.model)
    made = to_peft(loaded.model, adapter, weights_at(1, adapter.spec, 0.1), str(folder), whole)
    assert "model.language_model.embed_tokens.weight" in made.saved
    (tmp_path / "ours").mkdir()
    write_folder(tmp_path / "ours", made)
    base = {name: tree for name, tree in loaded.weights.items() if name != "embed"}
    frozen = Frozen(base, str(folder), weights_hash(base), lambda: base)
    write_note(tmp_path / "ours", frozen, "fp32")
    proof = merge_command(folder, tmp_path / "ours", tmp_path / "merged")
    assert proof.merged_to_peft.max_abs_diff < 1e-4, proof.peft


def test_what_a_released_config_leaves_out():
    """The 4B's text_config names neither its vocabulary nor its heads."""
    transformers = pytest.importorskip("transformers")
    inner = {
        "hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }  # fmt: skip
    model = model_from_config({"architectures": [WHOLE], "text_config": inner}, "config.json")
    theirs = transformers.Gemma3TextConfig(**inner)
    assert (model.vocab_size, model.num_heads, model.num_kv_heads, model.head_dim) == (
        theirs.vocab_size, theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim,
    )  # fmt: skip
    assert model.window == 1024 and model.rope_scaling.factor == 8.0 and model.head == "tied"
    assert list(model.kinds).count("global") == theirs.layer_types.count("full_attention")


NORM = "language_model.model.norm.weight"
BAD = {
    "missing": (lambda t: {n: a for n, a in t.items() if n != NORM}, r"lacks model\.norm\.weight"),
    "of no part": (lambda t: t | {"audio_tower.w": t[NORM]}, r"holds audio_tower\.w, which"),
    "left over": (lambda t: t | {NORM + "_scale": t[NORM]}, r"holds model\.norm\.weight_scale"),
    "twice": (lambda t: t | {"model.language_model.norm.weight": t[NORM]}, "the same tensor"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tensors_are_refused(case, folder, tmp_path):
    change, says = BAD[case]
    set_tensors(folder, change)
    with pytest.raises(UserError, match=says):
        import_command(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_config_without_text():
    with pytest.raises(UserError, match="without a text_config"):
        model_from_config({"architectures": [WHOLE]}, "config.json")


QWEN_TEXT = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 3e-4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "max_position_embeddings": 192, "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 5003.0, "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1], "mrope_interleaved": True,
    },
}  # fmt: skip
QWEN_SIGHT = {
    "depth": 1, "hidden_size": 24, "intermediate_size": 40, "num_heads": 4, "out_hidden_size": 48,
    "num_position_embeddings": 16, "patch_size": 4,
}  # fmt: skip


def test_the_text_of_a_qwen_is_taken_as_released(tmp_path, capsys):
    """With its vision tower, and the layer that predicts a further token, which transformers
    does not read."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3_5Config(
        text_config=QWEN_TEXT, vision_config=QWEN_SIGHT, tie_word_embeddings=True
    )  # both of which released files say
    torch.manual_seed(0)
    theirs = transformers.Qwen3_5ForConditionalGeneration(config)
    theirs.save_pretrained(tmp_path / "source")
    further = {"mtp.fc.weight": np.zeros((48, 96), "f4"), "mtp.norm.weight": np.zeros(48, "f4")}
    set_tensors(tmp_path / "source", lambda tensors: tensors | further)
    proof = import_command(tmp_path / "source", tmp_path / "out")
    for against in (proof.source_to_transformers, proof.folder_to_transformers):
        assert against.max_abs_diff < 1e-5 * max(against.max_abs_logit, 1.0)
    said = capsys.readouterr().out
    assert "not taken: vision tower" in said
    assert "not taken: layer that predicts a further token, 2 tensors" in said
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["Qwen3_5ForCausalLM"]
    assert written["tie_word_embeddings"] is True
    ids = torch.arange(20)[None] % 97
    with torch.no_grad():
        wanted = theirs(input_ids=ids).logits
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")(input_ids=ids)
    assert torch.allclose(found.logits, wanted, atol=1e-5)


GEMMA4_TEXT = {
    **{name: size for name, size in TEXT.items() if name != "query_pre_attn_scalar"},
    "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
    "global_head_dim": 20, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 97,
    "final_logit_softcapping": 2.3,
}  # fmt: skip
GEMMA4_SIGHT = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 12, "patch_size": 4, "position_embedding_size": 64,
}  # fmt: skip


def gemma4_whole(transformers, config, folder):
    """A model that sees, saved with sizes under the keys of released models."""
    cls = f"{type(config).__name__.removesuffix('Config')}ForConditionalGeneration"
    theirs = getattr(transformers, cls)(config).eval()
    theirs.save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    wide = said["text_config"].pop("per_layer_config")["1"]
    said["text_config"] |= {
        "global_head_dim": wide["head_dim"],
        "num_global_key_value_heads": wide.get("num_key_value_heads"),
    }
    (folder / "config.json").write_text(json.dumps(said))
    return theirs


def assert_text_is_taken(theirs, folder, out):
    """Ours, and transformers from the text alone, compute what the whole model does."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    proof = import_command(folder, out)
    for against in (proof.source_to_transformers, proof.folder_to_transformers):
        assert against.max_abs_diff < 1e-5 * max(against.max_abs_logit, 1.0)
    ids = torch.arange(20)[None] % 97
    (name,) = json.loads((out / "config.json").read_text())["architectures"]
    with torch.no_grad():
        wanted = theirs(input_ids=ids).logits
        found = getattr(transformers, name).from_pretrained(out)(input_ids=ids)
    assert torch.allclose(found.logits, wanted, atol=1e-5)


def test_the_text_of_a_gemma4_is_taken_as_released(tmp_path, capsys):
    """With its vision tower, and in layers that share keys and values those that nothing reads."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Gemma4Config(
        text_config=GEMMA4_TEXT, vision_config=GEMMA4_SIGHT, audio_config=None
    )
    theirs = gemma4_whole(transformers, config, tmp_path / "source")
    stem = "model.language_model.layers.{}.self_attn.{}.weight".format
    unused = {stem(4, name): np.zeros((2 * 16, 48), "f4") for name in ("k_proj", "v_proj")} | {
        stem(5, "k_norm"): np.zeros(20, "f4")
    }
    set_tensors(tmp_path / "source", lambda tensors: tensors | unused)
    assert_text_is_taken(theirs, tmp_path / "source", tmp_path / "out")
    said = capsys.readouterr().out
    assert "not taken: vision tower" in said
    assert "not taken: unused keys and values of shared layers, 3 tensors" in said


def test_the_text_of_a_gemma4_without_towers(tmp_path, capsys):
    """The 12B, whose config.json does not know of inputs of each layer."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    text = {
        name: value
        for name, value in GEMMA4_TEXT.items()
        if "per_layer_input" not in name
        and name not in ("num_kv_shared_layers", "use_double_wide_mlp")
    } | {"attention_k_eq_v": True, "num_global_key_value_heads": 3}
    sight = {"patch_size": 4, "mm_embed_dim": 24, "mm_posemb_size": 16, "output_proj_dims": 48}
    config = transformers.Gemma4UnifiedConfig(
        text_config=text, vision_config=sight, audio_config=None
    )
    theirs = gemma4_whole(transformers, config, tmp_path / "source")
    assert_text_is_taken(theirs, tmp_path / "source", tmp_path / "out")
    assert "not taken: " in capsys.readouterr().out


MISTRAL3 = {
    "mistral": {"sliding_window": None, "rope_theta": 5003.0},
    "ministral3": {"tie_word_embeddings": True, "rope_parameters": {
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 12,
        "rope_theta": 5003.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
}  # fmt: skip
MISTRAL3["mistral4"] = MISTRAL3["ministral3"] | {
    "num_key_value_heads": 6, "n_routed_experts": 5, "num_experts_per_tok": 2, "kv_lora_rank": 20,
    "moe_intermediate_size": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "tie_word_embeddings": False}  # fmt: skip


@pytest.mark.parametrize("model_type", MISTRAL3)
def test_the_text_of_a_mistral3_is_taken_as_released(model_type, tmp_path, capsys):
    """Of both kinds of text model that stand there."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    text = {k: v for k, v in TEXT.items() if k not in ("layer_types", "query_pre_attn_scalar")}
    text |= {"sliding_window": None, "model_type": model_type} | MISTRAL3[model_type]
    tied = text.get("tie_word_embeddings", False)
    config = transformers.Mistral3Config(
        text_config=text, vision_config=SIGHT | {"model_type": "pixtral"}, tie_word_embeddings=tied
    )
    theirs = transformers.Mistral3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path / "source")
    assert_text_is_taken(theirs, tmp_path / "source", tmp_path / "out")
    assert "not taken: projector of the vision tower" in capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    same = "llama" if model_type == "mistral" else model_type  # what it is without a window
    assert written["model_type"] == same and written["tie_word_embeddings"] == tied


def test_the_text_of_an_lfm2_vl_is_taken(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    text = {k: v for k, v in TEXT.items() if k not in ("layer_types", "query_pre_attn_scalar")}
    text |= {"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 3, "head_dim": 8}
    text |= {"num_hidden_layers": 6, "block_multiple_of": 20}
    sight = SIGHT | {"model_type": "siglip2_vision_model", "num_patches": 16}
    config = transformers.Lfm2VlConfig(
        text_config=text, vision_config=sight, projector_hidden_size=24, downsample_factor=2
    )
    theirs = transformers.Lfm2VlForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path / "source")
    assert_text_is_taken(theirs, tmp_path / "source", tmp_path / "out")
    assert "not taken: projector of the vision tower" in capsys.readouterr().out
