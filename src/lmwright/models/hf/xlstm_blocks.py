"""xLSTM[a:b] as a folder of lmwright's own: no class of transformers computes its layers."""

from typing import ClassVar

from lmwright.models.hf.pairs import HEAD, Words
from lmwright.models.hf.table import Table

LAYER = "model.layers.{i}."
SHARED = ("norm", "conv", "conv_bias", "gates", "forget_gate_bias", "memory_norm")
MLSTM = ("up", "output_gate", "input_gate_bias", "q", "k", "v", "skip", "o")
SLSTM = ("recurrent", "cell_bias", "output_gate_bias", "mlp_norm", "gate", "down")
GATED = Words("mlp", "hidden_act", {"geglu_erf": "gelu", "geglu": "gelu_pytorch_tanh",
                                    "swiglu": "silu", "reglu": "relu"}, "gelu", "gelu")  # fmt: skip


class XlstmBlocksHf(Table):
    """Both directions of a folder that lmwright alone reads, laid out as those of Hugging Face."""

    name = "xLSTM[a:b]"
    model_types: ClassVar = {"xLSTMBlocksForCausalLM": "xlstm_blocks"}
    weights: ClassVar = {
        "embed": "model.embed_tokens.weight",
        "norm": "model.norm.weight",
        "head": "lm_head.weight",
        **{f"layers.{name}": f"{LAYER}{name}.weight" for name in (*SHARED, *MLSTM, *SLSTM)},
    }
    keys: ClassVar = {
        "vocab_size": "vocab_size", "embed_dim": "hidden_size", "num_layers": "num_hidden_layers",
        "num_heads": "num_heads", "mlp_dim": "intermediate_size",
        "seq_len": "max_position_embeddings", "norm_eps": "layer_norm_eps",
        "conv_tokens": "conv_tokens", "chunk_tokens": "chunk_tokens",
        "block_pattern": "block_pattern",
    }  # fmt: skip
    pairs = (GATED, HEAD)
