"""Loss by position: against torch's cross-entropy of transformers' logits, over devices, and by
the command."""

import json
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.cli.output import BrokenPipe
from lmwright.core.compute import Compute
from lmwright.core.param import map_params
from lmwright.core.sharding import AXES, batch_sharding, make_mesh, weight_shardings
from lmwright.evals import long_context
from lmwright.evals.loss import evaluate_rows
from lmwright.evals.positions import bucket_starts, position_losses
from lmwright.formats.load import load_model
from lmwright.models.llama import Llama
from lmwright.objectives.clm import Clm
from tests.evals.test_held_out import make_run

T = 64
MODEL = Llama(
    vocab_size=54, embed_dim=32, mlp_dim=40, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, seq_len=T,
)  # fmt: skip


def test_buckets():
    assert bucket_starts(31) == (1, 2, 4, 8, 12, 16, 20, 24, 28)
    assert bucket_starts(32_767)[:14] == (*(2**i for i in range(12)), 4096, 8192)
    assert bucket_starts(32_767)[-1] == 28_672 and bucket_starts(3) == (1, 2, 3)


def packed_rows(count):
    """Rows of two documents, the second with a prompt that is not learned, and padding."""
    rng = np.random.default_rng(2)
    tokens = rng.integers(1, 54, (count, T)).astype(np.int32)
    rows = {name: np.zeros((count, T), np.int32) for name in ("segment_ids", "positions")}
    weight = np.zeros((count, T), np.float32)
    for b in range(count):
        first, end = 20 + b, T - 2 * b
        rows["segment_ids"][b, :first], rows["segment_ids"][b, first:end] = 1, 2
        rows["positions"][b, :first] = np.arange(first)
        rows["positions"][b, first:end] = np.arange(end - first)
        weight[b, 1:first] = 1
        weight[b, first + 5 : end] = 1
    return {**rows, "tokens": tokens, "loss_weight": weight, "text_bytes": np.zeros(count)}


def random_weights():
    rng = np.random.default_rng(0)
    return map_params(lambda p: rng.standard_normal(p.shape).astype("f4") * 0.3, MODEL.spec())


def test_equal_to_torch_by_documents():
    """Each document alone through transformers, and torch's cross-entropy token by token."""
    torch = pytest.importorskip("torch")
    from tests.parity.test_llama import reference

    w, rows = random_weights(), packed_rows(5)
    theirs = reference(MODEL, w)
    nll, count = np.zeros(T), np.zeros(T)
    for b in range(5):
        for segment in (1, 2):
            where = np.flatnonzero(rows["segment_ids"][b] == segment)
            ids = torch.tensor(rows["tokens"][b, where]).long()
            with torch.no_grad():
                logits = theirs(ids[None]).logits[0]
            each = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
            learned = rows["loss_weight"][b, where][1:]
            nll[1 : len(where)] += each.numpy() * learned
            count[1 : len(where)] += learned
    batches = [{name: a[i : i + 1] for name, a in rows.items()} for i in range(5)]
    found = position_losses(MODEL, Compute(), w, "x", batches, T - 1)
    for start, stop, loss, tokens in zip(
        found.starts, found.stops, found.losses, found.tokens, strict=True
    ):
        assert tokens == count[start:stop].sum() > 0
        assert loss == pytest.approx(nll[start:stop].sum() / tokens, rel=1e-5)
    assert sum(found.tokens) == rows["loss_weight"].sum()
    assert set(bucket_starts(T - 1)) - set(found.starts) == {48, 56}  # no document is so long
    whole = evaluate_rows(MODEL, Clm(), Compute(), w, "x", batches)
    mean = np.dot(found.losses, found.tokens) / sum(found.tokens)
    assert mean == pytest.approx(whole.loss, rel=1e-6)


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"fsdp": 2, "context": 2, "tensor": 2}])
def test_equal_on_eight_devices(sizes):
    w, rows = random_weights(), packed_rows(8)
    alone = position_losses(MODEL, Compute(), w, "x", [rows], T - 1)
    mesh = make_mesh({**dict.fromkeys(AXES, 1), **sizes}, jax.devices()[:8])
    with jax.set_mesh(mesh):
        spread = jax.device_put(w, weight_shardings(MODEL.spec(), mesh))
        place = lambda batch: jax.device_put(batch, batch_sharding(mesh))  # noqa: E731
        found = position_losses(MODEL, Compute(), spread, "x", [rows], T - 1, place)
    assert found.tokens == alone.tokens and found.starts == alone.starts
    np.testing.assert_allclose(found.losses, alone.losses, rtol=2e-6)


