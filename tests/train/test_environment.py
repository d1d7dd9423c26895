"""env.json tells where a run ran, and no secret."""

import json
import os

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmwright.guard.redact import redact, redact_tree
from lmwright.guard.urls import redact_text
from lmwright.train.environment import write_env

letters = st.text("ABCXYZ_", max_size=8)


@given(
    letters,
    st.sampled_from(["TOKEN", "Key", "SECRET", "password", "Credential", "DB_Pass", "mysql_pwd"]),
    letters,
)
def test_variables_named_like_secrets_are_dropped(before, word, after):
    kept = redact({before + word + after: "hunter2", "XLA_FLAGS": "--xla_a=1"})
    assert kept == {"XLA_FLAGS": "--xla_a=1"}


def test_credentials_inside_urls_are_dropped():
    signed = "s3://bucket/x.parquet?X-Sig=abc&b=1"
    assert redact_text("https://me:pw@host/a/b") == "https://***@host/a/b"
    assert redact_text(f"{signed} and more") == "s3://bucket/x.parquet?b=1&*** and more"
    assert redact_text("what? user@host, 3:4") == "what? user@host, 3:4"
    tree = {"sources": [{"path": "ftp://u:p@h/x", "weight": 2.0}], "n": None}
    cleaned = {"sources": [{"path": "ftp://***@h/x", "weight": 2.0}], "n": None}
    assert redact_tree(tree) == cleaned


def test_env_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    monkeypatch.setenv("JAX_WANDB_API_KEY", "secret-by-name")
    monkeypatch.setenv("XLA_DUMP_TO", os.path.expanduser("~") + "/dump")
    monkeypatch.setenv("SOMETHING_ELSE", "not chosen")
    text = write_env(tmp_path).read_text()
    env = json.loads(text)
    assert env["packages"]["jax"] == jax.__version__
    assert (env["device_count"], env["device_kind"]) == (8, "cpu")
    assert env["variables"]["XLA_DUMP_TO"] == "~/dump"
    assert "xla_force_host_platform_device_count=8" in env["variables"]["XLA_FLAGS"]
    for secret in ("hf_secret_value", "secret-by-name", "not chosen", os.uname().nodename + '"'):
        assert secret not in text
    assert os.listdir(tmp_path) == ["env.json"]


def test_resume_on_another_machine_keeps_both(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_TEST", "first")
    write_env(tmp_path)
    again = json.loads(write_env(tmp_path).read_text())
    assert "earlier" not in again
    for value in ("second", "third"):
        monkeypatch.setenv("XLA_TEST", value)
        write_env(tmp_path)
    env = json.loads((tmp_path / "env.json").read_text())
    assert env["variables"]["XLA_TEST"] == "third"
    assert [each["variables"]["XLA_TEST"] for each in env["earlier"]] == ["first", "second"]


@pytest.mark.parametrize("text", ['{"python": ', "[" * 100_000])
def test_damaged_env_file_is_written_anew(tmp_path, text):
    (tmp_path / "env.json").write_text(text)
    assert json.loads(write_env(tmp_path).read_text())["device_count"] == 8
