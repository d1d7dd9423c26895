"""publish, with the real client: what arrives is read by others' libraries."""

import json
import re
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest

from lmwright.cli.main import main
from lmwright.formats.adapter_verbs import export_adapter_command
from lmwright.formats.load import load_model
from lmwright.formats.open import load_run
from lmwright.program.lora_section import Adapter
from tests.fake_hub import Commit
from tests.publish.conftest import TOKEN
from tests.saved_run import save_run, weights_at

APACHE = ("--license", "apache-2.0")


def publish(*words, code=0):
    """Types `lmwright publish`; the exit code is as expected."""
    assert main(["publish", *map(str, words)]) == code


def arrived_card(hub, repo, branch="main"):
    """The card that arrived, as the client loads it."""
    from huggingface_hub import ModelCard

    return ModelCard(hub.files(repo, branch)["README.md"].decode())


def cited(text):
    """The fields of a card's BibTeX entry."""
    (entry,) = re.findall(r"^@misc\{[a-z0-9-]+-20\d\d,\n(.*?)^\}$", text, re.M | re.S)
    return dict(re.findall(r"^  (\w+) = \{(.*)\},$", entry, re.M))


def test_a_run_arrives_whole(hub, run_dir, tmp_path, capsys):
    """Model, tokenizer and card are the newest checkpoint's; nothing tells where they lay."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    publish(run_dir, "me/tiny", *APACHE, "--language", "en")
    assert hub.repos["me/tiny"].private
    folder = hub.save("me/tiny", tmp_path / "got")
    model = AutoModelForCausalLM.from_pretrained(folder)
    table = weights_at(2, load_model(run_dir).model.spec())["embed"]
    np.testing.assert_array_equal(model.get_input_embeddings().weight.detach().numpy(), table)
    ids = AutoTokenizer.from_pretrained(folder)("the cat")["input_ids"]
    assert ids[0] == load_model(run_dir).prompt_prefix[0] and len(ids) > 1

    card = arrived_card(hub, "me/tiny")
    data = card.data.to_dict()
    assert data["license"] == "apache-2.0" and data["language"] == ["en"]
    assert data["datasets"] == ["acme/cats"] and "base_model" not in data
    results = {r.metric_type: r for r in card.data.eval_results}
    assert results["perplexity"].metric_value == 33.1 and results["loss"].metric_value == 3.5
    assert results["loss"].dataset_type == "acme/cats" and results["loss"].task_type
    assert "License: apache-2.0." in card.text and "not set" not in card.text
    assert 'from_pretrained("me/tiny")' in card.text and "generate hf://me/tiny -" in card.text
    fields = cited(card.text)
    assert fields["author"] == "me" and fields["url"] == "https://huggingface.co/me/tiny"
    assert fields["title"] == "tiny" and fields["note"].startswith("Trained with lmwright ")

    sent = b"".join(hub.bodies) + b"".join(hub.files("me/tiny").values())
    assert str(run_dir.parent).encode() not in sent and b"lmwright-publish-" not in sent
    shown = capsys.readouterr()
    assert "published: " in shown.out and TOKEN not in shown.out + shown.err


def test_what_is_there_and_equal_is_not_sent_again(hub, run_dir, capsys):
    publish(run_dir, "me/tiny", *APACHE)
    publish(run_dir, "me/tiny", *APACHE)
    assert "nothing was sent" in capsys.readouterr().out
    assert sum(path.startswith("PUT /blob/") for path in hub.asked) == 1
    assert len(hub.repos["me/tiny"].branches["main"]) == 2


def test_checkpoints_are_branches(hub, run_dir):
    publish(run_dir, "me/tiny", *APACHE, "--checkpoints", "all", "--revision", "best", "--public")
    repo = hub.repos["me/tiny"]
    assert set(repo.branches) == {"main", "best", "step-1", "step-2"} and not repo.private
    assert list(hub.files("me/tiny")) == [".gitattributes"]
    one, two, best = (
        hub.files("me/tiny", branch)["model.safetensors"] for branch in ("step-1", "step-2", "best")
    )
    assert one != two and two == best
    results = arrived_card(hub, "me/tiny", "step-1").data.eval_results
    assert {r.metric_type: r.metric_value for r in results} == {"loss": 3.75, "perplexity": 42.5}


def test_a_branch_has_nothing_of_another_checkpoint_before_its_own(hub, run_dir):
    """As where the command is killed before the commit; given again, it goes on."""
    publish(f"{run_dir}/checkpoints/1", "me/tiny", *APACHE)
    hub.repos["me/tiny"].branches["main"].append(Commit("by hand", hub.files("me/tiny")))
    words = (f"{run_dir}/checkpoints/2", "me/tiny", *APACHE, "--revision", "best")
    hub.refused["/commit/best"] = 403
    publish(*words, code=2)
    assert list(hub.files("me/tiny", "best")) == [".gitattributes"]
    hub.refused.clear()
    publish(*words)
    assert "model.safetensors" in hub.files("me/tiny", "best")


def test_files_of_an_earlier_split_are_removed(hub, hf_dir, tmp_path):
    from lmwright.formats.convert import export_command

    export_command(hf_dir, tmp_path / "split", max_shard_bytes=20_000)
    publish(tmp_path / "split", "me/tiny", *APACHE)
    assert "model.safetensors.index.json" in hub.files("me/tiny")
    publish(hf_dir, "me/tiny", *APACHE)
    left = [path for path in hub.files("me/tiny") if path.startswith("model")]
    assert left == ["model.safetensors"]


def test_an_adapter_names_its_base_on_the_hub(hub, lora_dir, hf_dir, tmp_path):
    """PEFT puts what arrived on the base that the card names, which was a local folder."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    publish(lora_dir, "me/adapter", *APACHE, code=2)
    assert "me/adapter" not in hub.repos
    publish(lora_dir, "me/adapter", *APACHE, "--base-model", "acme/base")
    folder = hub.save("me/adapter", tmp_path / "got")
    data = arrived_card(hub, "me/adapter").data
    assert (data.base_model, data.base_model_relation) == ("acme/base", "adapter")
    assert cited(arrived_card(hub, "me/adapter").text)["note"].endswith(", from acme/base")
    assert data.library_name == "peft" and "lora.rank | 3" in (folder / "README.md").read_text()
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "acme/base"
    assert str(lora_dir.parent.parent).encode() not in b"".join(hub.files("me/adapter").values())
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(hf_dir), folder)
    factor = dict(adapted.named_parameters())[
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    ]
    assert factor.shape[0] == 3 and float(factor.detach().abs().sum()) > 0
    assert (folder / "tokenizer.json").exists()


