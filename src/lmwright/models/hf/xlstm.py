"""xLSTM in Hugging Face, in the layout of xLSTM-7B."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.pairs import Derived, Fixed, Json, Words
from lmwright.models.hf.table import Fused, Table

BLOCK = "backbone.blocks.{i}."
ROUNDED = 64  # of the mlp's width, unless config.json says another
FIXED = {
    "add_out_norm": True, "use_bias": False, "eps": 1e-6, "norm_reduction_force_float32": True,
}  # fmt: skip
MODES = "{key} {said} is not supported; it is single or fused"
FUSED = "fused"
UNTIED = Words("head", "tie_word_embeddings", {"untied": False}, False, False)  # they tie nothing


def _width(factor: float, embed_dim: int, multiple: int) -> int:
    """The mlp's width, as transformers rounds it."""
    return int((embed_dim * factor + multiple - 1) // multiple * multiple)


def _read_mlp(config: Json, fields: Json, where: str) -> Json:
    multiple = config["ffn_round_up_to_multiple_of"]
    return {"mlp": "swiglu", "mlp_dim": _width(config["ffn_proj_factor"], fields["embed_dim"],
                                               multiple)}  # fmt: skip


def _write_mlp(model: Any, _: str, family: str) -> Json:
    if model.mlp != "swiglu":
        raise UserError(
            f"model.mlp: {model.mlp!r} does not exist in Hugging Face's {family}; change it"
        )
    d, wide = model.embed_dim, model.mlp_dim
    pairs = [(2.667, ROUNDED), (wide / d, 1), ((wide + 0.5) / d, 1)]
    factor, multiple = next(pair for pair in pairs if _width(pair[0], d, pair[1]) == wide)
    return {"ffn_proj_factor": factor, "ffn_round_up_to_multiple_of": multiple}


def _read_heads(config: Json, fields: Json, where: str) -> Json:
    sizes = {}
    for name, key in (("key_dim", "qk_dim_factor"), ("head_dim", "v_dim_factor")):
        whole, heads = int(config[key] * fields["embed_dim"]), fields["num_heads"]
        if whole % heads or whole < heads:
            raise UserError(
                f"{where}: {key} = {config[key]} gives {heads} heads {whole} dims together, which "
                "they do not divide; download config.json again"
            )
        sizes[name] = whole // heads
    return sizes


def _write_heads(model: Any, *_: str) -> Json:
    d, factors = model.embed_dim, {}
    for name, key in (("key_dim", "qk_dim_factor"), ("head_dim", "v_dim_factor")):
        whole = model.num_heads * getattr(model, name)
        factors[key] = whole / d if int(whole / d * d) == whole else (whole + 0.5) / d
    return factors


def _twins(ours: str, theirs: str, twin: str, usual: int) -> Derived:
    """A field that has two keys, one for the `xlstm` package."""

    def read(config: Json, _: Json, where: str) -> Json:
        said, same = (config.get(key) for key in (theirs, twin))
        if None not in (said, same) and said != same:
            raise UserError(
                f"{where}: {theirs} = {said} and {twin} = {same} are the same thing; make them "
                "equal"
            )
        return {ours: next((value for value in (said, same) if value is not None), usual)}

    return Derived(read, lambda model, *_: dict.fromkeys((theirs, twin), getattr(model, ours)))


class XlstmHf(Table):
    """Both directions of the family's Hugging Face form. Rows have no longest length over there;
    `max_position_embeddings` keeps ours, and is 8,192 as in xLSTM-7B where it is missing."""

    name = "xLSTM"
    model_types: ClassVar = {"xLSTMForCausalLM": "xlstm"}
    weights: ClassVar = {
        "embed": "backbone.embeddings.weight",
        "norm": "backbone.out_norm.weight",
        "head": "lm_head.weight",
        "layers.mlstm_norm": f"{BLOCK}norm_mlstm.weight",
        "layers.q": f"{BLOCK}mlstm_layer.q.weight",
        "layers.k": f"{BLOCK}mlstm_layer.k.weight",
        "layers.v": f"{BLOCK}mlstm_layer.v.weight",
        "layers.output_gate": f"{BLOCK}mlstm_layer.ogate_preact.weight",
        "layers.input_gate": f"{BLOCK}mlstm_layer.igate_preact.weight",
        "layers.input_gate_bias": f"{BLOCK}mlstm_layer.igate_preact.bias",
        "layers.forget_gate": f"{BLOCK}mlstm_layer.fgate_preact.weight",
        "layers.forget_gate_bias": f"{BLOCK}mlstm_layer.fgate_preact.bias",
        "layers.memory_norm": f"{BLOCK}mlstm_layer.multihead_norm.weight",
        "layers.o": f"{BLOCK}mlstm_layer.out_proj.weight",
        "layers.mlp_norm": f"{BLOCK}norm_ffn.weight",
        "layers.gate": f"{BLOCK}ffn.proj_up_gate.weight",
        "layers.up": f"{BLOCK}ffn.proj_up.weight",
        "layers.down": f"{BLOCK}ffn.proj_down.weight",
    }
    keys: ClassVar = {
        "vocab_size": "vocab_size", "num_heads": "num_heads", "norm_eps": "norm_eps",
        "seq_len": "max_position_embeddings", "gate_soft_cap": "gate_soft_cap",
        "chunk_tokens": "chunk_size",
    }  # fmt: skip
    optional: ClassVar = {"logits_soft_cap": "output_logit_soft_cap"}
    pairs = (
        UNTIED,
        _twins("embed_dim", "hidden_size", "embedding_dim", 4096),
        _twins("num_layers", "num_hidden_layers", "num_blocks", 32),
        Derived(_read_heads, _write_heads),
        Derived(_read_mlp, _write_mlp),
        *(Fixed(key, value) for key, value in FIXED.items()),
        Fixed("weight_mode", "single", MODES, same=(FUSED,)),
    )
    defaults: ClassVar = {
        "vocab_size": 50304, "num_heads": 8, "max_position_embeddings": 8192, "norm_eps": 1e-6,
        "gate_soft_cap": 15.0, "chunk_size": 64, "output_logit_soft_cap": 30.0,
        "qk_dim_factor": 0.5, "v_dim_factor": 1.0, "ffn_proj_factor": 2.667,
        "ffn_round_up_to_multiple_of": ROUNDED, "tie_word_embeddings": False,
    }  # fmt: skip

    def fused(self, config: Json, where: str) -> Fused:
        """Tensors of a folder with `weight_mode` fused."""
        if config.get("weight_mode") != FUSED:
            return {}
        fields = self.fields(config, where)
        heads, mlp = fields["num_heads"], fields["mlp_dim"]
        keys, values = heads * fields["key_dim"], heads * fields["head_dim"]
        qkvo = (("q", keys), ("k", keys), ("v", values), ("ogate_preact", values))
        gates = (("igate_preact", heads), ("fgate_preact", heads))
        wide = (("proj_up_gate", mlp), ("proj_up", mlp))
        fused = {"qkv_opreact.weight": qkvo, "ifgate_preact.weight": gates,
                 "ifgate_preact.bias": gates, "proj_up_gate_z.weight": wide}  # fmt: skip
        return {
            name: tuple((f"{own}.{name.rpartition('.')[2]}", rows) for own, rows in parts)
            for name, parts in fused.items()
        }
