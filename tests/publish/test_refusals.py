"""What cannot be published: one sentence with the cure, exit code 2, before any export."""

import contextlib
import errno
import os
import shutil
import subprocess
import tempfile
from dataclasses import replace

import pytest

from lmwright.cli.main import main
from lmwright.config.run import Tokenizer
from lmwright.errors import UserError
from lmwright.formats.places import being_written
from lmwright.models import KINDS
from lmwright.models.experts import Experts
from lmwright.program.lora_section import LowRank
from lmwright.program.qat_section import Qat
from lmwright.publish import command
from lmwright.publish.account import check_branch
from tests.fake_hub import Commit
from tests.publish.conftest import TOKEN
from tests.saved_run import save_run

APACHE = ("--license", "apache-2.0")


def refused(capsys, *words):
    """The one line that ends `lmwright publish` with exit code 2."""
    assert main(["publish", *map(str, words)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and TOKEN not in lines[0]
    return lines[0]


@pytest.fixture(autouse=True)
def no_export(monkeypatch):
    """An export would come too early."""
    from lmwright.publish import stage

    def fail(*_, **__):
        raise AssertionError("exported before everything was checked")

    monkeypatch.setattr(stage, "export_loaded", fail)


def test_options(hub, run_dir, hf_dir, tmp_path, capsys):
    for words, part in (
        ((run_dir, "me/tiny"), "has no license yet; add --license apache-2.0"),
        ((run_dir, "me/tiny", "--license", "apache"), "did you mean 'apache-2.0'?"),
        ((run_dir, "me/tiny", "--license", "mine"), "--license other --license-name"),
        ((run_dir, "me/tiny", "--license", "other"), "needs --license-name"),
        ((run_dir, "tiny", *APACHE), "is not a name on the hub"),
        ((run_dir, "me/ti ny", *APACHE), "is not a name on the hub"),
        ((run_dir, *APACHE), "add owner/name"),
        ((run_dir, "me/tiny", *APACHE, "--checkpoints", "1,7"), "no checkpoint '7'"),
        ((run_dir, "me/tiny", *APACHE, "--base-model", "../base"), "--base-model: '../base'"),
        ((hf_dir, "me/tiny", *APACHE, "--checkpoints", "all"), "is not a run directory"),
        ((run_dir, "me/tiny", *APACHE, "--adapter", "a"), "has no 'a'; there are: none"),
        ((run_dir / "checkpoints" / "7", "me/tiny", *APACHE), "no such checkpoint"),
        ((hf_dir, "me/tiny", *APACHE, "--dtype", "bf16"), "is sent as it is"),
        ((run_dir, "me/tiny", *APACHE, "--revision", "a b"), "--revision: 'a b' is not a name"),
        ((tmp_path, "me/tiny", *APACHE), "holds neither run.toml nor config.json"),
        (("hf://acme/tiny", "me/tiny", *APACHE), "is on the hub already"),
    ):
        assert part in refused(capsys, *words), words
    assert not hub.asked


def test_names_of_branches_are_those_of_git():
    if not (git := shutil.which("git")):
        pytest.skip("git is not installed")
    good = ["v1.0", "a/b", "a@b", "a-b", "@x", "x.locks", "a|b", "\u00e9"]
    bad = "a..b a. .a a/.b a//b /a a/ a.lock a.lock/b a@{b HEAD -a a~b a^b a:b a?b a*b a[b".split()
    for name in (*good, *bad, "", "a b", "a\\b", "a\tb", "a\x7fb"):
        words = (git, "check-ref-format", "--branch", name)
        taken = subprocess.run(words, capture_output=True).returncode == 0
        assert taken == (name in good), name
        with contextlib.nullcontext() if taken else pytest.raises(UserError):
            check_branch(name)


SIZES = {
    "vocab_size": 320, "embed_dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 4, "seq_len": 48,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "mlp_dim": 24, "bias": "all"}
NO_FOLDER = {
    "qat": (LowRank(rank=3, base="bf16"), {"qat": Qat(weights="int8")}, "lmwright export, which"),
    "bitnet": (
        LowRank(rank=3),
        {"model": KINDS["bitnet"](**SIZES, mlp_dim=24)},
        "export the run itself",
    ),
    "gpt-oss": (
        LowRank(rank=3, targets=("experts",), variant="dora"),
        {"model": KINDS["gpt-oss"](**SIZES, experts=Experts(**EXPERTS))},
        "PEFT has no DoRA for the experts of gpt-oss",
    ),
}


@pytest.mark.parametrize("name", NO_FOLDER)
def test_adapters_without_a_folder_of_peft(name, hub, tiny, hf_dir, tmp_path, capsys):
    """No name of a base is asked for, no repository is made."""
    lora, fields, says = NO_FOLDER[name]
    start = {"init_from": str(hf_dir)} if name == "qat" else {}
    data = replace(tiny.data, tokenizer=Tokenizer(path=str(hf_dir)))
    train = replace(tiny.train, **start)
    run = replace(tiny, dir=str(tmp_path / "run"), data=data, train=train, lora=lora, **fields)
    assert says in refused(capsys, save_run(run), "me/tiny", *APACHE)
    assert not hub.repos


def test_tokens(hub, run_dir, capsys, monkeypatch):
    words = (run_dir, "me/tiny", *APACHE)
    hub.role = "read"
    assert "may only read; make one that may write" in refused(capsys, *words)
    monkeypatch.setenv("HF_TOKEN", "hf_wrongsecret")
    line = refused(capsys, *words)
    assert "does not accept the token; make a new one" in line and "wrongsecret" not in line
    monkeypatch.delenv("HF_TOKEN")
    assert "no token for the hub" in refused(capsys, *words)
    assert not hub.repos


def test_rights(hub, run_dir, capsys):
    assert "take one of me, team" in refused(capsys, run_dir, "acme/tiny", *APACHE)
    hub.refused = {"/api/repos/create": 403}
    assert "may not write there" in refused(capsys, run_dir, "me/tiny", *APACHE)
    hub.refused = {"/auth-check/write": 403}
    assert "may not write there" in refused(capsys, run_dir, "me/tiny", *APACHE)
    hub.refused = {"whoami": 500}
    assert "publish again later" in refused(capsys, run_dir, "me/tiny", *APACHE)


def test_nobody_answers(hub, run_dir, capsys, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be reached" in refused(capsys, run_dir, "me/tiny", *APACHE)


def test_a_public_repository_is_not_filled_unasked(hub, hf_dir, capsys):
    assert main(["publish", str(hf_dir), "me/tiny", *APACHE, "--public"]) == 0
    capsys.readouterr()
    assert "is public already; say --public" in refused(capsys, hf_dir, "me/tiny", *APACHE)


def test_commits_of_others_stay(hub, hf_dir, capsys):
    """Both those before and those between the look and the commit."""
    words = ("publish", str(hf_dir), "me/tiny", *APACHE)
    assert main(words) == 0
    main_branch = hub.repos["me/tiny"].branches["main"]
    main_branch.append(Commit("Update README.md", {"README.md": b"# Mine"}))
    capsys.readouterr()
    assert "was last changed by 'Update README.md'" in refused(capsys, *words[1:])
    assert main([*words, "--overwrite"]) == 0
    capsys.readouterr()
    assert b"apache-2.0" in hub.files("me/tiny")["README.md"]

    def meanwhile(repo):
        repo.branches["main"].append(Commit("Another", {"README.md": b"# Theirs"}))

    hub.before_commit = meanwhile
    assert "someone else changed it meanwhile" in refused(capsys, *words[1:], "--language", "en")
    assert hub.files("me/tiny") == {"README.md": b"# Theirs"}


def test_a_file_with_the_token_stays_here(hub, hf_dir, tmp_path, capsys):
    shutil.copytree(hf_dir, tmp_path / "mine")
    (tmp_path / "mine" / "notes.txt").write_text(f"export HF_TOKEN={TOKEN}")
    assert "notes.txt: holds your token" in refused(capsys, tmp_path / "mine", "me/tiny", *APACHE)


@pytest.mark.parametrize("at", ["weights", "card"])
def test_a_full_temporary_disk_is_told_by_its_own_name(at, hub, run_dir, capsys, monkeypatch):
    """The folder in it, which is gone by then, is of no use to the user, nor is another OUT."""

    def full(_subject, folder, _step):
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "README.md"))
        if at == "card":
            raise error
        with being_written(folder, ".tmp"):
            raise error

    monkeypatch.setattr(command, "stage", full)
    told = refused(capsys, run_dir, "me/tiny", *APACHE)
    assert (
        f"error: {tempfile.gettempdir()}: the files to publish cannot be written there (No " in told
    )
    assert (
        "; free some space, or set TMPDIR to a folder with more" in told and "lmwright-" not in told
    )


def test_the_client_is_missing(hub, hf_dir, capsys, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "needs huggingface_hub; run" in refused(capsys, hf_dir, "me/tiny", *APACHE)
