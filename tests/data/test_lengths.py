"""Examples that rows are too short for are counted, and a length that holds most is named."""

import json
import re

import numpy as np
import pytest
from rich.console import Console

from lmwright.config.run import Chat, Data, Normalize, Pack, Source, Tokenizer
from lmwright.data.prepare import prepare, print_summary
from lmwright.data.rows.lengths import bucket
from lmwright.data.tokens.tokenizer import save_tokenizer
from lmwright.errors import UserError
from tests.data.chat_problem import chat_tokenizer

ROWS = 60


def row_of(kind, words):
    answer = "long " * words + "end"
    return {
        "prompt": {"prompt": "q", "completion": answer},
        "preference": {"prompt": "q", "chosen": answer, "rejected": answer + "s"},
        "rated": {"prompt": "q", "completion": answer, "label": words % 2 == 0},
    }[kind]


@pytest.fixture
def data_of(tmp_path):
    save_tokenizer(chat_tokenizer(), tmp_path / "tokenizer")

    def make(kind, words, holdout=0.0, **options):
        rows = "".join(json.dumps(row_of(kind, n)) + "\n" for n in words)
        (tmp_path / "chats.jsonl").write_text(rows)
        return Data(
            dir=str(tmp_path / "data"),
            sources=(Source(path=str(tmp_path / "chats.jsonl"), rows=kind),),
            tokenizer=Tokenizer(path=str(tmp_path / "tokenizer")),
            chat=Chat(template="chatml", **options),
            pack=Pack(method="best-fit"),
            normalize=Normalize(max_bad_fraction=1.0),
            holdout_fraction=holdout,
        )

    return make


def shown_of(summary, capsys):
    print_summary(summary, Console(width=1000))
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", ["prompt", "preference", "rated"])
def test_many_lost_examples_are_a_warning_with_the_length_that_keeps_them(kind, data_of, capsys):
    words = (np.random.default_rng(0).permutation(ROWS) * 3).tolist()
    data = data_of(kind, words, 0.2)
    short = prepare(data, 256, workers=2)
    shown = shown_of(short, capsys)
    lost, percent, row, wanted = re.search(
        rf"warning: chats: (\d+) of {ROWS} examples \((\d+)%\) are longer than a row of (\d+) "
        r"tokens and were left out; data\.pack\.seq_len = (\d+) .* keeps 95% of them",
        shown,
    ).groups()
    assert int(row) == 256 and int(lost) > 0.1 * ROWS
    assert int(percent) == round(100 * int(lost) / ROWS)

    def kept(seq_len):
        return sum(r["docs"] for r in prepare(data, seq_len, workers=1).rows())

    assert kept(256) == ROWS - int(lost)
    # enough, and not much more than enough
    assert kept(int(wanted)) >= 0.95 * ROWS
    assert "warning" not in shown_of(prepare(data, int(wanted), workers=1), capsys)
    assert kept(int(wanted) - 128) < 0.95 * ROWS


def test_few_or_cut_examples_are_no_warning(data_of, capsys):
    few = [1] * 20 + [200]
    shown = shown_of(prepare(data_of("prompt", few), 64, workers=1), capsys)
    assert "longer than a row left out" in shown and "warning" not in shown
    cut = prepare(data_of("prompt", [200] * 5 + [1], too_long="cut-left"), 64, workers=1)
    assert cut.warnings() == []


def test_where_nothing_is_left_the_length_is_named_too(data_of):
    with pytest.raises(UserError, match=r"5 are longer than a row; data\.pack\.seq_len = \d+ "):
        prepare(data_of("prompt", [200] * 5), 64, workers=1)
    with pytest.raises(UserError, match=r"no example is left; the first: .*spells the special"):
        bad = data_of("prompt", [0])
        (source,) = bad.sources
        with open(source.path, "w") as f:
            f.write(json.dumps({"prompt": "<s>", "completion": "b"}) + "\n")
        prepare(bad, 64, workers=1)


def test_buckets_are_close_above():
    sizes = np.unique(np.geomspace(1, 1e7, 4000).astype(int)).tolist()
    found = [int(bucket(size)) for size in sizes]
    assert all(a <= b <= 1.033 * a for a, b in zip(sizes, found, strict=True))
    assert found == sorted(found) and len(set(found)) < 700
