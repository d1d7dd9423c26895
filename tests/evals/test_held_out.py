"""Held-out loss: what the commands say, beside a reckoning from the text by another library."""

import json
import math
import random

import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.config.load import dump_toml
from lmwright.config.run import Checkpoint, Data, Eval, Metrics, Pack, Run, Source, Tokenizer, Train
from lmwright.data.tokens.token_bytes import TokenBytes
from lmwright.data.tokens.tokenizer import load_tokenizer
from lmwright.data.tokens.tokenizer_formats import import_tokenizer
from lmwright.evals.loss import TokenRowTally
from lmwright.models.llama import Llama
from lmwright.objectives.clm import Clm
from lmwright.objectives.mlm import Mlm
from lmwright.objectives.rtd import Rtd
from lmwright.optim import KINDS

T = 32
UNICODE = (
    "\u00dcn\u00efc\u00f6d\u00e9  caf\u00e9\n\n\t\u65e5\u672c\u8a9e\u306e "
    "\U0001f642\U0001f469\u200d\U0001f467 don't 12345   end  x"
)


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def held_out_texts(method, words, rng):
    """One long document whose words get rarer, or short ones that rows do not cut."""
    if method == "chunk":
        return [" ".join(words[rng.randrange(1 + i // 40)] for i in range(2000))]
    return [" ".join(rng.choices(words, k=rng.randint(1, 5))) for _ in range(60)]


def make_run(root, method):
    rng = random.Random(3)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(60)]
    train = [" ".join(rng.choices(words, k=40)) for _ in range(60)]
    held_out = held_out_texts(method, words, rng)
    model = Llama(
        vocab_size=320, embed_dim=16, mlp_dim=24, num_layers=1, num_heads=2, num_kv_heads=1,
        head_dim=8, seq_len=T,
    )  # fmt: skip
    sources = (
        Source(path=write(root / "a.jsonl", train)),
        Source(path=write(root / "heldout.jsonl", held_out), use="eval"),
    )
    data = Data(
        dir=str(root / "data"), workers=1, sources=sources, tokenizer=Tokenizer(vocab_size=300),
        pack=Pack(method=method),
    )  # fmt: skip
    run = Run(
        name="small", dir=str(root / "run"), model=model, objective=Clm(),
        optim=KINDS["adamw"](learning_rate=1e-2), data=data,
        train=Train(steps=2, global_batch_size=8, precision="fp32"),
        eval=Eval(max_rows=7), checkpoint=Checkpoint(save_every_steps=2),
        metrics=Metrics(log_every_steps=1, trackers=()),
    )  # fmt: skip
    (root / "run.toml").write_text(dump_toml(run))
    return root, held_out


def printed(root, capsys, *words):
    """The row of `eval`'s table."""
    capsys.readouterr()
    assert main(["eval", str(root / "run"), *words]) == 0
    return capsys.readouterr().out.splitlines()[-2].split()


def bytes_by_hand(root, texts):
    """UTF-8 bytes of all but the first token of each piece, and how many tokens these are: the
    text, cut into rows of T as transformers tokenizes it."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "data" / "tokenizer")
    size = count = 0
    for text in texts:
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        for start in range(0, len(ids), T):
            rest = ids[start : start + T][1:]
            count += len(rest)
            size += len(tokenizer.decode(rest, skip_special_tokens=True).encode())
    return size, count


@pytest.mark.parametrize("method", ["chunk", "best-fit"])
def test_training_and_eval_agree_with_a_reckoning_from_the_text(method, tmp_path, capsys):
    root, texts = make_run(tmp_path, method)
    assert main(["prepare", str(root / "run.toml")]) == 0
    assert main(["train", str(root / "run.toml")]) == 0
    log = capsys.readouterr().out
    size, count = bytes_by_hand(root, texts)
    _, tokens, loss, _, bits, _, rows, _, of_rows = printed(root, capsys)
    assert int(tokens.replace(",", "")) == count and rows == of_rows
    assert float(bits) == pytest.approx(float(loss) * count / size / math.log(2), abs=2e-4)
    # what training said is what `eval` says of the same rows, and near that of all
    lines = (root / "run" / "metrics.jsonl").read_text().splitlines()
    [entry] = [e for e in map(json.loads, lines) if e["kind"] == "eval"]
    some = printed(root, capsys, "--max-rows", "7")
    assert (entry["rows"], entry["of_rows"]) == (7, int(of_rows))
    assert some[-3:] == ["7", "of", of_rows] and f"({entry['rows']} of {of_rows} rows)" in log
    assert entry["tokens"] == int(some[1])
    assert entry["loss"] == pytest.approx(float(some[2]), abs=2e-4)
    assert entry["bits_per_byte"] == pytest.approx(float(some[4]), abs=2e-4)
    assert entry["loss"] == pytest.approx(float(loss), abs=0.02)


def test_data_of_another_tokenizer_are_refused(tmp_path, capsys):
    """Their ids stand for other text, and the loss would be one of nothing."""
    file = str(make_run(tmp_path, "chunk")[0] / "run.toml")
    assert main(["train", file]) == 0
    before = printed(tmp_path, capsys)
    assert main(["prepare", file, "data.tokenizer.vocab_size=290"]) == 0
    run = str(tmp_path / "run")
    assert main(["eval", run]) == 2
    said = capsys.readouterr().err
    assert f"is not the tokenizer that {run} was trained with; run `lmwright prepare {run}`" in said
    assert main(["prepare", run]) == 0
    assert printed(tmp_path, capsys) == before


@pytest.mark.parametrize(
    "name", ["gpt2", "llama2", "llama3", "qwen", "smollm2", "stories260k", "trained"]
)
def test_bytes_of_tokens_add_up_to_the_text(name, shared_data, tmp_path):
    if name == "trained":
        root, _ = make_run(tmp_path, "chunk")
        assert main(["tokenizer", "train", str(root / "run.toml")]) == 0
        tokenizer = load_tokenizer(root / "data" / "tokenizer")
    elif name == "stories260k":
        tokenizer = import_tokenizer(str(shared_data / "models" / name))
    else:
        tokenizer = import_tokenizer(str(shared_data / "tokenizers" / name))
    # after a special token, as documents come in rows
    special = next(iter(tokenizer.special_tokens.values()))
    for text in (UNICODE, " leading", "x", "\n"):
        found = TokenBytes(tokenizer).of(np.array([special, *tokenizer.encode(text)]))
        assert found[0] == 0 and found.sum() == len(text.encode())


def added(objective, *batches):
    """The loss of a tally to which (sums of a batch, tokens that may be predicted) were added."""
    tally = TokenRowTally(objective)
    for sums, candidates in batches:
        weight = (np.arange(8) < candidates).astype("f4")[None]
        tally.add({"loss_weight": weight, "text_bytes": np.full((1, 8), 3)}, sums)
    return tally.loss("x")


def test_bits_per_byte_are_of_texts_whose_tokens_are_all_predicted():
    """Not of one that has a part of them hidden."""
    whole, part = {"nll": (12.0, 8.0)}, {"nll": (2.0, 1.0)}
    assert added(Mlm(), (part, 8)).bits_per_byte is None
    assert added(Mlm(mask_ratio=1.0), (whole, 8)).bits_per_byte == pytest.approx(
        12 / math.log(2) / 24
    )
    decoder = added(Clm(), ({"nll": (12.0, 7.0)}, 8), ({"nll": (9.0, 7.0)}, 8))  # first tokens
    assert decoder.bits_per_byte == pytest.approx(21 / math.log(2) / 48)
    assert decoder.loss == pytest.approx(21 / 14)


def test_scores_of_an_objective_are_means_over_all_batches():
    names = Rtd.held_out_metrics
    first = {"nll": (2.0, 1.0)} | {name: (6.0, 8.0) for name in names}
    second = {"nll": (2.0, 3.0)} | {name: (1.0, 2.0) for name in names}
    none = {"nll": (0.0, 0.0)} | {name: (0.0, 0.0) for name in names}
    found = added(Rtd(), (first, 8), (second, 8), (none, 8))
    assert found.scores == {name: pytest.approx(7 / 10) for name in names}
    assert (found.loss, found.tokens) == (1.0, 4)
