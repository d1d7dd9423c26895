"""`lmwright adapters merge` gives what PEFT computes from the same base and folder, however the
factors began; what cannot be found again is refused by name."""

import json
import time

import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.formats import reference
from lmwright.formats.load import load_model

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

IDS = torch.tensor(np.random.default_rng(0).integers(0, 97, (2, 11)))
NAMES = ["q_proj", "o_proj", "up_proj", "down_proj"]
PATTERNS = dict(
    r=4, lora_alpha=9, rank_pattern={"layers.1.*q_proj": 3, "mlp.up_proj": 6},
    alpha_pattern={"^model.layers.0.mlp.down_proj": 5},
)  # fmt: skip
CASES = {
    "true": dict(r=5, lora_alpha=7),
    "false": dict(r=5, lora_alpha=7, init_lora_weights=False),
    "gaussian": dict(r=5, lora_alpha=7, init_lora_weights="gaussian"),
    "orthogonal": dict(r=4, lora_alpha=7, init_lora_weights="orthogonal"),
    "eva": dict(r=4, lora_alpha=7, init_lora_weights="eva"),
    "mica": dict(r=4, lora_alpha=7, init_lora_weights="mica"),
    "pissa": dict(r=5, lora_alpha=7, init_lora_weights="pissa"),
    "pissa dora rslora": dict(
        r=3, lora_alpha=7, init_lora_weights="pissa", use_dora=True, use_rslora=True
    ),
    "pissa patterns": dict(init_lora_weights="pissa", **PATTERNS),
    "pissa of full rank": dict(r=32, lora_alpha=7, init_lora_weights="pissa"),
    "olora": dict(r=5, lora_alpha=7, init_lora_weights="olora"),
    "olora patterns rslora": dict(init_lora_weights="olora", use_rslora=True, **PATTERNS),
    "head": dict(r=4, lora_alpha=7, target_modules=["q_proj", "lm_head"]),
    "head pissa": dict(
        r=4, lora_alpha=7, target_modules=["q_proj", "lm_head"], init_lora_weights="pissa"
    ),
    "table": dict(r=4, lora_alpha=7, target_modules=["q_proj", "embed_tokens"]),
    "tied table": dict(r=4, lora_alpha=7, target_modules=["q_proj", "embed_tokens"]),
    "table and head whole": dict(r=2, lora_alpha=7, modules_to_save=["embed_tokens", "lm_head"]),
    "tied table whole": dict(r=2, lora_alpha=7, modules_to_save=["embed_tokens"]),
    "tied head whole": dict(r=2, lora_alpha=7, modules_to_save=["lm_head"]),
    "tied table and head whole": dict(
        r=2, lora_alpha=7, modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
    "norms and a product whole": dict(
        r=2, lora_alpha=7, target_modules=["q_proj"], modules_to_save=["norm", "v_proj"]
    ),
    "by regex": dict(r=4, lora_alpha=7, target_modules=r".*\.(q|v)_proj"),
    "all but a regex": dict(r=4, lora_alpha=7, exclude_modules=r".*\.1\..*(q|up)_proj"),
    "layers by regex": dict(
        r=4, lora_alpha=7, layers_to_transform=[1], layers_pattern=["lay(er|ers)"]
    ),
}

QUICK = (
    "pissa", "pissa dora rslora", "olora patterns rslora", "head", "tied table", "by regex",
    "table and head whole", "tied table whole", "norms and a product whole",
)  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    found = {}
    for tied in (False, True):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=97, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=10, tie_word_embeddings=tied,
            max_position_embeddings=64, rope_theta=5000.0, initializer_range=0.1,
        )  # fmt: skip
        found[tied] = tmp_path_factory.mktemp("base") / f"tied-{tied}"
        transformers.LlamaForCausalLM(config).save_pretrained(found[tied])
    return found


