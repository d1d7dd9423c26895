"""Adapters on one frozen base: each as if it trained alone, resumed bit for bit, come and gone."""

import json
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import jax
import numpy as np
import pytest

from lmwright.checkpoint.store import Checkpoints
from lmwright.config.run import Checkpoint, Eval
from lmwright.core.param import walk
from lmwright.data.prepare import prepare
from lmwright.errors import UserError
from lmwright.formats.load import load_model
from lmwright.formats.open import load_run
from lmwright.formats.weights import trained
from lmwright.optim.kinds import Linear
from lmwright.planner.measured import measured
from lmwright.program.lora_section import Adapter, LowRank
from lmwright.program.plan import resolve
from lmwright.program.qat_section import Qat
from lmwright.report.read import read_run
from lmwright.train.session import _early_stops, _refuse_patience, train
from tests.resume.small_runs import logged, losses

SLOW = pytest.mark.slow
A = Adapter(name="a", rows=4, rank=3, learning_rate=2e-2)
B = Adapter(name="b", rows=2, steps=8, rank=5, schedule=Linear(warmup_steps=2))


@pytest.fixture(scope="module")
def runs(small_run, tmp_path_factory):
    """A function from adapters and a folder's name to a run; b has data of its own."""
    root = tmp_path_factory.mktemp("adapters")
    other = replace(
        small_run.data,
        dir=str(root / "other"),
        shuffle=replace(small_run.data.shuffle, seed=7),
    )
    prepare(other, small_run.model.seq_len)
    adapters = {"a": A, "b": replace(B, data=other.dir)}

    def make(names, folder=None, **changes):
        chosen = tuple(adapters[name] for name in names)
        rows = sum(one.rows for one in chosen)
        lora = LowRank(base="int8", alpha=8.0, b_rate_ratio=2.0, adapters=chosen)
        return replace(
            small_run,
            dir=str(root / (folder or f"run-{names}")),
            model=replace(small_run.model, num_layers=1),
            lora=replace(lora, **changes),
            train=replace(small_run.train, global_batch_size=rows),
        )

    return make


def weights_of(run):
    plan = resolve(replace(run), jax.devices()[:1])
    return trained(plan, Path(run.dir))[1]


@pytest.fixture(scope="module")
def together(runs):
    run = runs("ab")
    outcome = train(run, jax.devices()[:1])
    assert outcome.step == 12 and outcome.exit_code == 0
    return run, weights_of(run)