def test_an_adapter_whose_card_has_two_bases_names_the_first(hub, lora_dir, tmp_path):
    from lmwright.formats.adapter_verbs import export_adapter_command

    export_adapter_command(lora_dir, tmp_path / "adapter")
    bases = "base_model:\n- acme/base\n- acme/other\n"
    (tmp_path / "adapter" / "README.md").write_text(f"---\n{bases}---\nText.\n")
    publish(tmp_path / "adapter", "me/adapter", *APACHE)
    assert arrived_card(hub, "me/adapter").data.base_model == ["acme/base", "acme/other"]
    config = json.loads(hub.files("me/adapter")["adapter_config.json"])
    assert config["base_model_name_or_path"] == "acme/base"


def test_the_card_of_an_adapter_with_a_head_says_how_to_load_it(hub, lora_dir, tmp_path):
    export_adapter_command(lora_dir, tmp_path / "adapter")
    note = tmp_path / "adapter/lmwright.json"
    fields = json.loads(note.read_text()) | {"labels": ["a", "b", "c"], "pooling": "mean"}
    note.write_text(json.dumps(fields))
    publish(tmp_path / "adapter", "me/adapter", *APACHE, "--base-model", "acme/base")
    card = hub.files("me/adapter")["README.md"].decode()
    said = '("acme/base", num_labels=3, classifier_pooling="mean")'
    assert f"AutoModelForSequenceClassification.from_pretrained{said}" in card
    assert "pipeline_tag: text-classification" in card
    for removed, more, kind, task in (
        ((), {"only_pooling": True}, "AutoModelForSequenceClassification", "text-classification"),
        (("pooling",), {}, "AutoModelForTokenClassification", "token-classification"),
        (("labels",), {"length": "one"}, "AutoModel", "sentence-similarity"),
    ):
        note.write_text(json.dumps({k: v for k, v in fields.items() if k not in removed} | more))
        publish(tmp_path / "adapter", "me/adapter", *APACHE, "--base-model", "acme/base")
        card = hub.files("me/adapter")["README.md"].decode()
        assert f"{kind}.from_pretrained(" in card and f"pipeline_tag: {task}" in card
        assert "classifier_pooling" not in card


