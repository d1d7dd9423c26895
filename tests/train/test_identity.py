"""What makes another run of a directory: all that is learned from, and nothing else."""

from dataclasses import replace

import pytest

from lmwright.config.run import Checkpoint, Eval, Limits, Mesh, Metrics, Planning, Source, Tokenizer
from lmwright.optim import KINDS
from lmwright.program.lora_section import Adapter, LowRank
from lmwright.train.identity import differences, identity
from tests.train.test_step import make_run

RUN = make_run()


def changed(section, **fields):
    return replace(RUN, **{section: replace(getattr(RUN, section), **fields)})


@pytest.mark.parametrize(
    "run",
    [
        replace(RUN, name="other", dir="elsewhere"),
        replace(RUN, mesh=Mesh(data=2)),
        replace(RUN, eval=Eval(every_steps=3), checkpoint=Checkpoint(keep_last=9)),
        replace(RUN, metrics=Metrics(log_every_steps=3), limits=Limits(session_hours=9)),
        replace(RUN, plan=Planning(prices={"v4": 1.0})),
        changed("train", steps=99, remat="block", head_gradient="once", max_skipped_steps=3),
        changed("train", num_microbatches=2),  # rows are alone
        changed("data", workers=3, cache_gib=1.0),
        changed("optim", offload="moments"),
    ],
)
def test_other_ways_to_the_same_weights(run):
    assert differences(identity(RUN), identity(run)) == set()


@pytest.mark.parametrize(
    "run, fields",
    [
        (replace(RUN, seed=1), {"seed"}),
        (changed("model", rope_theta=9e3), {"model.rope_theta"}),
        (changed("train", global_batch_size=16), {"train.global_batch_size"}),
        (changed("train", remat="block", block_inputs="int8"), {"train.block_inputs"}),
        (changed("train", precision="bf16"), {"train.precision"}),
        (changed("optim", learning_rate=1e-4), {"optim.learning_rate"}),
        (changed("data", holdout_fraction=0.1), {"data.holdout_fraction"}),
        (replace(RUN, optim=KINDS["lion"](learning_rate=1e-2)), {"optim.kind"}),
    ],
)
def test_other_weights(run, fields):
    other = differences(identity(RUN), identity(run))
    assert fields <= other
    sections = {name.partition(".")[0] for name in fields}
    assert {name.partition(".")[0] for name in other} == sections


def test_one_of_several_sources():
    """It is named by its number, since a list of them is too long to be shown."""
    one = changed("data", sources=(Source(path="a"), Source(path="b")))
    heavier = changed("data", sources=(Source(path="a"), Source(path="b", weight=2.0)))
    more = changed("data", sources=(*one.data.sources, Source(path="c")))
    assert differences(identity(one), identity(heavier)) == {"data.sources.1.weight"}
    assert differences(identity(one), identity(more)) == {"data.sources.2"}


def test_a_path_from_the_root_is_the_same_path(tmp_path, monkeypatch):
    def reading(tokenizer, source):
        data = replace(
            RUN.data, sources=(Source(path=source),), tokenizer=Tokenizer(path=tokenizer)
        )
        return identity(replace(RUN, data=data))

    monkeypatch.chdir(tmp_path)
    run = reading("base/tokenizer", "texts/*.jsonl")
    whole = reading(f"{tmp_path}/base/tokenizer", f"{tmp_path}/texts/*.jsonl")
    assert differences(run, whole) == set()
    assert differences(run, reading("./base/tokenizer", "./texts/*.jsonl")) == set()
    other = reading(f"{tmp_path}/other/tokenizer", "hf://texts/*.jsonl")
    assert differences(run, other) == {"data.tokenizer.path", "data.sources.0.path"}


def of_adapters(batch, *adapters):
    """The run with adapters of these names and, where given, rows."""
    listed = tuple(Adapter(name=name, rows=rows) for name, rows in adapters)
    run = replace(RUN, lora=LowRank(rank=2, adapters=listed))
    return replace(run, train=replace(run.train, global_batch_size=batch))


@pytest.mark.parametrize(
    "before, now, fields",
    [
        (of_adapters(4, ("a", None)), of_adapters(8, ("a", None)), {"lora.adapters.a.rows"}),
        (of_adapters(8, ("a", 4), ("b", 4)), of_adapters(8, ("a", 2), ("b", 6)),
         {"lora.adapters.a.rows", "lora.adapters.b.rows"}),
        (of_adapters(8, ("a", None)), of_adapters(8, ("a", None), ("b", None)),
         {"lora.adapters.a.rows", "lora.adapters.b"}),
        (of_adapters(8, ("a", None)), of_adapters(12, ("a", None), ("b", 4)), {"lora.adapters.b"}),
        (of_adapters(8, ("a", None)), of_adapters(8, ("a", 8)), set()),
    ],
)  # fmt: skip
def test_an_adapter_keeps_the_rows_of_its_steps(before, now, fields):
    """Its place in its data is the number of its steps times their rows."""
    assert differences(identity(before), identity(now)) == fields
