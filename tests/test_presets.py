"""Model presets: their size is that of the published model, by an independent count."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from podsmith import presets
from podsmith.core.param import count_params

MODELS = {
    name: preset
    for name, preset in presets.of_section("model").items()
    if preset.__module__ == "podsmith.presets.models"
}

# Counts in the safetensors metadata of the published models, and ours of kisoku.
PUBLISHED = {
    "llama-135m": 134_515_008,
    "llama-360m": 361_821_120,
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "kisoku-3b": 3_325_627_392,
    "llama-7b": 6_738_415_616,
    "llama-8b": 8_030_261_248,
    "llama-13b": 13_015_864_320,
    "llama-34b": 33_743_970_304,
    "llama-70b": 70_553_706_496,
}


@pytest.mark.parametrize("name", MODELS)
def test_size_equals_that_of_transformers(name):
    model = MODELS[name]()
    with torch.device("meta"):  # shapes without memory
        reference = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=model.vocab_size,
                hidden_size=model.embed_dim,
                intermediate_size=model.mlp_dim,
                num_hidden_layers=model.num_layers,
                num_attention_heads=model.num_heads,
                num_key_value_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                tie_word_embeddings=model.head == "tied",
            )
        )
        reference.tie_weights()
    count = sum(p.numel() for p in {id(p): p for p in reference.parameters()}.values())
    assert count_params(model.spec()) == count == PUBLISHED.get(name, count)


@pytest.mark.parametrize("name", MODELS)
def test_the_name_and_the_docstring_tell_the_size(name):
    count = count_params(MODELS[name]().spec())
    said = name.rsplit("-", 1)[-1]
    size = float(said[:-1]) * {"k": 1e3, "m": 1e6, "b": 1e9}[said[-1]]
    assert 0.9 < count / size < 1.25
    number, unit = MODELS[name].__doc__.split(":")[0].split()
    assert abs(count / {"M": 1e6, "B": 1e9}[unit] - float(number)) <= 0.051


def test_kisoku_untied():
    from dataclasses import replace

    untied = replace(MODELS["kisoku-3b"](), head="untied")
    assert count_params(untied.spec()) == 3_480_161_280
