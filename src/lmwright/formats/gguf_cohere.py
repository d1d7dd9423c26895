"""Command R in GGUF. llama.cpp asks for norms of queries and keys from 64 layers on, as Command R+
has them, and knows none in smaller models, nor in those with windows.

attention.sliding_window_pattern    each layer whose number, from 1 on, is a multiple is global, or
                                    none for 0; 4 where it is silent. 1 stops llama.cpp
"""

from collections.abc import Mapping
from typing import Any

from lmwright.errors import UserError
from lmwright.formats.gguf_gemma4 import PATTERN
from lmwright.formats.gguf_reach import types_of_every
from lmwright.models.hf.cohere import SCALE

PLAIN, WINDOWS = "command-r", "cohere2"
NAMES = (PLAIN, WINDOWS)
KEYS = {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": SCALE}
FIXED = {"hidden_act": "silu", "tie_word_embeddings": True}
NORMED = 64  # layers from which on it asks for norms


def metadata(config: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """Keys below the architecture's name. Raises UserError for what llama.cpp does not compute."""
    num_layers = config["num_hidden_layers"]
    if name == PLAIN:
        if config["use_qk_norm"] != (num_layers >= NORMED):
            raise UserError(
                f"{where}: llama.cpp has norms of queries and keys (model.qk_norm) in a Command R "
                f"of {NORMED} layers or more, and in no smaller one; export to a Hugging Face "
                "folder instead"
            )
        return {}
    types = list(config["layer_types"])
    for every in (4, 0, *range(2, num_layers + 1)):
        if types == types_of_every(every, num_layers):
            return {PATTERN: every}
    raise UserError(
        f"{where}: llama.cpp's {name} has as many local layers before each global one, one at "
        "least (model.layer_pattern); export to a Hugging Face folder instead"
    )


def config_of(meta: Mapping[str, Any], config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Keys of config.json by llama.cpp's rules, of one that the metadata gave."""
    num_layers = config.get("num_hidden_layers", 0)
    if name == PLAIN:
        return {"use_qk_norm": num_layers >= NORMED}
    return {"layer_types": types_of_every(int(meta.get(f"{name}.{PATTERN}", 4)), num_layers)}