def test_the_command_keeps_it_for_the_report(tmp_path, capsys):
    root, _ = make_run(tmp_path, "chunk")
    run = str(root / "run")
    assert main(["prepare", str(root / "run.toml")]) == 0
    assert main(["train", str(root / "run.toml")]) == 0
    with pytest.MonkeyPatch.context() as patch, pytest.raises(BrokenPipe):
        patch.setattr(long_context, "print_positions", Mock(side_effect=BrokenPipeError))
        main(["eval", run, "--by-position", "--precision", "fp32"])
    assert (root / "run" / "evals.jsonl").exists()  # also where nobody reads what is printed
    capsys.readouterr()
    assert main(["eval", run, "--by-position", "--precision", "fp32"]) == 0
    assert "tokens before" in capsys.readouterr().out
    assert main(["eval", run, "--by-position", "--precision", "fp32"]) == 0  # replaces it
    [line] = map(json.loads, (root / "run" / "evals.jsonl").read_text().splitlines())
    assert line["kind"] == "positions" and line["step"] == 2 and line["source"] == "heldout"
    assert line["stops"][-1] == 32
    # the mean over positions is the loss of `eval`
    capsys.readouterr()
    assert main(["eval", run]) == 0
    row = capsys.readouterr().out.splitlines()[-2].split()
    assert sum(line["tokens"]) == int(row[1].replace(",", ""))
    mean = np.dot(line["losses"], line["tokens"]) / sum(line["tokens"])
    assert mean == pytest.approx(float(row[2]), abs=1e-4)
    assert main(["report", run]) == 0
    page = (root / "run" / "report.html").read_text()
    assert "Loss by position" in page and page.count("<circle") == len(line["starts"])


def test_any_model_on_a_text(shared_data, tmp_path, capsys):
    """A text in one window: the losses of `eval --text`, by position."""
    stories = shared_data / "models" / "stories260k"
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time, Lily went to the park. She saw a big dog. " * 9)
    words = ["eval", str(stories), "--text", str(text), "--context", "256"]
    assert main([*words, "--by-position"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:-1]]
    tokens = [int(row[-2].replace(",", "")) for row in rows]
    losses = [float(row[-1]) for row in rows]
    assert main(words) == 0
    row = capsys.readouterr().out.splitlines()[-2].split()
    assert sum(tokens) == int(row[1].replace(",", ""))
    assert np.dot(tokens, losses) / sum(tokens) == pytest.approx(float(row[2]), abs=1e-3)
    assert not list(stories.glob("evals.jsonl")) and load_model(stories).step is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--by-position", "--needle"], "one at a time"),
        (["--by-position", "--lengths", "8"], "--lengths needs --needle"),
        (["--needle", "--stride", "8", "--text", "x"], "use --lengths"),
        (["--by-position", "--context", "8"], "--context needs --text"),
        (["--needle", "--lengths", "a,b"], "not a list of numbers"),
        (["--needle", "--depths", "120"], "at most 100"),
        (["--needle", "--max-rows", "3"], "--max-chars"),
        (["--by-position"], "add --text FILE"),
        (["--needle"], "add --text FILE"),
        (["--needle", "--lengths", "99999", "--text", "x"], "beyond the model's context"),
    ],
)
def test_options_that_do_not_fit(words, says, shared_data, capsys):
    assert main(["eval", str(shared_data / "models" / "stories260k"), *words]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
