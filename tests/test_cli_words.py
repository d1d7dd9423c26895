"""Words that a shell completes, and those that are missing."""

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
