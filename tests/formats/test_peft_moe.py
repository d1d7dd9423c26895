"""Adapters on models with experts in PEFT, family by family: PEFT computes from our folder what
they are here, on whichever modules, and what PEFT made of the tensors of experts is merged."""

from dataclasses import replace

import numpy as np
import pytest

from lmwright.config.run import Data, Run, Train
from lmwright.core.param import map_params, nest, walk
from lmwright.formats.adapter_verbs import combine_command, merge_command, names_in_whole
from lmwright.formats.hf_read import import_hf
from lmwright.formats.peft import read_adapter, to_peft
from lmwright.formats.peft_folder import make_config, read_folder, write_folder
from lmwright.formats.peft_names import lost_in_peft
from lmwright.formats.proof import logits
from lmwright.objectives.clm import Clm
from lmwright.optim import KINDS
from lmwright.program.lora import bind, module_spec, resolved, scaled
from lmwright.program.lora_section import LowRank

torch = pytest.importorskip("torch", reason="torch is the reference")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
}  # fmt: skip
LOCAL = {n: v for n, v in COMMON.items() if n != "num_experts"} | {"num_local_experts": 4}
ROUTED = {n: v for n, v in COMMON.items() if n != "num_experts"} | {
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
LATENT = {"kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8,
          "q_lora_rank": None, "num_key_value_heads": 4}  # fmt: skip
LINEAR = {
    "head_dim": 8, "shared_expert_intermediate_size": 10,
    "layer_types": ["full_attention", "linear_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
FAMILIES = {
    "MixtralForCausalLM": LOCAL,
    "PhimoeForCausalLM": LOCAL | {"head_dim": 8, "attention_bias": True, "lm_head_bias": True},
    "HunYuanMoEV1ForCausalLM": COMMON | {"moe_topk": 2, "head_dim": 8},
    "Qwen3MoeForCausalLM": COMMON | {"head_dim": 8, "mlp_only_layers": [0]},
    "Qwen2MoeForCausalLM": COMMON | {
        "shared_expert_intermediate_size": 10, "mlp_only_layers": [0]},
    "MellumForCausalLM": COMMON | {"head_dim": 8, "mlp_layer_types": ["dense", "sparse"]},
    "Ernie4_5_MoeForCausalLM": {
        n: v for n, v in COMMON.items() if n not in ("num_experts", "num_experts_per_tok")}
    | {"moe_num_experts": 4, "moe_k": 2, "head_dim": 8, "moe_num_shared_experts": 1},
    "OlmoeForCausalLM": COMMON,
    "DeepseekV2ForCausalLM": ROUTED | LATENT,
    "DeepseekV3ForCausalLM": ROUTED | LATENT,
    "Mistral4ForCausalLM": ROUTED | LATENT | {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.3,
        "original_max_position_embeddings": 7, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "Glm4MoeForCausalLM": ROUTED | {"head_dim": 8},
    "ExaoneMoeForCausalLM": COMMON | {
        "num_shared_experts": 1, "sliding_window": 9, "head_dim": 8,
        "layer_types": ["full_attention", "sliding_attention"]},
    "SolarOpenForCausalLM": ROUTED | {"head_dim": 8},
    "AfmoeForCausalLM": COMMON | {
        "num_shared_experts": 1, "sliding_window": 9, "head_dim": 8, "num_dense_layers": 1,
        "layer_types": ["full_attention", "sliding_attention"]},
    "Llama4ForCausalLM": LOCAL | {
        "intermediate_size": 12, "intermediate_size_mlp": 20, "interleave_moe_layer_step": 2,
        "attention_chunk_size": 9, "no_rope_layers": [1, 0], "head_dim": 8},
    "MiniMaxM2ForCausalLM": LOCAL | {"head_dim": 8},
    "Qwen3NextForCausalLM": COMMON | LINEAR,
    "Qwen3_5MoeForCausalLM": COMMON | LINEAR,
    "Lfm2MoeForCausalLM": COMMON | {"layer_types": ["conv", "full_attention"],
                                    "num_dense_layers": 1},
    "GraniteMoeHybridForCausalLM": LOCAL | {
        "layer_types": ["attention", "attention"], "shared_intermediate_size": 16,
        "mamba_n_heads": 4},
    "GraniteMoeForCausalLM": LOCAL,
    "GraniteMoeSharedForCausalLM": LOCAL | {"shared_intermediate_size": 16},
    "GraniteMoeSWAForCausalLM": LOCAL | {
        "shared_intermediate_size": 16, "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention"]},
    "NemotronHForCausalLM": ROUTED | {
        "head_dim": 8, "moe_shared_expert_intermediate_size": 10, "num_hidden_layers": None,
        "moe_latent_size": 16,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 6,
        "time_step_min": 1e-9},
    "GptOssForCausalLM": LOCAL | {"head_dim": 8},
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(3, 61, (2, 23), dtype=np.int32)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folder of a random model of transformers by architecture, made once."""
    folder = tmp_path_factory.mktemp("bases")

    def of(architecture):
        if not (made := folder / architecture).is_dir():
            cls = getattr(transformers, architecture)
            torch.manual_seed(0)
            config = cls.config_class(**FAMILIES[architecture], initializer_range=0.2)
            cls(config).save_pretrained(made)
        return made

    return of


def theirs(base, adapter=None):
    """Logits of PEFT, of the base alone without an adapter; each factor must be there."""
    auto = "ImageTextToText" if "Mistral4" in str(base) else "CausalLM"
    model = getattr(transformers, f"AutoModelFor{auto}").from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager"
    )
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()


def adapter_of(base, **lora):
    """(model, weights, adapter, its random factors)."""
    model, w, _ = import_hf(base)
    run = Run(
        name="x", dir="x", model=model, objective=Clm(), data=Data(dir="x"),
        optim=KINDS["adamw"](learning_rate=1e-3), train=Train(steps=1, global_batch_size=2),
        lora=LowRank(base="fp32", **lora),
    )  # fmt: skip
    (adapter,), dice = resolved(run), np.random.default_rng(1)
    draw = lambda p: (0.3 * dice.standard_normal(p.shape)).astype("f4")  # noqa: E731
    weights = nest((m.path, map_params(draw, module_spec(m, "lora"))) for m in adapter.modules)
    return model, w, adapter, weights


def written(folder, adapter):
    folder.mkdir()
    write_folder(folder, adapter)
    return folder


def assert_close(found, wanted):
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())


def assert_same_in_peft(base, folder, **lora):
    model, w, adapter, weights = adapter_of(base, **lora)
    made = to_peft(model, adapter, weights, str(base))
    assert not lost_in_peft(made, model)
    written(folder, made)
    params = {module.path: module.param for module in adapter.modules}
    found = logits(model, bind(params, w, scaled(adapter, weights)), TOKENS)
    wanted = theirs(base, folder)
    assert np.abs(wanted - theirs(base)).max() > 1e-3 * np.abs(wanted).max()
    assert_close(found, wanted)
    if made.stacked:  # which is read in twice the rank
        return
    again = read_adapter(folder, model, adapter)  # no stand-in became a factor
    again = logits(model, bind(params, w, scaled(adapter, again)), TOKENS)
    assert_close(again, found)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_peft_finds_all_factors(architecture, bases, tmp_path):
    targets = ("all", "router") if architecture != "Llama4ForCausalLM" else ("all",)
    assert_same_in_peft(bases(architecture), tmp_path / "all", targets=targets, rank=3, alpha=5.0)


@pytest.mark.parametrize(
    "architecture", ["MixtralForCausalLM", "DeepseekV3ForCausalLM", "Qwen3_5MoeForCausalLM",
                     "Lfm2MoeForCausalLM"]
)  # fmt: skip
@pytest.mark.parametrize(
    "lora",
    [
        {"targets": ("expert_gate", "expert_up"), "rank": 2},
        {"targets": ("expert_up", "q"), "rank": 2, "scaling": "sqrt-rank"},
        {"targets": ("experts", "o"), "rank": 4, "ranks": {"expert_up": 2, "o": 3},
         "alphas": {"expert_gate": 9.0}, "dropout": 0.1},
    ],
    ids=["gate and up", "up", "other ranks"],
)  # fmt: skip
def test_peft_finds_factors_of_parts(architecture, lora, bases, tmp_path):
    if architecture.startswith("Lfm2"):
        lora = lora | {"targets": tuple("conv_out" if t == "o" else t for t in lora["targets"])}
        lora = lora | ({"ranks": {"expert_up": 2}} if "ranks" in lora else {})
    assert_same_in_peft(bases(architecture), tmp_path / "made", **lora)


@pytest.mark.parametrize(
    "lora",
    [
        {"targets": ("mlp",)},
        {"targets": ("shared_up",)},
        {"targets": ("experts",), "dropout": 0.1},
        {"targets": ("router", "o"), "dropout": 0.1},
        {"targets": ("router", "o"), "ranks": {"router": 4}, "alphas": {"router": 9.0}},
    ],
    ids=["dense and shared", "one part", "dropout", "routers and dropout", "other routers"],
)  # fmt: skip
def test_peft_finds_factors_beside_experts_and_routers(lora, bases, tmp_path):
    assert_same_in_peft(bases("DeepseekV3ForCausalLM"), tmp_path / "made", rank=2, **lora)


def test_peft_finds_factors_of_mixtrals_routers(bases, tmp_path):
    """Which have another name in its files than in transformers' class."""
    lora = {"targets": ("router", "experts"), "rank": 2, "ranks": {"router": 4}}
    assert_same_in_peft(bases("MixtralForCausalLM"), tmp_path / "made", **lora)


def test_routers_with_a_module_in_the_class_are_merged(bases, tmp_path):
    """Granite 4's, a product below the router in its files, and the router itself for PEFT."""
    base = bases("GraniteMoeHybridForCausalLM")
    model, _, adapter, weights = adapter_of(base, targets=("router", "expert_gate"), rank=2)
    written(tmp_path / "made", to_peft(model, adapter, weights, str(base)))
    proof = merge_command(base, tmp_path / "made", tmp_path / "merged", dtype="fp32")
    assert proof.merged_to_peft.max_abs_diff < 1e-3
    assert_close(theirs(tmp_path / "merged"), theirs(base, tmp_path / "made"))


def test_what_peft_refuses_is_left_out_and_told(bases, tmp_path):
    """It takes no factors of Mamba's last products in this family."""
    base = bases("NemotronHForCausalLM")
    named = lambda words: {m.path for m in adapter_of(base, targets=words, rank=2)[2].modules}  # noqa: E731
    assert not [path for path in named(("all",)) if path.endswith("mamba_out")]
    assert [path for path in named(("attention",)) if path.endswith("mamba_in")]
    model, _, adapter, weights = adapter_of(base, targets=("mamba_out", "q"), rank=2)
    made = to_peft(model, adapter, weights, str(base))
    assert lost_in_peft(made, model) == ["model.layers.0.mixer.out_proj"]
    with pytest.raises(ValueError, match="'out_proj' is incompatible"):
        theirs(base, written(tmp_path / "made", made))


def test_experts_that_read_weighed_inputs_are_left_out_and_told(bases):
    """PEFT takes the inputs of Llama 4's experts for outputs, and its router gives two arrays."""
    base = bases("Llama4ForCausalLM")
    model, _, adapter, _ = adapter_of(base, targets=("all",), rank=2)
    assert {m.path.rpartition(".")[2] for m in adapter.modules} == {
        *("q", "k", "v", "o", "gate", "up", "down"),
        *("shared_gate", "shared_up", "shared_down"),
    }
    model, _, adapter, weights = adapter_of(base, targets=("router", "expert_up", "q"), rank=2)
    lost = lost_in_peft(to_peft(model, adapter, weights, str(base)), model)
    assert len(lost) == 1 + 4 and not [name for name in lost if name.endswith("q_proj")]


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "OlmoeForCausalLM"])
def test_dora_of_routers_is_told(architecture, bases):
    base = bases(architecture)
    model, _, adapter, _ = adapter_of(base, targets=("router", "o"), rank=2, variant="dora")
    lost = lost_in_peft(to_peft(model, adapter, with_norms(adapter), str(base)), model)
    assert lost == [f"model.layers.{i}.{router_of(model)}" for i in range(2)]


def router_of(model):
    return model.hf.weights["layers.router"].partition("{i}.")[2].removesuffix(".weight")


def test_experts_of_a_model_that_holds_more_than_text(tmp_path):
    """PEFT asks for the tensors of all experts there, and is compared with at a merge."""
    text = FAMILIES["Qwen3_5MoeForCausalLM"] | {"initializer_range": 0.2}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
              "out_hidden_size": 24, "patch_size": 4, "num_position_embeddings": 16}  # fmt: skip
    config = transformers.Qwen3_5MoeConfig(
        text_config=text, vision_config=vision, image_token_id=5, video_token_id=6,
        vision_start_token_id=7, vision_end_token_id=8,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3_5MoeForConditionalGeneration(config).save_pretrained(tmp_path / "base")
    base = tmp_path / "base"
    model, w, adapter, weights = adapter_of(base, targets=("all", "router"), rank=2)
    whole = names_in_whole(str(base), model)
    made = to_peft(model, adapter, weights, str(base), whole)
    assert not lost_in_peft(made, model)
    written(tmp_path / "adapter", made)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
    params = {module.path: module.param for module in adapter.modules}
    assert_close(logits(model, bind(params, w, scaled(adapter, weights)), TOKENS), wanted)
    proof = merge_command(base, tmp_path / "adapter", tmp_path / "merged", dtype="fp32")
    assert proof.merged_to_peft.max_abs_diff < 1e-3


@pytest.mark.parametrize("words", [["gate_proj", "up_proj", "down_proj", "q_proj"], ["gate"]])
def test_what_peft_saves_of_target_modules_is_merged(words, bases, tmp_path):
    """It names the parameters without their modules then."""
    base = bases("MixtralForCausalLM" if words == ["gate"] else "Qwen3MoeForCausalLM")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(r=3, lora_alpha=7, task_type="CAUSAL_LM", target_modules=words)
    model = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    proof = merge_command(base, tmp_path / "adapter", tmp_path / "merged", dtype="fp32")
    assert proof.merged_to_peft.max_abs_diff < 1e-3
    assert_close(theirs(tmp_path / "merged"), theirs(base, tmp_path / "adapter"))


@pytest.mark.parametrize(
    "architecture", ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Qwen3_5MoeForCausalLM",
                     "Lfm2MoeForCausalLM"]
)  # fmt: skip
def test_what_peft_would_lose_by_target_modules_is_told(architecture, bases, tmp_path):
    """Earlier versions wrote such folders."""
    base = bases(architecture)
    model, _, adapter, weights = adapter_of(base, targets=("all",), rank=3, alpha=5.0)
    made = to_peft(model, adapter, weights, str(base))
    old = replace(made, config=make_config(made.modules, str(base), dict.fromkeys(made.modules, 5)))
    written(tmp_path / "old", old)
    loaded = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "old"
    )
    begins, ends = "base_model.model.", ".lora_A.default.weight"
    names = {n.removeprefix(begins).removesuffix(ends) for n, _ in loaded.named_parameters()
             if n.endswith(ends)}  # fmt: skip
    kept = {name for name in made.modules if name in names}
    if any(name.endswith(".experts") for name in names):
        kept |= {name for name in made.modules if ".experts." in name}
    assert set(lost_in_peft(old, model)) == made.modules.keys() - kept != set()
    proof = merge_command(base, tmp_path / "old", tmp_path / "merged")
    assert proof.merged_to_peft is None and "leaves factors out" in proof.peft
    dora = adapter_of(base, targets=("all",), rank=3, variant="dora")
    assert lost_in_peft(to_peft(*dora[:1], dora[2], with_norms(dora[2]), str(base)), model)


