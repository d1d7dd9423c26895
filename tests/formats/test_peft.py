"""Adapters in PEFT and here: the same logits, the same gradients, both ways; combined as there."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.config.run import Data, Run, Train
from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import at, map_params, nest, walk
from lmwright.errors import UserError
from lmwright.formats.combine import Combination, combine
from lmwright.formats.hf_layout import slots
from lmwright.formats.hf_stream import from_hf
from lmwright.formats.peft import merge_into, read_adapter, to_peft
from lmwright.formats.peft_folder import read_folder, write_folder
from lmwright.formats.proof import logits
from lmwright.models.apertus import Apertus
from lmwright.models.bamba import Bamba
from lmwright.models.cohere import Cohere
from lmwright.models.cwm import Cwm
from lmwright.models.deepseek import DeepSeekV3
from lmwright.models.eurobert import EuroBert
from lmwright.models.experts import Experts
from lmwright.models.falcon_h1 import FalconH1
from lmwright.models.gemma import Gemma
from lmwright.models.gpt_bigcode import GptBigcode
from lmwright.models.granite4 import Granite4, Granite4Moe
from lmwright.models.granite_swa import GraniteSwa
from lmwright.models.helium import Helium
from lmwright.models.lfm2 import Lfm2
from lmwright.models.lfm3 import Lfm3
from lmwright.models.llama import Llama
from lmwright.models.mamba2 import Mamba2
from lmwright.models.modernbert import ModernBertDecoder
from lmwright.models.nanochat import NanoChat
from lmwright.models.nemotron import Jais2, Nemotron
from lmwright.models.olmo import Olmo
from lmwright.models.olmo_hybrid import OlmoHybrid
from lmwright.models.opt import Opt
from lmwright.models.phi import Phi
from lmwright.models.stablelm import StableLm
from lmwright.models.starcoder2 import Starcoder2
from lmwright.objectives.clm import Clm
from lmwright.objectives.mlm import Mlm
from lmwright.optim import KINDS
from lmwright.program.lora import bind, module_spec, resolved, scaled
from lmwright.program.lora_section import LowRank
from tests.in_memory import export_hf

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

MODEL = Llama(
    vocab_size=97, embed_dim=24, mlp_dim=40, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=10, seq_len=16, head="untied", rope_theta=5000.0,
)  # fmt: skip
SMALL = {
    "vocab_size": 61, "embed_dim": 24, "mlp_dim": 32, "num_layers": 2, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 6, "seq_len": 16,
}  # fmt: skip
EXPERTS = Experts(
    num_experts=4, experts_per_token=2, mlp_dim=12, score="sigmoid", shared_dim=12, bias_rate=0.001
)
SOFTMAX = Experts(num_experts=4, experts_per_token=2, mlp_dim=12)
TOKENS = np.random.default_rng(0).integers(0, 97, (2, 11))
CASES = {
    "plain": (dict(r=5, lora_alpha=7), dict(rank=5, alpha=7.0)),
    "rslora": (
        dict(r=4, lora_alpha=6, use_rslora=True),
        dict(rank=4, alpha=6.0, scaling="sqrt-rank"),
    ),
    "dora": (dict(r=3, lora_alpha=8, use_dora=True), dict(rank=3, alpha=8.0, variant="dora")),
    "patterns": (
        dict(r=5, lora_alpha=9, rank_pattern={"q_proj": 3, "mlp.up_proj": 6},
             alpha_pattern={"q_proj": 4}),
        dict(rank=5, alpha=9.0, ranks={"q_proj": 3, "up_proj": 6}, alphas={"q": 4.0}),
    ),
}  # fmt: skip
NAMES = ("q_proj", "o_proj", "up_proj", "down_proj")


def torch_base():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **{k: v for k, v in MODEL.hf.config(MODEL).items() if k != "architectures"}
    )
    return LlamaForCausalLM(config).eval()


def torch_adapter(said, names=NAMES):
    """A PEFT model whose factors are all random."""
    config = peft.LoraConfig(target_modules=list(names), task_type="CAUSAL_LM", **said)
    model = peft.get_peft_model(torch_base(), config)
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = p.data + torch.randn_like(p) * 0.2
    return model


def run_of(said, names=NAMES):
    return Run(
        name="x", dir="x", model=MODEL, objective=Clm(), data=Data(dir="x"),
        optim=KINDS["adamw"](learning_rate=1e-3),
        lora=LowRank(targets=names, base="fp32", **said),
        train=Train(steps=1, global_batch_size=2, precision="fp32"),
    )  # fmt: skip


def base_of(model):
    state = {k: v.numpy() for k, v in torch_base().state_dict().items()}
    return from_hf(model, state)


def batch(vocab_size=MODEL.vocab_size):
    shape = TOKENS.shape
    return Batch(
        tokens=jnp.asarray(TOKENS % vocab_size, jnp.int32),
        segment_ids=jnp.ones(shape, jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape),
        loss_weight=jnp.ones(shape, jnp.float32),
    )


def bound_logits(adapter, weights, base, model=MODEL):
    params = {m.path: m.param for m in adapter.modules}
    w = bind(params, base, scaled(adapter, weights))
    return model.logits(w, model.hidden(w, batch(model.vocab_size), Compute())[0])


def close(got, expected, tolerance=1e-5):
    got, expected = np.asarray(got), np.asarray(expected)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_of_peft_computes_the_same_here(case, tmp_path):
    theirs, ours = CASES[case]
    model = torch_adapter(theirs)
    model.save_pretrained(tmp_path)
    (adapter,) = resolved(run_of(ours))
    weights, base = read_adapter(tmp_path, MODEL, adapter), base_of(MODEL)
    ids = torch.tensor(TOKENS)
    with torch.no_grad():
        expected = model(input_ids=ids).logits.numpy()
    close(bound_logits(adapter, weights, base), expected)
    assert not np.allclose(expected, torch_base()(input_ids=ids).logits.detach(), atol=1e-2)

    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    named = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}

    def ours_loss(weights):
        params = {m.path: m.param for m in adapter.modules}
        w = bind(params, base, scaled(adapter, weights))
        found = Clm().loss(MODEL, w, batch(), jax.random.key(0), Compute())
        return found.total / found.weight

    value, grads = jax.value_and_grad(ours_loss)(weights)
    assert float(value) == pytest.approx(float(loss), rel=1e-5)
    compared = 0
    for slot in slots(MODEL):
        if slot.path not in adapter.by_path:
            continue
        stem = f"base_model.model.{slot.name.removesuffix('.weight')}."
        rank = adapter.by_path[slot.path].rank
        a = np.asarray(at(grads, f"{slot.path}.a")[slot.at]).reshape(-1, rank).T
        b = np.asarray(at(grads, f"{slot.path}.b")[slot.at]).reshape(rank, -1).T
        # scale is ours to fold into b, and theirs to apply after it: the gradients agree
        close(a, named[f"{stem}lora_A.default.weight"], 1e-4)
        close(b, named[f"{stem}lora_B.default.weight"], 1e-4)
        if case == "dora":
            m = np.asarray(at(grads, f"{slot.path}.magnitude")[slot.at]).reshape(-1)
            close(m, named[f"{stem}lora_magnitude_vector.default.weight"].reshape(-1), 1e-4)
        compared += 1
    assert compared == len(NAMES) * MODEL.num_layers


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_from_here_loads_in_peft_and_merges(case, tmp_path):
    theirs, ours = CASES[case]
    torch_adapter(theirs).save_pretrained(tmp_path / "theirs")
    (adapter,) = resolved(run_of(ours))
    weights = read_adapter(tmp_path / "theirs", MODEL, adapter)
    (tmp_path / "ours").mkdir()
    write_folder(tmp_path / "ours", to_peft(MODEL, adapter, weights, "some/base"))
    loaded = peft.PeftModel.from_pretrained(torch_base(), tmp_path / "ours")
    with torch.no_grad():
        expected = loaded(input_ids=torch.tensor(TOKENS)).logits.numpy()
    close(bound_logits(adapter, weights, base_of(MODEL)), expected)
    _, merged = merge_into(MODEL, base_of(MODEL), read_folder(tmp_path / "ours"), "ours")
    close(MODEL.logits(merged, MODEL.hidden(merged, batch(), Compute())[0]), expected, 2e-5)
    again = read_adapter(tmp_path / "ours", MODEL, adapter)
    for (path, one), (_, other) in zip(walk(again), walk(weights), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, err_msg=path)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_training_goes_on_from_factors_that_began_as_the_base(start, tmp_path):
    """As plain LoRA of twice the rank: the same logits as in PEFT, on the whole base."""
    torch_adapter(dict(r=3, lora_alpha=5, init_lora_weights=start)).save_pretrained(tmp_path)
    model = peft.PeftModel.from_pretrained(torch_base(), tmp_path)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor(TOKENS)).logits.numpy()
    (adapter,) = resolved(run_of(dict(rank=6, alpha=4.0)))
    base = base_of(MODEL)
    weights = read_adapter(tmp_path, MODEL, adapter, lambda: base)
    close(bound_logits(adapter, weights, base), expected)
    with pytest.raises(UserError, match=r"only be read together with its base"):
        read_adapter(tmp_path, MODEL, adapter)


def test_what_does_not_fit_is_refused(tmp_path):
    torch_adapter(dict(r=5, lora_alpha=7)).save_pretrained(tmp_path)

    def read(**said):
        (adapter,) = resolved(run_of(dict(rank=5, alpha=7.0) | said.pop("lora", {}), **said))
        return read_adapter(tmp_path, MODEL, adapter)

    with pytest.raises(UserError, match=r"has rank 5; set lora\.rank"):
        read(lora={"rank": 4})
    with pytest.raises(UserError, match=r"which lora\.targets leaves out"):
        read(names=("q_proj",))
    with pytest.raises(UserError, match=r"has no factors for layers\.k"):
        read(names=(*NAMES, "k_proj"))
    with pytest.raises(UserError, match=r'set lora\.variant = "lora"'):
        read(lora={"variant": "dora"})
    saved = dict(r=5, lora_alpha=7, modules_to_save=["embed_tokens"])
    torch_adapter(saved).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"embed_tokens.*name it in lora\.whole"):
        read()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="damaged"):
        read()


@pytest.mark.parametrize(
    "method, density, ranks",
    [
        ("linear", 1.0, (4, 4)), ("cat", 1.0, (4, 3)), ("svd", 1.0, (4, 3)),
        ("ties", 0.6, (4, 4)), ("ties-svd", 0.6, (4, 3)),
        ("dare-linear", 1.0, (4, 4)), ("dare-ties", 1.0, (4, 4)), ("dare-ties-svd", 1.0, (4, 3)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sign", ["total", "frequency"])
def test_combined_as_peft_does(method, density, ranks, sign, tmp_path):
    if sign == "frequency" and "ties" not in method:
        pytest.skip("votes are of ties")
    base = torch_base()
    model = None
    for i, rank in enumerate(ranks):
        config = peft.LoraConfig(target_modules=list(NAMES), r=rank, lora_alpha=5 + i,
                                 task_type="CAUSAL_LM")  # fmt: skip
        name = f"a{i}"
        if model is None:
            model = peft.get_peft_model(base, config, adapter_name=name)
        else:
            model.add_adapter(name, config)
        torch.manual_seed(i)
        for key, p in model.named_parameters():
            if f".{name}." in key:
                p.data = torch.randn_like(p) * 0.3
    model.save_pretrained(tmp_path)
    weights = [0.7, -0.4]
    said = {} if density == 1.0 and "dare" not in method else {"density": density}
    votes = {"majority_sign_method": sign} if "ties" in method else {}
    model.add_weighted_adapter(
        ["a0", "a1"], weights, "mixed", method.replace("-", "_"), **said, **votes
    )
    combination = Combination(method, density=density, sign=sign)
    ours = combine([read_folder(tmp_path / f"a{i}") for i in (0, 1)], weights, combination)
    for name, module in ours.modules.items():
        layer = model.base_model.model.get_submodule(name)
        close(module.delta, layer.get_delta_weight("mixed").detach().numpy(), 2e-5)
    assert len(ours.modules) == len(NAMES) * MODEL.num_layers


R = "residual_multiplier"
MAMBA = SMALL | {
    "mixer_pattern": ("mamba", "full"), "mamba_num_heads": 4, "mamba_head_dim": SMALL["embed_dim"],
    "mamba_state_dim": 6, "mamba_num_groups": 2, R: 0.6,
}  # fmt: skip
FAMILIES = {
    # PEFT's class of causal models asks for a method that encoders do not have
    "an encoder that fills in masks": (EuroBert(**SMALL), Mlm(mask_token_id=3), "all"),
    "attention from latents": (
        DeepSeekV3(**SMALL | {"num_kv_heads": 4}, qk_rope_head_dim=2, v_head_dim=8, kv_lora_rank=10,
                   q_lora_rank=14, experts=EXPERTS, dense_layers=(0,)),
        Clm(),
        "attention",
    ),
    "convolutions": (Lfm2(**SMALL, mixer_pattern=("conv", "full")), Clm(), "attention"),
    "convolutions alone": (Lfm2(**SMALL, mixer_pattern=("conv", "full")), Clm(), "conv_out"),
    "state spaces": (Granite4(**MAMBA), Clm(), "all"),
    "state spaces beside experts": (Granite4Moe(**MAMBA, experts=SOFTMAX), Clm(), "all"),
    "state spaces beside attention": (
        FalconH1(**{k: v for k, v in MAMBA.items() if k not in ("mixer_pattern", R)},
                 ssm_multipliers=(0.7, 0.6, 0.8, 1.1, 0.4), key_multiplier=0.6),
        Clm(),
        "all",
    ),
    "state spaces in blocks of a llama": (Bamba(**{k: v for k, v in MAMBA.items() if k != R},
                                                rotary_fraction=0.67), Clm(),
                                          "all"),
    "state spaces alone": (
        Mamba2(vocab_size=61, embed_dim=24, num_layers=2, seq_len=16, mamba_num_heads=4,
               mamba_head_dim=12, mamba_state_dim=6), Clm(), "all"),
    "numbers in place of matrices": (Apertus(**SMALL), Clm(), "all"),
    "a head with a layer": (ModernBertDecoder(**SMALL | {"num_kv_heads": 4}), Clm(), "all"),
    "memories of other widths": (
        OlmoHybrid(**SMALL, mixer_pattern=("linear", "full"), linear_num_key_heads=2,
                   linear_key_dim=5, linear_num_value_heads=4, linear_value_dim=7),
        Clm(),
        "all",
    ),
    "norms of rotated heads": (NanoChat(**SMALL), Clm(), "all"),
    "one norm of two branches": (Cohere(**SMALL, qk_norm="head"), Clm(), "all"),
    "layers with and without rotations": (Cohere(**SMALL, window=5), Clm(), "all"),
    "other names of an mlp": (Starcoder2(**SMALL, window=5), Clm(), "all"),
    "norms of single heads": (StableLm(**SMALL, qk_norm="head", residual="parallel",
                                       rotary_fraction=0.67), Clm(), "all"),
    "a head with a bias": (Phi(**SMALL, rotary_fraction=0.67), Clm(), "all"),
    "norms without weights": (Olmo(**SMALL, qkv_limit=1.0), Clm(), "all"),
    "windows behind a global layer": (Cwm(**SMALL, window=5, bias="mlp"), Clm(), "all"),
    "neighbors that rotate": (Helium(**SMALL, bias="qkv"), Clm(), "all"),
    "layer norms from zero": (Nemotron(**SMALL, rotary_fraction=0.67), Clm(), "all"),
    "one key for all heads": (GptBigcode(**SMALL | {"num_kv_heads": 1}), Clm(), "all"),
    "learned positions": (Opt(**SMALL | {"num_kv_heads": SMALL["num_heads"]}), Clm(), "all"),
    "layer norms and biases": (Jais2(**SMALL), Clm(), "all"),
    "norms in front alone": (Gemma(**SMALL, window=5, out_norms="none"), Clm(), "all"),
    "sinks of heads": (GraniteSwa(**SMALL, window=5), Clm(), "all"),
    "gates of heads": (Lfm3(**SMALL, mixer_pattern=("conv", "local")), Clm(), "head_gate"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAMILIES)
def test_an_adapter_of_a_family_opens_in_peft(case, tmp_path):
    model, objective, targets = FAMILIES[case]
    rng = np.random.default_rng(0)
    draw = lambda p: (0.2 * rng.standard_normal(p.shape) + (p.fill or 0)).astype("f4")  # noqa: E731
    w = map_params(draw, model.spec())
    export_hf(model, w, None, tmp_path / "base")
    run = run_of(dict(rank=3, alpha=5.0), (targets,))
    (adapter,) = resolved(replace(run, model=model, objective=objective))
    weights = nest((m.path, map_params(draw, module_spec(m, "lora"))) for m in adapter.modules)
    (tmp_path / "adapter").mkdir()
    write_folder(tmp_path / "adapter", to_peft(model, adapter, weights, "base"))
    kind = "MaskedLM" if model.both_ways else "CausalLM"
    auto = getattr(transformers, f"AutoModelFor{kind}")
    base = auto.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(TOKENS % 61)).logits.numpy()
    close(bound_logits(adapter, weights, w, model), expected)
    _, merged = merge_into(model, w, read_folder(tmp_path / "adapter"), "adapter")
    close(logits(model, merged, np.int32(TOKENS % 61)), expected)


def test_combined_adapters_keep_their_task_and_targets(tmp_path):
    """By the task PEFT chooses its class: that of causal models wraps no encoder."""
    torch_adapter(dict(r=4)).save_pretrained(tmp_path)
    one = read_folder(tmp_path)
    said = {"task_type": "FEATURE_EXTRACTION", "target_modules": ["layers.0.q_proj", "o_proj"]}
    both = [
        replace(one, config=one.config | said | more) for more in ({}, {"target_modules": ["x"]})
    ]
    config = combine(both, [0.5, 0.5], Combination("cat")).config
    assert config["task_type"] == "FEATURE_EXTRACTION"
    assert config["target_modules"] == ["layers.0.q_proj", "o_proj", "x"]
    assert combine([one], [1.0], Combination("cat")).config["task_type"] == "CAUSAL_LM"


def test_dare_keeps_the_mean_and_needs_one_rank(tmp_path):
    torch_adapter(dict(r=4, lora_alpha=7)).save_pretrained(tmp_path / "a")
    torch_adapter(dict(r=3, lora_alpha=7)).save_pretrained(tmp_path / "b")
    a, b = read_folder(tmp_path / "a"), read_folder(tmp_path / "b")
    name = next(iter(a.modules))
    combination = partial(Combination, "dare-linear-svd", 0.5, rank=24)
    seeds = [combine([a], [1.0], combination(seed=i)) for i in range(300)]
    mean = np.mean([one.modules[name].delta for one in seeds], axis=0)
    delta = a.modules[name].delta
    assert np.abs(mean - delta).max() < 6 * np.abs(delta).max() / 300**0.5
    for method, cure in (("ties", "use ties-svd"), ("linear", "use cat or svd")):
        with pytest.raises(UserError, match=f"needs adapters of one rank; {cure}$"):
            combine([a, b], [1.0, 1.0], Combination(method))
    with pytest.raises(UserError, match=r"weights: 1\.0, nan must be finite numbers"):
        combine([a, b], [1.0, float("nan")], Combination())
    for setting in ({"density": 0.5}, {"rank": 3}, {"sign": "frequency"}, {"seed": 7}):
        with pytest.raises(UserError, match=f"{next(iter(setting))}: has no effect on 'cat'"):
            combine([a, b], [1.0, 1.0], Combination("cat", **setting))
