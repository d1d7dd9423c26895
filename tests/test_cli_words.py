"""Words that a shell completes, and those that are missing or wrong."""

import os

import click
import pytest

from lmwright.cli.main import lmwright, main


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("lmwright pla", "plain,plan"),
        ("lmwright adapters me", "plain,merge"),
        ("lmwright plan run.toml --sea", "plain,--search"),
        ("lmwright train runs/m", "file,runs/m"),
        ("lmwright export model ou", "file,ou"),
    ],
)
def test_shells_complete_verbs_options_and_files(words, found, monkeypatch, capsys):
    monkeypatch.setenv("_LMWRIGHT_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out.splitlines() == [found]


def verbs_with_arguments(group=lmwright, before=()):
    """Words of every verb that needs an argument."""
    for name, verb in group.commands.items():
        if isinstance(verb, click.Group):
            yield from verbs_with_arguments(verb, (*before, name))
        elif any(isinstance(p, click.Argument) and p.required for p in verb.params):
            yield (*before, name)


def test_a_verb_without_its_argument_is_told(capsys):
    verbs = list(verbs_with_arguments())
    assert ("train",) in verbs and ("jobs", "show") in verbs
    for words in verbs:
        assert main(list(words)) == 2
        assert "Missing argument" in capsys.readouterr().err


def test_a_type_of_llama_cpp_says_where_it_is_made(capsys):
    """`--dtype Q4_K_M`: what is there, and how to get the other."""
    assert main(["export", "model", "out.gguf", "--dtype", "Q4_K_M"]) == 2
    said = capsys.readouterr().err
    assert "'Q4_K_M' is not one of bf16, fp16, fp32, q8_0" in said
    assert "`lmwright quantize MODEL FILE.gguf --to q4_k_m` writes it" in said
    assert main(["export", "model", "out.gguf", "--dtype", "q3_k_m"]) == 2
    assert "llama-quantize" in capsys.readouterr().err
    assert main(["export", "model", "out", "--dtype", "float"]) == 2
    assert "llama-quantize" not in capsys.readouterr().err
    assert main(["import", "x.gguf", "out", "--dtype", "Q8_0"]) == 2
    assert "`lmwright export MODEL FILE.gguf --dtype q8_0` writes it (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("train mine.toml --steps 4", "--steps is not an option; fields of the run are set"),
        ("train mine.toml --rehears", "Did you mean '--rehearse'? (see lmwright train --help)"),
        ("plan a.toml --hours 9h", "'9h' is not a number. (see lmwright plan --help)"),
        ("eval a --max-rows 1.5", "'1.5' is not a whole number. (see lmwright eval --help)"),
        ("verify a b --steps 4", "No such option '--steps'. (see lmwright verify --help)"),
        ("generate run hello", "(hello); a prompt is given as --prompt TEXT (see"),
        ("init texts mine.toml", "comes first: lmwright init mine.toml texts"),
        ("train mine", "mine: no such run file; did you mean mine.toml?"),
        ("config show mine.tml", "mine.tml: no such run file; did you mean mine.toml?"),
        ("train other.toml", "other.toml: no such run file; check the path"),
        ("generate runs/mine --prompt hi", "; train it first, or give a run directory, a Hugging"),
        ("params owner/Model-1B", "for a model from the hub, write hf://owner/Model-1B"),
    ],
)
def test_first_mistakes_are_told_with_their_cure(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('name = "mine"\n')
    (tmp_path / "texts").mkdir()
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1


@pytest.mark.parametrize("words", [["export", "run", "out"], ["config", "show", "/run.toml"]])
def test_a_folder_that_was_deleted_is_told(words, tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(words) == 2
    assert "the folder in which this command runs was deleted; go to" in capsys.readouterr().err


def test_a_folder_whose_name_is_not_utf8_is_refused(tmp_path, monkeypatch, capsys):
    """Libraries that are written in Rust or C end with a traceback there."""
    folder = os.fsencode(tmp_path) + b"/caf\xe9"  # of a disk that was written in Latin-1
    os.mkdir(folder)
    monkeypatch.chdir(os.fsdecode(folder))
    for words in (["prepare", "run.toml"], ["train", "run.toml"], ["quickstart"]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "caf\\udce9', has a name that is not UTF-8; rename" in said
    assert not os.listdir(folder)


def test_an_override_that_is_not_utf8_is_told(tmp_path, capsys):
    """As Python holds the bytes of a command line that are none; the run file was blamed."""
    path = tmp_path / "run.toml"
    path.write_text('recipe = "quickstart"\nname = "a"\ndir = "runs/a"\ndata.dir = "data"\n')
    for value in ("a\udcff", "['a\udcff']"):
        assert main(["config", "show", str(path), f"name={value}"]) == 2
        told = capsys.readouterr().err
        assert (
            told
            == f"lmwright: error: command line: name: {value!r} is not UTF-8 text; correct it\n"
        )