def with_norms(adapter):
    ones = lambda p: np.ones(p.shape, "f4")  # noqa: E731
    return nest((m.path, map_params(ones, module_spec(m, "dora"))) for m in adapter.modules)


MADE = ["MixtralForCausalLM", "Qwen3MoeForCausalLM", "Qwen3_5MoeForCausalLM", "Lfm2MoeForCausalLM",
        "NemotronHForCausalLM"]  # fmt: skip


@pytest.mark.parametrize("architecture", MADE)
def test_what_peft_made_of_experts_is_merged(architecture, bases, tmp_path):
    base = bases(architecture)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ends = ("experts.gate_up_proj", "experts.up_proj", "experts.down_proj")
    names = [name for name, _ in model.named_parameters() if name.endswith(ends)]
    config = peft.LoraConfig(r=3, lora_alpha=7, task_type="CAUSAL_LM", target_modules=["q_proj"],
                             target_parameters=names, rank_pattern={names[-1]: 2})  # fmt: skip
    model = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    wanted = theirs(base, tmp_path / "adapter")
    assert np.abs(wanted - theirs(base)).max() > 0.05 * np.abs(wanted).max()
    proof = merge_command(base, tmp_path / "adapter", tmp_path / "merged", dtype="fp32")
    assert proof.merged_to_peft.max_abs_diff < 1e-3
    assert_close(theirs(tmp_path / "merged"), wanted)