@pytest.mark.parametrize("name", ["a", pytest.param("b", marks=pytest.mark.slow)])
def test_an_adapter_trains_as_if_alone(runs, together, name):
    alone = runs(name)
    assert train(alone, jax.devices()[:1]).step == {"a": 12, "b": 8}[name]
    got, expected = together[1][name], weights_of(alone)[name]
    moved = 0.0
    for (path, one), (_, other) in zip(walk(got), walk(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4, err_msg=path)
        moved = max(moved, np.abs(one).max() if path.endswith(".b") else 0.0)
    assert moved > 1e-2  # second factors start at zero


def test_each_adapter_has_metrics_of_its_own_to_its_end(together):
    """Also of steps that it trains alone, after the others."""
    run, _ = together
    lines = [
        json.loads(line) for line in (Path(run.dir) / "metrics.jsonl").read_text().splitlines()
    ]
    trained = [line for line in lines if line["kind"] == "train"]
    for name, last in (("a", 12), ("b", 8)):
        steps = [line["step"] for line in trained if f"loss/{name}" in line]
        assert steps[-1] == last and "grad_norm/" + name in trained[0]


def test_what_is_compared_with_a_plan_is_of_steps_of_all_adapters(together):
    """The last four steps of `a`, alone, are other ones; the tokens are those of both to their
    ends."""
    run, _ = together
    record = read_run(run.dir)
    assert record.plan["tokens"] == (4 * 12 + 2 * 8) * 32
    lines = map(json.loads, (Path(run.dir) / "metrics.jsonl").read_text().splitlines())
    seconds = {line["step"]: line.get("step_time_p50_s") for line in lines if "loss/a" in line}
    timed = [seconds[step] for step in range(3, 9)]  # the first one timed follows the start
    found = measured(record)
    assert (found.steps, found.step_s) == (6, pytest.approx(statistics.median(timed)))


def test_adapters_inside_the_rounding_train_as_if_alone(runs):
    """With [qat] each has scales of its own; merged, it is what its integers say."""
    found = {}
    for names in ("ab", "a", "b"):
        run = runs(names, f"rounded-{names}", base="fp32", b_rate_ratio=1.0)
        slow = tuple(replace(each, learning_rate=1e-4) for each in run.lora.adapters)
        run = replace(run, lora=replace(run.lora, adapters=slow), qat=Qat(weights="int8"))
        assert train(run, jax.devices()[:1]).exit_code == 0
        found[names] = run, weights_of(run)
    together, weights = found["ab"]
    for name in "ab":
        for (path, one), (_, other) in zip(
            walk(weights[name]), walk(found[name][1][name]), strict=True
        ):
            np.testing.assert_allclose(one, other, atol=2e-5, err_msg=path)
            assert not path.endswith(".b") or np.abs(one).max() > 2e-4
        tensors = load_model(together.dir, name).tensors
        tensor = "model.layers.0.mlp.down_proj.weight"
        codes, scale = tensors.codes(tensor)
        np.testing.assert_array_equal(codes * scale, tensors[tensor])
    scales = [dict(walk(part))["layers.down.scale"] for part in weights.values()]
    assert not np.array_equal(*scales)


# mxfp4 holds experts, which this model has none of (test_lora_mxfp4)
STORAGES = [name for name in get_args(get_type_hints(LowRank)["base"]) if name != "mxfp4"]


@pytest.mark.parametrize("base", [pytest.param(name, marks=SLOW) for name in STORAGES])
def test_every_storage_of_the_base_trains_and_resumes(runs, base):
    run, one = runs("a", f"stored-as-{base}", base=base), jax.devices()[:1]
    run = replace(
        run,
        train=replace(run.train, steps=4, num_microbatches=1),
        checkpoint=Checkpoint(save_every_steps=2),
    )
    assert train(run, one).step == 4
    expected = weights_of(run)["a"]
    shutil.rmtree(Path(run.dir) / "checkpoints" / "4")
    assert train(run, one).step == 4
    for (path, got), (_, whole) in zip(walk(weights_of(run)["a"]), walk(expected), strict=True):
        assert got.tobytes() == whole.tobytes(), path
    assert all(np.isfinite(loss) for loss in losses(run).values())


def test_a_checkpoint_holds_adapters_only_and_resumes_bit_for_bit(runs, together):
    run, expected = together
    again = runs("ab", "again")
    shutil.copytree(run.dir, again.dir)
    shutil.rmtree(Path(again.dir) / "checkpoints" / "12")
    with Checkpoints(Path(again.dir), run.checkpoint) as checkpoints:
        assert checkpoints.steps() == [9]
        shapes = checkpoints.shapes(9)
    assert set(shapes) == {"step", "trained"}
    assert all(
        set(part) == {"weights", "optimizer", "skipped"} for part in shapes["trained"].values()
    )
    text = (Path(again.dir) / "run.toml").read_text().replace(run.dir, again.dir)
    (Path(again.dir) / "run.toml").write_text(text)
    assert train(again, jax.devices()[:1]).step == 12
    for one, other in zip(
        jax.tree.leaves(weights_of(again)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_adapters_are_added_and_dropped(runs, together):
    run, before = together
    changed = runs("b", "changed")
    shutil.copytree(run.dir, changed.dir)
    new = replace(changed.lora.adapters[0], name="new", steps=3)
    grown = replace(changed, lora=replace(changed.lora, adapters=(*changed.lora.adapters, new)),
                    train=replace(changed.train, global_batch_size=4))  # fmt: skip
    assert train(grown, jax.devices()[:1]).step == 15  # b is done, the new one has 3 steps
    after = weights_of(grown)
    assert set(after) == {"b", "new"}
    for one, other in zip(jax.tree.leaves(after["b"]), jax.tree.leaves(before["b"]), strict=True):
        np.testing.assert_array_equal(one, other)
    saved = load_run(Path(grown.dir) / "run.toml")
    assert [one.name for one in saved.lora.adapters] == ["b", "new"]


def test_another_base_or_other_settings_are_refused(runs, together):
    run, _ = together
    with pytest.raises(UserError, match=r"lora\.alpha is 8\.0 there and 9\.0 here"):
        train(replace(run, lora=replace(run.lora, alpha=9.0)), jax.devices()[:1])
    with pytest.raises(UserError, match=r"seed is 0 there and 3 here"):
        train(replace(run, seed=3), jax.devices()[:1])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"targets": ("q_prj",)}, r"'q_prj' matches no weight; there are: all, attention, mlp"),
        (
            {"rank": 33, "adapters": ()},
            r"33 is more than the 32 dimensions of layers.down, .* nothing; use at most 16$",
        ),
        (
            {"rank": 9, "ranks": {"down": 33}, "adapters": ()},
            r"lora.rank: 33 is more .*; set lora.ranks.down = 32, or use at most 32 for all",
        ),
        ({"adapters": (A, replace(B, rank=40))}, r"^lora.adapters.1.rank: 40 is more than"),
        ({"ranks": {"experts": 2}}, r"lora.ranks.experts: matches no target"),
        ({"init_from": "x"}, r"lora.init_from: has no effect"),
        (
            {"adapters": (replace(A, rows=6, init_from="nowhere"),)},
            r"^lora.adapters\['a'\].init_from: nowhere.*: missing",
        ),
    ],
)
def test_bad_settings_are_one_clear_line(runs, changes, message):
    run = runs("ab", "bad", **changes)
    with pytest.raises(UserError, match=message):
        train(run, jax.devices()[:1])


