"""Hugging Face's names of each family, tensors and fields, both ways: one line each."""

from typing import Any

from lmwright.config.registry import Registry

TABLES = Registry(
    __name__,
    {
        "llama": "llama.LlamaHf",
        "gemma": "gemma.GemmaHf",
        "olmo2": "olmo2.Olmo2Hf",
        "phi3": "phi3.Phi3Hf",
        "mixtral": "moe.MixtralHf",
        "qwen3-moe": "moe.Qwen3MoeHf",
        "olmoe": "moe.OlmoeHf",
        "dots1": "moe.Dots1Hf",
    },
)


class TableOf:
    """`model.hf` and `Family.hf`: the table of the kind, imported when it is asked for, which no
    step does."""

    def __get__(self, model: Any, family: Any) -> Any:
        return TABLES[family.kind]()