def test_several_adapters_have_folders(hub, lora_dir, hf_dir, tiny, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = load_run(lora_dir / "run.toml")
    adapters = (Adapter(name="one"), Adapter(name="two"))
    lora = replace(run.lora, adapters=adapters)
    place = save_run(replace(run, dir=str(tmp_path / "run"), lora=lora), steps=(1,))
    publish(place, "me/both", *APACHE, "--base-model", "acme/base")
    folder = hub.save("me/both", tmp_path / "got")
    base = AutoModelForCausalLM.from_pretrained(hf_dir)
    adapted = PeftModel.from_pretrained(base, folder, subfolder="two")
    assert adapted.peft_config["default"].r == 3
    card = (folder / "README.md").read_text()
    assert 'subfolder="one")' in card and 'subfolder="two")' in card
    publish(place, "me/one", *APACHE, "--base-model", "acme/base", "--adapter", "one")
    assert "adapter_config.json" in hub.files("me/one")


def test_an_adapter_folder_and_its_own_files(hub, lora_dir, tmp_path):
    export_adapter_command(lora_dir, tmp_path / "adapter")
    before = {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()}
    publish(tmp_path / "adapter", "me/adapter", *APACHE, "--base-model", "acme/base")
    assert arrived_card(hub, "me/adapter").data.base_model_relation == "adapter"
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()}


def test_an_adapter_that_peft_saved(hub, lora_dir, hf_dir, tmp_path, capsys):
    """Its card and configs name the base by its folder, those of checkpoints in it, too."""
    adapter, base = tmp_path / "adapter", str(hf_dir)
    export_adapter_command(lora_dir, adapter)
    card = (
        f"---\nbase_model: {base}\nlibrary_name: peft\ntags:\n- base_model:adapter:{base}\n- lora\n"
        f"---\n# Mine\nMade from [{base}](https://huggingface.co/{base}).\n"
    )
    (adapter / "README.md").write_text(card)
    (adapter / "checkpoint-1").mkdir()
    for name in ("README.md", "adapter_config.json"):
        (adapter / "checkpoint-1" / name).write_bytes((adapter / name).read_bytes())
    capsys.readouterr()
    publish(adapter, "me/adapter", *APACHE, code=2)
    said = capsys.readouterr().err
    assert f"{adapter}: is an adapter whose base has no name" in said and "--base-model" in said
    publish(adapter, "me/adapter", *APACHE, "--base-model", "acme/base")
    files = hub.files("me/adapter")
    assert not [name for name, text in files.items() if base.encode() in text]
    arrived = arrived_card(hub, "me/adapter")
    assert arrived.data.base_model == "acme/base"
    assert arrived.data.tags == ["base_model:adapter:acme/base", "lora"]
    assert "from [acme/base](https://huggingface.co/acme/base)." in arrived.text
    assert (adapter / "README.md").read_text() == card


def test_names_of_local_folders_are_not_sent(hub, hf_dir, tmp_path):
    """Those of the hub stay."""
    shutil.copytree(hf_dir, tmp_path / "mine")
    names = {"_name_or_path": "/srv/base", "text_config": {"_name_or_path": "acme/base"}}
    config = tmp_path / "mine" / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | names))
    card = "---\nlicense: mit\nbase_model: /srv/base\n---\n# Mine\nMade from /srv/base.\n"
    (tmp_path / "mine" / "README.md").write_text(card)
    publish(tmp_path / "mine", "me/mine")
    sent = json.loads(hub.files("me/mine")["config.json"])
    assert sent == fields | {"text_config": {"_name_or_path": "acme/base"}}
    arrived = arrived_card(hub, "me/mine")
    assert "base_model" not in arrived.data.to_dict() and "Made from base." in arrived.text
    assert json.loads(config.read_text()) == fields | names


