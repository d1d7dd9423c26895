"""DeBERTa-v3 in Hugging Face: the released config.json, both forms of the head, and what v2 has and
v3 does not."""

import json
from dataclasses import replace

import numpy as np
import pytest

from lmwright.config.fields import to_plain
from lmwright.config.section import validate
from lmwright.core.param import walk
from lmwright.errors import UserError
from lmwright.formats.hf_layout import slots
from lmwright.formats.hf_read import import_hf, model_from_config, open_tensors, read_config
from lmwright.models.deberta import Deberta
from lmwright.presets import of_section
from tests.parity.families import DEBERTA
from tests.parity.row import SIZES

RELEASED = {  # of microsoft/deberta-v3-base, which names no architecture
    "architectures": ["DebertaV2ForMaskedLM"], "model_type": "deberta-v2",
    "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
    "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072,
    "max_position_embeddings": 512, "relative_attention": True, "position_buckets": 256,
    "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": "p2c|c2p",
    "layer_norm_eps": 1e-7, "max_relative_positions": -1, "position_biased_input": False,
    "num_attention_heads": 12, "num_hidden_layers": 12, "type_vocab_size": 0, "vocab_size": 128100,
}  # fmt: skip
BASE = of_section("model")["deberta-v3-base"]()


def test_the_released_config_is_the_preset():
    assert model_from_config(RELEASED, "config.json") == BASE
    longer = json.loads(json.dumps(replace(BASE, seq_len=1024).hf.config(BASE)))
    assert longer["max_relative_positions"] == 512 and longer["legacy"] is False


@pytest.mark.parametrize(
    "change, said",
    [
        ({"conv_kernel_size": 3}, "conv_kernel_size = 3, a convolution, is not computed, only 0"),
        ({"share_att_key": False}, "share_att_key = False, projections of its own for them"),
        ({"position_biased_input": True}, "positions added to the embedding"),
        ({"type_vocab_size": 2}, "type_vocab_size = 2, types of tokens"),
        ({"relative_attention": False}, "relative_attention = False, without distances"),
        ({"embedding_size": 128}, "embedding_size = 128 is not computed"),
        ({"attention_head_size": 32}, "attention_head_size = 32 is not computed"),
        ({"pos_att_type": ["c2p"]}, r"pos_att_type = \['c2p'\] is not computed"),
        ({"norm_rel_ebd": "none"}, "norm_rel_ebd = 'none' is not computed"),
        ({"position_buckets": -1}, "position_buckets = -1 is not computed"),
        ({"pooler_hidden_act": "tanh"}, "pooler_hidden_act = 'tanh' is not computed"),
        ({"hidden_act": "tanh"}, "hidden_act 'tanh' is not supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings False is not supported"),
        ({"max_relative_positions": 100}, "max_distance: 100 leaves no far distances"),
    ],
)
def test_what_is_not_computed_is_refused(change, said):
    with pytest.raises(UserError, match=said):
        model_from_config(RELEASED | change, "config.json")
    silent = {k: v for k, v in RELEASED.items() if k != "position_biased_input"}
    with pytest.raises(UserError, match="position_biased_input = True"):
        model_from_config(silent, "config.json")


@pytest.mark.parametrize("change", [{"head": "untied"}, {"head_dim": 32}])
def test_what_it_cannot_say_is_refused(change):
    model = replace(BASE, **change)
    with pytest.raises(UserError, match=f"model.{next(iter(change))}"):
        model.hf.config(model)


def test_a_head_of_its_own_is_refused_by_every_writer():
    """Which ask for the names of weights first."""
    with pytest.raises(UserError, match=r"model\.head: 'untied' does not exist in Hugging Face's"):
        slots(replace(BASE, head="untied"))


def test_heads_of_keys_are_those_of_queries():
    with pytest.raises(UserError, match=r"6 differs from model\.num_heads = 12"):
        replace(BASE, num_kv_heads=6)


def test_it_has_no_rotations():
    with pytest.raises(UserError, match=r"model\.rope_theta: 3.0 does not fit"):
        validate(Deberta, to_plain(BASE) | {"rope_theta": 3.0}, "model.")


@pytest.mark.parametrize("legacy", [True, False])
def test_both_forms_of_the_head_are_read(legacy, tmp_path):
    """And what a discriminator, or a generator, has beside it is not taken, but counted."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    said = {k: v for k, v in (SIZES | DEBERTA | {"legacy": legacy}).items() if v is not None}
    torch.manual_seed(0)
    theirs = transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**said)).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight += 0.1 * torch.randn_like(weight)
    tensors = {name: a.contiguous() for name, a in theirs.state_dict().items()}
    more = ("mask_predictions.dense.weight", "deberta.embeddings.position_embeddings.weight")
    theirs.save_pretrained(tmp_path, state_dict=tensors | {n: torch.ones(2, 3) for n in more})
    model, w, _ = import_hf(tmp_path)
    names = {
        "dense": "transform.dense.weight", "head_norm_bias": "transform.LayerNorm.bias",
        "decoder_bias": "bias",
    }  # fmt: skip
    for ours, name in names.items():
        plain = name.removeprefix("transform.")
        path = f"cls.predictions.{name}" if legacy else f"lm_predictions.lm_head.{plain}"
        wanted = tensors[path].numpy()
        np.testing.assert_array_equal(dict(walk(w))[ours], wanted.T if ours == "dense" else wanted)
    found = open_tensors(tmp_path, read_config(tmp_path)).not_taken
    assert {(each.part, each.tensors) for each in found if each.parameters == 6} == {
        ("head of the discriminator", 1), ("positions of the generator", 1)
    }  # fmt: skip
    assert model.hf.config(model)["legacy"] is False
