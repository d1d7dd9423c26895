"""`lora.whole`: a table, a head and a norm trained whole beside an adapter, from the base's on."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from lmwright.config.check import check_run
from lmwright.config.run import Data, Run, Train
from lmwright.core.param import walk
from lmwright.errors import UserError
from lmwright.formats.adapter_verbs import export_adapter_command, merge_command
from lmwright.formats.convert import export_command
from lmwright.formats.load import load_model
from lmwright.formats.weights import trained
from lmwright.models.deberta import Deberta
from lmwright.objectives.distill import Distill
from lmwright.objectives.mlm import Mlm
from lmwright.objectives.preference import Dpo
from lmwright.optim import KINDS
from lmwright.program.lora_section import Adapter, LowRank
from lmwright.program.plan import resolve
from lmwright.program.qat_section import Qat
from lmwright.program.targets import whole_names
from lmwright.train.session import train
from tests.in_memory import export_hf
from tests.resume.small_runs import losses
from tests.saved_run import weights_at

LORA = LowRank(base="fp32", rank=3, targets=("attention",))


@pytest.fixture(scope="module")
def runs(small_run, tmp_path_factory):
    """A function from a kind of head and words to a run that begins from a folder."""
    root = tmp_path_factory.mktemp("whole")

    def make(head, whole, folder):
        model = replace(small_run.model, num_layers=1, head=head)
        base = root / f"base-{head}"
        if not base.exists():
            tokenizer = Path(small_run.data.dir) / "tokenizer"
            export_hf(model, weights_at(0, model.spec(), 0.3), tokenizer, base)
        data = replace(small_run.data, sources=())  # prepared; the tokenizer is the base's
        start = replace(small_run.train, steps=4, init_from=str(base), num_microbatches=1)
        return replace(
            small_run, dir=str(root / folder), model=model, data=data, train=start,
            lora=replace(LORA, whole=whole), checkpoint=replace(small_run.checkpoint, keep_last=4),
        )  # fmt: skip

    return make


@pytest.fixture(scope="module")
def untied(runs):
    run = runs("untied", ("embed", "lm_head", "norm"), "untied")
    assert train(run, jax.devices()[:1]).step == 4
    return run


def weights_of(run):
    return trained(resolve(run, jax.devices()[:1]), Path(run.dir))[1]["default"]


def test_they_begin_as_the_bases_and_move(untied):
    base, weights = load_model(untied.train.init_from).weights, weights_of(untied)
    for name in ("embed", "head", "norm"):
        moved = np.abs(np.asarray(weights[name]) - np.asarray(base[name])).max()
        assert 1e-3 < moved < 0.1, name  # four steps of 3e-3 from there, not from a fresh start
    after = dict(walk(load_model(untied.dir).weights))
    for path, leaf in walk(base):
        if path not in ("embed", "head", "norm") and path.rpartition(".")[2] not in "qkvo":
            np.testing.assert_array_equal(np.asarray(after[path]), np.asarray(leaf), path)


def test_a_stopped_run_goes_on_to_the_same_bits(untied, tmp_path):
    again = replace(untied, dir=str(tmp_path / "run"))
    shutil.copytree(untied.dir, again.dir)
    shutil.rmtree(tmp_path / "run/checkpoints/4")
    assert train(again, jax.devices()[:1]).step == 4
    for (path, one), (_, other) in zip(
        walk(weights_of(again)), walk(weights_of(untied)), strict=True
    ):
        np.testing.assert_array_equal(one, other, path)


@pytest.mark.slow
def test_on_several_devices(untied, tmp_path):
    several = replace(
        untied, dir=str(tmp_path / "run"), mesh=replace(untied.mesh, fsdp=2, tensor=2)
    )
    assert train(several, jax.devices()[:4]).step == 4
    one, many = losses(untied), losses(several)
    assert one.keys() == many.keys()
    np.testing.assert_allclose(list(many.values()), list(one.values()), rtol=1e-5)


@pytest.mark.parametrize("head", ["untied", "tied"])
def test_peft_and_transformers_compute_what_was_trained(head, untied, runs, tmp_path):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    run = untied
    if head == "tied":
        run = runs("tied", ("embed_tokens",), "tied")
        train(run, jax.devices()[:1])
    base = run.train.init_from
    export_command(run.dir, tmp_path / "whole")
    export_adapter_command(run.dir, tmp_path / "peft")
    merge_command(base, tmp_path / "peft", tmp_path / "merged")
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert "model.embed_tokens" in config["modules_to_save"]
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        before = AutoModelForCausalLM.from_pretrained(base)
        plain = before(ids).logits
        adapted = peft.PeftModel.from_pretrained(before, tmp_path / "peft")(ids).logits
        others = [
            AutoModelForCausalLM.from_pretrained(tmp_path / name)(ids).logits
            for name in ("whole", "merged")
        ]
    for other in others:
        torch.testing.assert_close(adapted, other, atol=1e-5, rtol=1e-4)
    assert (adapted - plain).abs().max() > 1e-2
    further = replace(run.lora, init_from=str(tmp_path / "peft"))
    further = replace(run, dir=str(tmp_path / "further"), lora=further)
    train(replace(further, train=replace(run.train, steps=1)), jax.devices()[:1])
    first = losses(further)[1]
    assert abs(first - losses(run)[1]) > 1e-3  # from what was trained, not from the base


def test_a_head_that_is_trained_may_sum_its_gradient_once(runs):
    run = runs("tied", ("embed",), "once")
    run = replace(run, train=replace(run.train, head_gradient="once", loss_chunk_tokens=8))
    check_run(run)
    with pytest.raises(UserError, match=r"with \[lora\], whose head is frozen"):
        check_run(replace(run, lora=replace(run.lora, whole=("norm",))))


def test_a_folder_that_trains_other_weights_whole_is_named_as_such(untied, tmp_path):
    """Not as one of another base."""
    export_adapter_command(untied.dir, tmp_path / "peft")
    lora = replace(untied.lora, whole=("embed", "head"), init_from=str(tmp_path / "peft"))
    again = replace(untied, dir=str(tmp_path / "run"), lora=lora)
    with pytest.raises(UserError, match=r"model\.norm\.weight is not trained whole here"):
        train(again, jax.devices()[:1])


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_half_of_what_is_one_is_refused(name, runs, tmp_path):
    """PEFT trains a copy of the table, or of the head, and leaves the other as it was."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    run = runs("tied", ("embed",), "half")
    base = AutoModelForCausalLM.from_pretrained(run.train.init_from)
    said = peft.LoraConfig(r=3, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    said.modules_to_save = [name]
    peft.get_peft_model(base, said).save_pretrained(tmp_path / "peft")
    run = replace(run, lora=replace(run.lora, init_from=str(tmp_path / "peft")))
    with pytest.raises(UserError, match=f"{name}.weight of modules_to_save, so head and"):
        train(run, jax.devices()[:1])


def test_modules_are_trained_whole_with_their_biases():
    """As PEFT's modules_to_save, which cannot be loaded without them."""
    model = Deberta(
        vocab_size=320, embed_dim=16, mlp_dim=24, num_layers=1, num_heads=4, num_kv_heads=4,
        head_dim=4, seq_len=32,
    )  # fmt: skip
    run = Run(
        name="x", dir="x", model=model, objective=Mlm(mask_token_id=1), data=Data(dir="x"),
        optim=KINDS["adamw"](learning_rate=1e-3), train=Train(steps=1, global_batch_size=2),
    )  # fmt: skip
    whole = lambda word: whole_names(replace(run, lora=replace(LORA, whole=(word,))))  # noqa: E731
    assert whole("embed") == {"embed"}
    assert whole("head_norm") == {"head_norm", "head_norm_bias"}
    head = {"dense", "head_norm"}
    assert whole("lm_head") == head | {f"{name}_bias" for name in (*head, "decoder")}


def test_the_gradient_of_a_head_counts(runs):
    """Two FLOPs a weight and token, as in full training."""
    plain, table, head = (
        resolve(runs("untied", whole, "counted"), jax.devices()[:1]).flops_per_step
        for whole in ((), ("embed",), ("head",))
    )
    assert table == plain
    run = runs("untied", (), "counted")
    tokens = run.train.global_batch_size * run.model.seq_len
    assert head - plain == 2 * tokens * run.model.embed_dim * run.model.vocab_size
    taught = replace(runs("untied", ("head",), "counted"), objective=Distill(teacher="x"))
    without = replace(taught, lora=replace(taught.lora, whole=()))
    less, more = (resolve(each, jax.devices()[:1]).flops_per_step for each in (without, taught))
    assert more - less == head - plain


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"lora": replace(LORA, whole=("embd",))}, "lora.whole: 'embd' matches no weight; there"),
        (
            {"lora": replace(LORA, whole=("q_proj",))},
            "'q_proj' matches no weight; there are: embed",
        ),
        (
            {
                "lora": replace(
                    LORA, whole=("embed",), adapters=(Adapter(name="a"), Adapter(name="b"))
                )
            },
            "lora.whole: is for one adapter",
        ),
        ({"objective": Dpo(), "lora": replace(LORA, whole=("embed",))}, "lora.whole: changes the"),
        ({"qat": Qat(), "lora": replace(LORA, whole=("embed",))}, "lora.whole: has no effect on"),
        (
            {"lora": replace(LORA, whole=("lm_head",), targets=("lm_head",))},
            "lora.targets: 'lm_head' matches no weight",
        ),
    ],
)
def test_what_does_not_go_is_one_sentence(changes, told, runs):
    run = replace(runs("untied", (), "refused"), **changes)
    with pytest.raises(UserError) as caught:
        check_run(run)
    assert told in str(caught.value)