def test_a_frozen_head_has_no_gradient_to_sum(runs):
    run = runs("ab", "head")
    run = replace(run, train=replace(run.train, head_gradient="once", loss_chunk_tokens=8))
    with pytest.raises(UserError, match=r"^train.head_gradient: 'once' .* whose head is frozen"):
        train(run, jax.devices()[:1])


@pytest.mark.slow
def test_an_adapter_whose_loss_no_longer_falls_stops(runs):
    still = replace(B, rows=4, steps=12, patience=1, learning_rate=1e-30)  # learns nothing
    run = runs("b", "patient", adapters=(still,))
    run = replace(
        run, train=replace(run.train, global_batch_size=4), eval=replace(run.eval, every_steps=2)
    )
    outcome = train(run, jax.devices()[:1])
    assert outcome.exit_code == 0 and outcome.step == 4  # of the evaluations, the second
    patient = replace(run.lora, adapters=(replace(still, patience=3),))
    for _ in range(2):  # the second time it is done
        outcome = train(replace(run, lora=patient), jax.devices()[:1])
        assert outcome.exit_code == 0 and outcome.step == 8  # a raised patience is heeded
    assert [line["step"] for line in logged(run, "adapter stopped")] == [4, 8]


def test_patience_that_nothing_is_measured_for_is_refused(runs):
    run = runs("b", "deaf", adapters=(replace(B, patience=2),))
    with pytest.raises(UserError, match=r"patience of 'b' .* only at the end; set eval.every"):
        train(replace(run, eval=replace(run.eval, every_steps=None)), jax.devices()[:1])
    plan = SimpleNamespace(
        run=replace(run, eval=Eval(every_steps=2)),
        training=SimpleNamespace(trainees=[SimpleNamespace(name="b", patience=2)]),
    )
    place = SimpleNamespace(name=lambda part: "data/b/pack")
    with pytest.raises(UserError, match=r"patience of 'b' .* nothing is held out in data/b/pack"):
        _refuse_patience(plan, {"b": SimpleNamespace(eval_sources=(), place=place)})


@pytest.mark.parametrize("patience, stopped", [(2, True), (3, False), (None, False)])
def test_a_later_session_may_have_another_patience(patience, stopped):
    meta = {"trainees": {"b": {"best": 2.0, "since_best": 2, "stopped": True}}}
    (early,) = _early_stops([SimpleNamespace(name="b", patience=patience)], meta).values()
    assert (early.best, early.since_best, early.stopped) == (2.0, 2, stopped)