def test_gguf_beside_a_model_and_alone(hub, hf_dir, tmp_path):
    pytest.importorskip("gguf")
    from gguf import GGUFReader

    publish(hf_dir, "me/tiny", *APACHE, "--gguf", "bf16", "--base-model", "acme/base")
    folder = hub.save("me/tiny", tmp_path / "got")
    assert len(GGUFReader(folder / "tiny-BF16.gguf").tensors) > 10
    assert arrived_card(hub, "me/tiny").data.base_model_relation == "finetune"

    publish(folder / "tiny-BF16.gguf", "me/file", *APACHE, "--base-model", "me/tiny")
    assert {"tiny-BF16.gguf", "README.md"} <= set(hub.files("me/file"))
    card = arrived_card(hub, "me/file")
    assert card.data.base_model_relation == "quantized" and "tiny-BF16.gguf" in card.text
    (tmp_path / "variants" / "more").mkdir(parents=True)
    (folder / "tiny-BF16.gguf").rename(tmp_path / "variants" / "more" / "a.gguf")
    publish(tmp_path / "variants", "me/variants", *APACHE)
    assert "more/a.gguf" in hub.files("me/variants")


def test_gguf_files_of_earlier_weights_are_removed(hub, run_dir, tmp_path):
    """The weights beside them are others."""
    pytest.importorskip("gguf")
    publish(f"{run_dir}/checkpoints/1", "me/tiny", *APACHE, "--gguf", "bf16")
    assert "tiny-BF16.gguf" in hub.files("me/tiny")
    publish(run_dir, "me/tiny", *APACHE, "--checkpoints", "2")
    for branch in ("main", "step-2"):
        assert not any(path.endswith(".gguf") for path in hub.files("me/tiny", branch))


def test_a_card_without_metadata_is_read_without_a_warning(caplog):
    from lmwright.publish.card import read_card

    card = read_card("# Mine\n", "README.md")
    assert card.text == "# Mine\n" and card.data.to_dict() == {} and not caplog.records
    assert read_card("---\nlicense: mit\n---\n# Mine\n", "README.md").data.license == "mit"


def test_the_card_of_a_folder_keeps_what_it_says(hub, hf_dir, tmp_path):
    """Its license need not be said again, unknown fields stay, hidden files do not go."""
    shutil.copytree(hf_dir, tmp_path / "mine")
    (tmp_path / "mine" / ".secret").write_text("private")
    own = "# My words\n```bibtex\n@misc{cat,\n  title = {Cats},\n  year = {1999},\n}\n```"
    text = f"---\nlicense: mit\nbase_model: acme/base\nthumbnail: cat.png\n---\n{own}\n"
    (tmp_path / "mine" / "README.md").write_text(text)
    publish(tmp_path / "mine", "me/mine")
    card = arrived_card(hub, "me/mine")
    data = card.data.to_dict()
    assert data["license"] == "mit" and data["thumbnail"] == "cat.png"
    assert data["base_model_relation"] == "finetune" and card.text.strip() == own
    assert ".secret" not in hub.files("me/mine")
    assert (tmp_path / "mine" / "README.md").read_text() == text


def test_a_dry_run_asks_nobody(hub, run_dir, capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    publish(run_dir, "me/tiny", "--dry-run", "--checkpoints", "1")
    shown = capsys.readouterr().out
    assert not hub.asked
    for part in (
        "tiny would be published as me/tiny, branch main, private", "license: missing",
        "model.safetensors", "branch step-1", 'datasets: ["acme/cats"]', "nothing was sent",
        "\nme/tiny: ",
    ):  # fmt: skip
        assert part in shown
    assert "/lmwright-" not in shown  # of the temporary folder


def test_a_license_is_asked_for_on_a_terminal(hub, hf_dir, monkeypatch):
    import click

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(click, "prompt", lambda *_, **__: "mit")
    publish(hf_dir, "me/tiny")
    assert arrived_card(hub, "me/tiny").data.license == "mit"
