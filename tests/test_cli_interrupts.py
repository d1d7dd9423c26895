"""Interrupts while a command begins: in imports, in schemas, and where Python drops them."""

import signal
import threading
import time

import pytest

from lmwright.cli import interrupt
from lmwright.cli.main import main


def test_an_interrupt_that_python_drops_comes_again(capsys):
    class Collected:
        def __del__(self):  # as jax's callback of the collector
            signal.raise_signal(signal.SIGINT)
            time.sleep(0)

    assert main(["--version"]) == 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    with pytest.raises(KeyboardInterrupt):
        Collected()
        time.sleep(10)
    signal.signal(signal.SIGINT, before)
    assert "Traceback" not in capsys.readouterr().err


def test_an_interrupted_import_is_an_interrupt(monkeypatch, capsys):
    def loaded(*_, **__):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ImportError("initialization failed") from error

    monkeypatch.setattr("lmwright.formats.open.load_noted", loaded)
    assert main(["prepare", "run.toml"]) == 130
    assert "interrupted" in capsys.readouterr().err
    monkeypatch.setattr("lmwright.formats.open.load_noted", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["prepare", "run.toml"])


def test_a_schema_that_was_interrupted_is_an_interrupt(monkeypatch, capsys):
    """Its builder, in Rust, makes one text of all errors."""
    from pydantic_core import SchemaError

    def built(*_, **__):
        raise SchemaError("Error building `literal` serializer:\n  KeyboardInterrupt:")

    monkeypatch.setattr("lmwright.formats.open.load_noted", built)
    monkeypatch.setattr(interrupt, "_noted", threading.Event())
    with pytest.raises(SchemaError):
        main(["prepare", "run.toml"])
    interrupt._noted.set()
    assert main(["prepare", "run.toml"]) == 130
    assert "interrupted" in capsys.readouterr().err
