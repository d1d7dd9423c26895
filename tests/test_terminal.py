"""What comes from others is shown, and never obeyed by a terminal or a page."""

import io
import json
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from lmwright.cli.main import main
from lmwright.core.compute import Compute
from lmwright.evals.source_loss import SourceLoss
from lmwright.evals.tables import print_losses
from lmwright.guard.terminal import visible

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x08\r\u202e<img src=x onerror=alert(1)>"
SHOWN = "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\x08\\x0d\\u202e<img"


def obeyed(text):
    """Characters that a terminal acts on, but those of rich's own colors and lines."""
    return [c for c in text if (ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0]


def test_every_control_character_is_spelled_out():
    every = "".join(map(chr, range(0x3000))) + "\ud800\U0001f600"
    shown = visible(every)
    assert not obeyed(shown) and "\u202e" not in shown
    assert shown.encode()  # no half of a pair
    assert "\n" in shown and "\t" in shown and "\u00e9" in shown and "\U0001f600" in shown
    assert visible("a\nb\tc\x1b", lines=False) == "a\\nb\\tc\\x1b"
    assert visible("plain \u05d0\u0e01") == "plain \u05d0\u0e01"


@pytest.fixture
def run_file(tmp_path):
    from lmwright.config.run import Tokenizer
    from lmwright.data.tokens.tokenizer import save_tokenizer, train_tokenizer

    words = Tokenizer(vocab_size=300, special_tokens=("<|endoftext|>",))
    save_tokenizer(train_tokenizer(["some text " * 9], words), tmp_path / "tokenizer")
    rows = [{"prompt": EVIL, "completion": "a" + EVIL}, {"prompt": "q", "completion": "a" * 900}]
    rows += [{"prompt": "q", "completion": ""}]
    rows += [{"prompt": f"{i}", "completion": EVIL} for i in range(4)]  # one is held out
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "run.toml"
    file.write_text(
        f'recipe = "sft"\nname = "r"\ndir = "{tmp_path / "r"}"\n[model]\nkind = "llama"\n'
        "vocab_size = 300\nembed_dim = 8\nnum_layers = 1\nnum_heads = 2\nmlp_dim = 8\n"
        "num_kv_heads = 2\nhead_dim = 4\nseq_len = 256\n[train]\nsteps = 1\nglobal_batch_size = 1\n"
        f'[data]\ndir = "{tmp_path / "data"}"\ntokenizer.path = "{tmp_path / "tokenizer"}"\n'
        'chat.template = "none"\nnormalize.max_bad_fraction = 0.9\n'
        f'[[data.sources]]\npath = "{tmp_path / "a.jsonl"}"\nrows = "prompt"\nname = "s"\n'
    )
    return file


def test_commands_on_data_of_others(run_file, capsys):
    for words in (["data", "show", str(run_file), "--sources"], ["prepare", str(run_file)]):
        assert main(words) == 0, capsys.readouterr().err
        shown = capsys.readouterr()
        assert not obeyed(shown.out + shown.err)
        assert words[0] == "prepare" or SHOWN in shown.out
    assert main(["data", "show", str(run_file)]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert SHOWN in shown and not obeyed(shown)


def test_errors_that_quote_others(run_file, capsys):
    text = run_file.read_text().replace("max_bad_fraction = 0.9", "max_bad_fraction = 0.0")
    run_file.write_text(text.replace('a.jsonl"', 'none\\u001b[2J.jsonl"'))
    assert main(["prepare", str(run_file)]) == 2
    shown = capsys.readouterr().err
    assert "none\\x1b[2J.jsonl" in shown and not obeyed(shown)
    run_file.write_text(text.replace('name = "s"', f"name = {json.dumps(EVIL)}"))
    assert main(["prepare", str(run_file)]) == 2
    shown = capsys.readouterr().err
    assert "\\x1b]0;owned" in shown and not obeyed(shown)


def test_tables_and_panels_of_a_run(capsys):
    from lmwright.evals.source_loss import SourceLoss
    from lmwright.evals.tables import loss_table
    from lmwright.train.display import Display

    fields = {name: 1.0 for name in SourceLoss.__dataclass_fields__} | {"source": EVIL}
    fields = {n: v for n, v in fields.items() if n != "rows_text"}
    console = Console(width=200)
    console.print(loss_table([SourceLoss(**fields)]))
    display = Display.__new__(Display)
    display._console, display._active, display._live = console, True, None
    display.evaluated(1, {EVIL: (1.0, "")})
    shown = capsys.readouterr().out
    assert shown.count("\\x1b]0;owned") == 2 and not obeyed(shown)


def test_a_model_cannot_write_to_a_terminal(monkeypatch, capsys, tmp_path):
    from lmwright.evals import prompted as module

    prompts = []

    def says(w, on_text=None):
        if on_text:
            on_text(0, EVIL)
        fields = dict.fromkeys(module.Generation.__dataclass_fields__, EVIL)
        return [module.Generation(**fields) for _ in prompts]

    monkeypatch.setattr(module, "load_model", lambda *_, **__: None)
    asked = SimpleNamespace(compute=None, texts=says)
    monkeypatch.setattr(module, "ask", lambda *_, **__: asked)
    monkeypatch.setattr(module, "_print_speed", lambda *_: None)
    monkeypatch.setattr(module, "weights_of", lambda *_: None)
    for terminal in (True, False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        for prompts in (["a\x1b"], ["a\x1b", "b"]):
            module.generate_command("x", prompts)
            shown = capsys.readouterr().out
            assert bool(obeyed(shown)) is not terminal
            assert (SHOWN in shown) is terminal and (EVIL in shown) is not terminal


def test_a_model_card_holds_no_markup_of_names():
    from markdown_it import MarkdownIt

    from lmwright.formats.card import Facts, model_card
    from lmwright.formats.open import find_model

    name = f"n\n\n# Owned\n<script>x</script> `a`; rm -rf ~ [b](http://evil.example) & {EVIL}"
    facts = Facts(
        name=name,
        origin=f"Trained {name}.",
        sources=({"source": f"s|t {name}", "tokens": 3},),
        results=({"source": name, "loss": 1.0},),
        training={"machine": name},
        settings={"optim.x": name},
    )
    proof = SimpleNamespace(lines=lambda: ["equal"], tokens=9)
    card = model_card(facts, find_model("llama-5m"), proof, "fp32", facts.name)
    assert not obeyed(card) and "\u202e" not in card
    tokens = MarkdownIt("commonmark").enable("table").parse(card.split("---\n", 2)[2])
    inline = [child for token in tokens for child in token.children or ()]
    kinds = {token.type for token in [*tokens, *inline]}
    assert not kinds & {"html_block", "html_inline", "link_open", "image"}
    assert [t.tag for t in tokens if t.type == "heading_open"].count("h1") == 1
    # every name is shown whole, and each table keeps its columns
    assert sum("<script>x</script> `a`; rm -rf ~ [b](http" in words(t) for t in tokens) == 6
    code = [c.content for c in inline if c.type == "code_inline" and "generate" in c.content]
    assert len(code) == 1 and code[0].startswith("lmwright generate 'n # Owned <script>")


def words(token):
    return "".join(child.content for child in token.children or () if child.type == "text")


@pytest.mark.parametrize("width", [30, 60, 80])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_table_of_losses_is_whole_at_any_width(width, terminal):
    """Names that differ at their end, and all digits, also in a log file or a narrow terminal."""
    names = [f"a-source-of-a-long-name-of-the-year-{year}" for year in (2023, 2024)]
    losses = [SourceLoss(name, 3.72358, 0.123, 1_124_018, 10**6, 128, 11_382) for name in names]
    compute = Compute("bf16")
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    print_losses(losses, compute, console)
    text = out.getvalue()
    assert "\u2026" not in text
    if terminal:  # cells of several lines
        assert max(map(len, text.splitlines())) <= width
    else:
        for name in names:
            [line] = [line for line in text.splitlines() if line.startswith(name)]
            assert line.split()[1:4] == ["1,124,018", "3.7236", "41.41"]
            assert line.endswith("128 of 11,382")