def test_a_run_that_is_refused_leaves_its_directory_as_it_was(runs, together):
    """Otherwise `train DIR` would be refused from then on, too."""
    run, _ = together
    files = [Path(run.dir) / name for name in ("run.toml", "plan.json", "metrics.jsonl")]
    before = [file.read_bytes() for file in files]
    other = tuple(replace(each, data=None) for each in run.lora.adapters)
    other = replace(run, lora=replace(run.lora, adapters=other), eval=Eval(every_steps=5))
    with pytest.raises(UserError, match=r"is not what .* was trained on"):
        train(other, jax.devices()[:1])
    assert [file.read_bytes() for file in files] == before
    assert load_run(files[0]) == run


def test_other_rows_of_an_adapter_are_refused(runs, together):
    run, _ = together
    more = tuple(replace(each, rows=4) for each in run.lora.adapters)
    run = replace(run, lora=replace(run.lora, adapters=more))
    run = replace(run, train=replace(run.train, global_batch_size=8))
    with pytest.raises(UserError, match=r"lora\.adapters\.b\.rows is 2 there and 4 here"):
        train(run, jax.devices()[:1])


@pytest.mark.slow
def test_from_a_trained_base_to_peft_and_to_a_merged_model(small_run, tmp_path):
    """The whole way: full training, DoRA over int8 from there, both exports, the same logits."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM

    from lmwright.formats.adapter_verbs import export_adapter_command, merge_command
    from lmwright.formats.convert import export_command

    base = replace(small_run, dir=str(tmp_path / "base"), train=replace(small_run.train, steps=3))
    train(base, jax.devices()[:1])
    lora = replace(
        base,
        dir=str(tmp_path / "lora"),
        data=replace(base.data, sources=()),  # prepared; what comes with the base is not here
        lora=LowRank(base="fp32", variant="dora", rank=3, targets=("attention", "up_proj")),
        train=replace(base.train, init_from=base.dir, steps=4, ema_decay=0.5),
    )
    assert train(lora, jax.devices()[:1]).step == 4
    export_command(base.dir, tmp_path / "base-hf")
    export_command(lora.dir, tmp_path / "merged")
    export_adapter_command(lora.dir, tmp_path / "adapter")
    merge_command(tmp_path / "base-hf", tmp_path / "adapter", tmp_path / "merged-too")
    first, second = (
        load_file(tmp_path / name / "model.safetensors") for name in ("merged", "merged-too")
    )
    for name in first:
        np.testing.assert_allclose(first[name], second[name], atol=1e-6, err_msg=name)
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base-hf")
        before = model(ids).logits
        adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    torch.testing.assert_close(adapted, merged, atol=1e-5, rtol=1e-4)
    assert (adapted - before).abs().max() > 1e-3
    export_command(base.dir, tmp_path / "rounded", dtype="bf16")
    merge_command(tmp_path / "rounded", tmp_path / "adapter", tmp_path / "merged-rounded")

    other = replace(base, dir=str(tmp_path / "other"), seed=5)
    train(other, jax.devices()[:1])
    moved = replace(lora, train=replace(lora.train, init_from=other.dir))
    with pytest.raises(UserError, match="is not the base that the adapters"):
        train(moved, jax.devices()[:1])
    with pytest.raises(UserError, match="was trained on"):
        merge_command(other.dir, tmp_path / "adapter", tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()

    # nor does an adapter start on another base than its own; on one that was rounded it does
    started = replace(lora.lora, init_from=str(tmp_path / "adapter"))
    further = replace(lora, dir=str(tmp_path / "further"), lora=started)
    rounded = replace(lora.train, init_from=str(tmp_path / "rounded"))
    assert train(replace(further, train=rounded), jax.devices()[:1]).step == 4
    elsewhere = replace(further, dir=str(tmp_path / "elsewhere"), train=moved.train)
    with pytest.raises(UserError, match=r"^lora.init_from: .*was trained on"):
        train(elsewhere, jax.devices()[:1])
