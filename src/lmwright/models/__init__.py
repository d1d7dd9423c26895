"""The registry of model families: one line each."""

from lmwright.config.registry import Registry

KINDS = Registry(
    __name__,
    {
        "llama": "llama.Llama",
        "gemma": "gemma.Gemma",
        "olmo2": "olmo2.Olmo2",
        "phi3": "phi3.Phi3",
        "mixtral": "mixtral.Mixtral",
        "qwen3-moe": "qwen3_moe.Qwen3Moe",
        "olmoe": "olmoe.Olmoe",
        "dots1": "dots1.Dots1",
    },
)
