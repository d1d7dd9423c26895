"""Llama 4 beside transformers where `test_moe_parity` cannot compare: queries that grow, which
transformers counts from a row's first token on, padding or not; the text of a model that sees
images, whose experts are stacked."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.errors import UserError
from lmwright.evals.generate import Sampling, generate
from lmwright.formats.hf_read import import_hf, model_from_config
from lmwright.models.experts import Experts
from lmwright.models.moe import Mixtral
from tests.formats.test_text_part import assert_text_is_taken
from tests.parity.compare import assert_near, make_batch, randomize
from tests.parity.moes import ROWS, SIZES

torch = pytest.importorskip("torch", reason="torch is the reference")
transformers = pytest.importorskip("transformers")

GROWING = {"attn_temperature_tuning": True, "attn_scale": 0.7, "floor_scale": 5}
SAID = SIZES | ROWS["llama4"][1] | GROWING
TOKENS = np.random.default_rng(1).integers(3, 97, (2, 53))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Their model, and ours of its folder."""
    torch.manual_seed(0)
    cls = transformers.Llama4ForCausalLM
    theirs = cls._from_config(cls.config_class(**SAID), attn_implementation="eager").eval()
    randomize(theirs)
    folder = tmp_path_factory.mktemp("llama4")
    theirs.save_pretrained(folder)
    return theirs, *import_hf(folder)[:2]


def test_queries_grow_as_theirs(models):
    theirs, model, w = models
    assert (model.query_growth, model.growth_tokens, model.chunk_tokens) == (0.7, 5, 9)
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor(TOKENS)).logits.numpy()

    def logits(w):
        states = model.hidden(w, make_batch(TOKENS), Compute())[0]
        return model.logits(w, states)

    assert_near(np.asarray(jax.jit(logits)(w)), wanted, "logits")


def test_text_is_theirs(models):
    theirs, model, w = models
    out = theirs.generate(
        input_ids=torch.tensor(TOKENS[:1, :23]), max_new_tokens=40, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    no_text = SimpleNamespace(decode=lambda ids, **_: "", eos_id=None, bos_id=None)
    found = generate(model, w, no_text, [TOKENS[0, :23].tolist()], Sampling(40), prefix=())
    assert list(found[0].tokens) == out[0, 23:].tolist()


def test_the_text_of_a_model_that_sees_is_taken(tmp_path, capsys):
    """As released, beside a vision tower."""
    torch.manual_seed(0)
    sight = dict(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128,
        vision_output_dim=24, image_size=16, patch_size=4, projector_input_dim=24,
        projector_output_dim=24,
    )  # fmt: skip
    config = transformers.Llama4Config(text_config=SAID, vision_config=sight)
    theirs = transformers.Llama4ForConditionalGeneration(config).eval()
    randomize(theirs.language_model)
    theirs.save_pretrained(tmp_path / "source")
    assert_text_is_taken(theirs, tmp_path / "source", tmp_path / "out")
    assert "not taken: projector of the vision tower" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 5}, "layer_types has chunks in other layers"),
        ({"attention_chunk_size": None}, "attention_chunk_size is null, but layers attend in ch"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers is not a 0 or 1 for each of 5 layers"),
        ({"moe_layers": None, "interleave_moe_layer_step": 0}, "is not a whole number above 0"),
        ({"floor_scale": 0}, "floor_scale = 0 is not a whole number above 0"),
    ],
)
def test_what_is_not_computed_is_refused(changes, message):
    config = SAID | {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"}
    with pytest.raises(UserError, match=message):
        model_from_config(config | changes, "config.json")


def test_weights_of_inputs_are_no_others_of_another_family():
    sizes = dict(vocab_size=97, embed_dim=8, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=4)
    experts = Experts(num_experts=2, experts_per_token=1, mlp_dim=4, weighed="inputs")
    model = Mixtral(**sizes, seq_len=16, experts=experts)
    with pytest.raises(UserError, match=r"experts\.weighed: MixtralForCausalLM has 'outputs'"):
        model.hf.config(model)