def base_model(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits.numpy()


def adapter(base, folder, noise=0.1, of=transformers.AutoModelForCausalLM, **said):
    """A PEFT folder whose factors have moved from their start."""
    config = peft.LoraConfig(**{"target_modules": list(NAMES), "task_type": "CAUSAL_LM", **said})
    model = peft.get_peft_model(of.from_pretrained(base, dtype=torch.float32).eval(), config)
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            p.data = p.data + torch.randn_like(p) * noise
    model.save_pretrained(folder)
    return logits(model)


def merged(base, folder, out, capsys):
    capsys.readouterr()  # the progress bars of whoever wrote base and folder
    code = main(["adapters", "merge", str(base), str(folder), str(out), "--dtype", "fp32"])
    said = capsys.readouterr()
    return code, said.out + said.err


def close(a, b):
    assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


@pytest.mark.parametrize(
    "case", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_merged_as_peft_computes_it(case, bases, tmp_path, capsys):
    base = bases[case.startswith("tied")]
    trained = adapter(base, tmp_path / "a", **CASES[case])
    theirs = logits(peft.PeftModel.from_pretrained(base_model(base), tmp_path / "a"))
    close(theirs, trained)
    assert np.abs(theirs - logits(base_model(base))).max() > 0.05 * np.abs(theirs).max()
    code, said = merged(base, tmp_path / "a", tmp_path / "m", capsys)
    assert code == 0, said
    close(logits(base_model(tmp_path / "m")), theirs)
    assert f"the adapter in PEFT {peft.__version__}: logits differ by at most" in said
    proof = json.loads((tmp_path / "m" / "convert.json").read_text())
    assert proof["peft"] == peft.__version__ and proof["merged_to_peft"]["max_abs_diff"] < 1e-3


ENCODERS = {
    "modernbert": transformers.ModernBertConfig(
        vocab_size=97, hidden_size=24, intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, local_attention=8, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, initializer_range=0.1,
    ),
    "deberta": transformers.DebertaV2Config(
        vocab_size=97, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, relative_attention=True,
        position_biased_input=False, share_att_key=True, pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm", position_buckets=6, max_relative_positions=20, legacy=False,
        type_vocab_size=0, initializer_range=0.1,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name, whole, head",
    [
        ("modernbert", "tok_embeddings", "untied"),
        pytest.param("modernbert", "decoder", "untied", marks=pytest.mark.slow),
        ("deberta", "word_embeddings", "tied"),  # whose head has no table of its own
    ],
)
def test_tables_of_encoders_that_peft_trains_whole(name, whole, head, tmp_path, capsys):
    base = tmp_path / "base"
    torch.manual_seed(0)
    transformers.AutoModelForMaskedLM.from_config(ENCODERS[name]).save_pretrained(base)
    target = ["Wqkv"] if name == "modernbert" else ["query_proj"]
    said = dict(r=2, target_modules=target, modules_to_save=[whole], task_type=None)
    theirs = adapter(base, tmp_path / "a", of=transformers.AutoModelForMaskedLM, **said)
    assert merged(base, tmp_path / "a", tmp_path / "m", capsys)[0] == 0
    proof = json.loads((tmp_path / "m" / "convert.json").read_text())
    assert proof["merged_to_peft"]["max_abs_diff"] < 1e-4, proof["peft"]
    assert load_model(tmp_path / "m").model.head == head
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "m")
    close(logits(again.eval()), theirs)


@pytest.mark.parametrize("ensured", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_table_trained_whole_stays_tied_if_peft_ties_it(ensured, bases, tmp_path, capsys):
    said = dict(r=2, modules_to_save=["embed_tokens"], ensure_weight_tying=ensured)
    adapter(bases[True], tmp_path / "a", **said)
    assert merged(bases[True], tmp_path / "a", tmp_path / "m", capsys)[0] == 0
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["tie_word_embeddings"] is ensured


def test_a_table_with_new_tokens_needs_a_base_of_its_size(bases, tmp_path, capsys):
    theirs = base_model(bases[False])
    theirs.resize_token_embeddings(100)
    theirs.save_pretrained(tmp_path / "larger")
    adapter(tmp_path / "larger", tmp_path / "a", r=2, modules_to_save=["embed_tokens", "lm_head"])
    code, told = merged(bases[False], tmp_path / "a", tmp_path / "m", capsys)
    assert code == 2 and "lmwright vocab BASE OUT --size 100" in told
    words = ["vocab", str(bases[False]), str(tmp_path / "base"), "--size", "100"]
    assert main(words) == 0
    code, told = merged(tmp_path / "base", tmp_path / "a", tmp_path / "m", capsys)
    assert code == 0, told
    expected = peft.PeftModel.from_pretrained(base_model(tmp_path / "larger"), tmp_path / "a")
    close(logits(base_model(tmp_path / "m")), logits(expected))
    # as it is trained mostly, where PEFT keeps each of them three times
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=2, modules_to_save=["lm_head"]))
    for name, p in theirs.named_parameters():
        p.data += 0.1 * torch.randn_like(p) if "lora_" in name or "to_save" in name else 0
    theirs.save_pretrained(tmp_path / "b")
    code, told = merged(tmp_path / "base", tmp_path / "b", tmp_path / "n", capsys)
    assert code == 0, told
    close(logits(base_model(tmp_path / "n")), logits(theirs.eval()))


@pytest.mark.parametrize("start", ["pissa", pytest.param("olora", marks=pytest.mark.slow)])
def test_an_untrained_start_gives_the_base(start, bases, tmp_path, capsys):
    adapter(bases[False], tmp_path / "a", noise=0, r=6, lora_alpha=11, init_lora_weights=start)
    code, said = merged(bases[False], tmp_path / "a", tmp_path / "m", capsys)
    assert code == 0, said
    close(logits(base_model(tmp_path / "m")), logits(base_model(bases[False])))


def test_without_peft_the_output_says_that_it_was_not_compared(
    bases, tmp_path, capsys, monkeypatch
):
    adapter(bases[False], tmp_path / "a", r=4, lora_alpha=7)
    find = reference.importlib.util.find_spec
    monkeypatch.setattr(
        reference.importlib.util, "find_spec", lambda name: None if name == "peft" else find(name)
    )
    code, said = merged(bases[False], tmp_path / "a", tmp_path / "m", capsys)
    assert code == 0 and "the adapter in PEFT: not compared, it is not installed" in said
    proof = json.loads((tmp_path / "m" / "convert.json").read_text())
    assert proof["peft"] == "it is not installed" and proof["merged_to_peft"] is None


REFUSED = {
    "pissa_niter_4": {"init_lora_weights": "pissa_niter_4"},
    "corda": {"init_lora_weights": "corda"},
    "loftq": {"init_lora_weights": "loftq"},
    "lora_ga": {"init_lora_weights": "lora_ga"},
    "of tomorrow": {"init_lora_weights": "of tomorrow"},
    "PISSA": {"init_lora_weights": "PISSA"},
    "kasa_config": {"kasa_config": {"beta": 1e-4}},
    'bias = "lora_only" is not supported; merge with PEFT': {"bias": "lora_only"},
    "indices = [3, 5] is not supported; merge with PEFT": {"trainable_token_indices": [3, 5]},
    "tokens = [3] is not supported; use it with PEFT": {"alora_invocation_tokens": [3]},
    "use_bdlora": {"use_bdlora": {"nblocks": 2}},
    "use_something_new": {"use_something_new": True},
    "rank 4 and adapter_config.json says 5": {"r": 5},
    "r = 0 is not": {"r": 0},
    'lora_alpha = "8" is not': {"lora_alpha": "8"},
    "alpha_pattern": {"alpha_pattern": {"q_proj": None}},
    "says use_dora = true": {"use_dora": True},
    "not a regular expression": {"rank_pattern": {"q_(": 4}},
    "a pattern of 4000 letters": {"rank_pattern": {"a" * 4000: 4}},
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_would_be_another_model_is_refused_by_name(named, bases, tmp_path, capsys):
    adapter(bases[False], tmp_path / "a", r=4, lora_alpha=7)
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | REFUSED[named]))
    code, said = merged(bases[False], tmp_path / "a", tmp_path / "m", capsys)
    assert code == 2 and named in said, said
    assert said.count("\n") == 1 and not (tmp_path / "m").exists()


