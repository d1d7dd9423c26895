"""xLSTM equals transformers' class in loss, gradients and text (logits: `test_families.py`); unlike
that class, it knows padding and documents."""

import json
from copy import deepcopy
from functools import cache
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.errors import UserError
from lmwright.evals.generate import Sampling, generate
from lmwright.formats.hf_read import import_hf, model_from_config
from lmwright.formats.hf_stream import from_hf
from tests.parity.compare import PROMPTS, assert_near, assert_same_training, make_batch, randomize
from tests.parity.families import ROWS

torch = pytest.importorskip("torch", reason="torch is the reference")
transformers = pytest.importorskip("transformers")

TOKENS = np.random.default_rng(1).integers(3, 97, (2, 29))
NEW_TOKENS = 24
BIAS = {"igate_preact": -2.0, "fgate_preact": 3.0}


@cache
def problem():
    """(their model, ours, its weights). Gates are open, and mostly not so far that a denominator
    is near zero, which makes rounding of any class large."""
    torch.manual_seed(0)
    said = ROWS["xlstm"].said | {"num_hidden_layers": 2}
    theirs = transformers.xLSTMForCausalLM(transformers.xLSTMConfig(**said)).float().eval()
    randomize(theirs)
    with torch.no_grad():
        for path, parameter in theirs.named_parameters():
            if path.endswith("gate_preact.bias"):
                parameter.copy_(torch.randn_like(parameter) + BIAS[path.split(".")[-2]])
    saved = json.loads(theirs.config.to_json_string(use_diff=False))
    model = model_from_config(saved | {"architectures": ["xLSTMForCausalLM"]}, "config.json")
    tensors = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    return theirs, model, from_hf(model, tensors)


def test_loss_and_gradients(record_property):
    """Theirs in float64: in float32 its own rounding is most of what the tolerance allows."""
    theirs, model, w = problem()
    theirs = deepcopy(theirs).double()
    for module in theirs.modules():
        if hasattr(module, "force_float32_reductions"):
            module.force_float32_reductions = False
    assert_same_training(theirs, model, w, TOKENS, record_property, use_cache=False)


def test_text_of_a_left_padded_batch_is_that_of_each_prompt():
    """Theirs is given one prompt at a time, since it takes padding for tokens."""
    theirs, model, w = problem()
    no_text = SimpleNamespace(decode=lambda ids, **_: "", eos_id=None, bos_id=None)
    found = generate(model, w, no_text, PROMPTS, Sampling(NEW_TOKENS), prefix=())
    for prompt, ours in zip(PROMPTS, found, strict=True):
        out = theirs.generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False,
            eos_token_id=None, pad_token_id=0, use_cache=False,
        )  # fmt: skip
        assert list(ours.tokens) == out[0, len(prompt) :].tolist()


def test_packed_documents_and_padding_are_as_alone():
    theirs, model, w = problem()
    tokens = np.concatenate([[0] * 3, TOKENS[0, :11], [0] * 2, TOKENS[1, :17]])[None]
    ids = np.repeat([0, 1, 0, 2], [3, 11, 2, 17])[None].astype(np.int32)
    batch = Batch(*(np.asarray(a, np.int32) for a in (tokens, ids, 0 * ids)), ids > 0)
    run = jax.jit(lambda w: model.logits(w, model.hidden(w, batch, Compute())[0]))
    packed = np.asarray(run(w))[0]
    with torch.no_grad():
        for number, row in ((1, TOKENS[0, :11]), (2, TOKENS[1, :17])):
            alone = theirs(input_ids=torch.tensor(row[None])).logits[0].numpy()
            assert_near(packed[ids[0] == number], alone, f"document {number}")


def test_fused_weights_are_read(tmp_path, monkeypatch):
    """The layout in which projections of the same input are one matrix; transformers cannot
    initialize it."""
    monkeypatch.setattr(transformers.xLSTMPreTrainedModel, "_init_weights", lambda *_: None)
    said = ROWS["xlstm"].said | {"num_hidden_layers": 2, "weight_mode": "fused"}
    torch.manual_seed(1)
    theirs = transformers.xLSTMForCausalLM(transformers.xLSTMConfig(**said)).float().eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    model, w, _ = import_hf(tmp_path)
    run = jax.jit(lambda w: model.logits(w, model.hidden(w, make_batch(TOKENS), Compute())[0]))
    with torch.no_grad():
        assert_near(run(w), theirs(input_ids=torch.tensor(TOKENS)).logits.numpy(), "logits")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"ffn_proj_factor": 3.5}))
    with pytest.raises(UserError, match=r"proj_up_gate_z.weight has 768 rows, .* implies 896"):
        import_hf(tmp_path)


@pytest.mark.parametrize(
    "said, message",
    [
        ({"use_bias": True}, "use_bias = True is not supported; it is False"),
        ({"num_blocks": 7}, "num_hidden_layers = 5 and num_blocks = 7 are the same thing"),
        ({"weight_mode": "half"}, "weight_mode 'half' is not supported"),
        ({"num_heads": 7}, "qk_dim_factor = 0.5 gives 7 heads 64 dims together"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(said, message):
    config = ROWS["xlstm"].said | said | {"architectures": ["xLSTMForCausalLM"]}
    with pytest.raises(UserError, match=message):
        model_from_config(config, "config.json")
