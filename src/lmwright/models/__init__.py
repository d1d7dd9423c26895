"""The registry of model families: one line each."""

from lmwright.config.registry import Registry

KINDS = Registry(
    __name__,
    {
        "llama": "llama.Llama",
        "gemma": "gemma.Gemma",
        "olmo2": "olmo2.Olmo2",
        "phi3": "phi3.Phi3",
        "mixtral": "moe.Mixtral",
        "qwen3-moe": "moe.Qwen3Moe",
        "olmoe": "moe.Olmoe",
        "dots1": "moe.Dots1",
    },
)