def test_combined_adapters_keep_their_parameters(bases, tmp_path):
    base = bases("DeepseekV3ForCausalLM")
    model, w, adapter, weights = adapter_of(base, targets=("all",), rank=2, alpha=3.0)
    written(tmp_path / "one", to_peft(model, adapter, weights, str(base)))
    combine_command(tmp_path / "both", [tmp_path / "one", tmp_path / "one"], weights=[0.75, 0.5],
                    method="cat")  # fmt: skip
    assert not lost_in_peft(read_folder(tmp_path / "both"), model)
    one = {name: module.delta for name, module in read_folder(tmp_path / "one").modules.items()}
    both = read_folder(tmp_path / "both").modules
    assert both.keys() == one.keys()
    for name, module in both.items():
        np.testing.assert_allclose(module.delta, 1.25 * one[name], atol=1e-5)
    params = {module.path: module.param for module in adapter.modules}
    grown = nest((m.path, {"a": weights_at(weights, m.path, "a"),
                           "b": 1.25 * weights_at(weights, m.path, "b")})
                 for m in adapter.modules)  # fmt: skip
    found = logits(model, bind(params, w, scaled(adapter, grown)), TOKENS)
    assert_close(found, theirs(base, tmp_path / "both"))


def weights_at(weights, path, factor):
    return dict(walk(weights))[f"{path}.{factor}"]