def test_dora_of_a_table_is_refused(bases, tmp_path, capsys):
    said = dict(r=4, target_modules=["q_proj", "embed_tokens"], use_dora=True)
    adapter(bases[False], tmp_path / "a", **said)
    code, said = merged(bases[False], tmp_path / "a", tmp_path / "m", capsys)
    assert code == 2 and "DoRA of model.embed_tokens, a table, is not supported" in said


def test_a_pattern_that_never_ends_is_refused_in_seconds(bases, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lmwright.formats.peft_config.SECONDS", 0.5)
    adapter(bases[False], tmp_path / "a", r=4, lora_alpha=7)
    path = tmp_path / "a" / "adapter_config.json"
    evil = {"rank_pattern": {r"(([\w.]+)*)*!": 4}}
    path.write_text(json.dumps(json.loads(path.read_text()) | evil))
    start = time.monotonic()
    code, said = merged(bases[False], tmp_path / "a", tmp_path / "m", capsys)
    assert code == 2 and "match module names for more than 0.5 seconds" in said
    assert time.monotonic() - start < 30


ENDLESS = r"(([\w.]+)*)*!"


@pytest.mark.parametrize(
    "said",
    [
        {"target_modules": rf".*\.q_proj|{ENDLESS}"},
        {"exclude_modules": ENDLESS},
        {"layers_to_transform": [0, 1], "layers_pattern": ["layers", ENDLESS]},
    ],
    ids=lambda said: list(said)[-1],
)
def test_a_pattern_that_never_ends_in_peft_is_not_compared(
    said, bases, tmp_path, capsys, monkeypatch
):
    """What is merged does not depend on it; PEFT itself would match it for ever."""
    monkeypatch.setattr("lmwright.formats.peft_config.SECONDS", 0.5)
    adapter(bases[False], tmp_path / "a", r=4, lora_alpha=7, target_modules=["q_proj"])
    theirs = logits(peft.PeftModel.from_pretrained(base_model(bases[False]), tmp_path / "a"))
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    start = time.monotonic()
    code, out = merged(bases[False], tmp_path / "a", tmp_path / "m", capsys)
    why = f"{path}: its patterns match module names for more than 0.5 seconds"
    assert code == 0 and f"the adapter in PEFT: not compared, {why}" in out, out
    assert time.monotonic() - start < 60
    close(logits(base_model(tmp_path / "m")), theirs)


def test_adapters_that_began_as_the_base_are_not_added_up(bases, tmp_path, capsys):
    adapter(bases[False], tmp_path / "a", r=4, lora_alpha=7, init_lora_weights="pissa")
    code = main(["adapters", "combine", str(tmp_path / "c"), str(tmp_path / "a")])
    said = capsys.readouterr().err
    assert code == 2 and "began as pissa can be added only together with their base" in said
