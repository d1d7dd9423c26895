"""transformers as the reference: its logits of a folder or a GGUF file, where it is installed."""

import contextlib
import importlib.metadata
import importlib.util
import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from lmwright.data.json_text import parse_json
from lmwright.errors import UserError, first_line
from lmwright.formats.hf_read import is_body
from lmwright.formats.peft_config import refuse_endless
from lmwright.formats.peft_folder import PeftFolder, read_folder
from lmwright.formats.peft_names import lost_in_peft
from lmwright.formats.safetensors import some
from lmwright.models.hf import TABLES
from lmwright.models.hf.answerer import ANSWERER
from lmwright.models.hf.detector import DETECTOR
from lmwright.models.hf.embedder import EMBEDDER
from lmwright.models.text_part import MASK_DECODER

NOT_INSTALLED = "it is not installed"
IN_WHOLE = ".language_model."  # in an adapter's names of a model that holds more than text
ROOM = 1.3  # memory a model takes while it is loaded, over its weights


@dataclass(frozen=True)
class Reference:
    """Logits of transformers, or the reason why there are none."""

    logits: np.ndarray | None
    """float32 [B, T, V]; of a classifier [B, 1, K]; of an encoder without a head, the hidden states
    [B, T, D]."""
    version: str
    """Version of transformers, or the reason why there is none."""


def too_large(num_params: int, bytes_each: int = 4) -> str | None:
    """Reason why a model of `num_params` weights cannot be run here, or None."""
    needed, free = ROOM * num_params * bytes_each, psutil.virtual_memory().available
    if needed <= free:
        return None
    return f"it needs {needed / 2**30:.0f} GiB of memory and {free / 2**30:.0f} are free"


def transformers_says(
    path: Path,
    tokens: np.ndarray,
    num_params: int,
    config: Mapping[str, Any],
    adapter: Path | None = None,
) -> Reference:
    """float32 logits of int tokens [B, T]; no code that lies in the folder is run. `config` is
    the model's config.json; with an `adapter` they are PEFT's, of that folder on the model."""
    needed = ("transformers", "torch", *(("peft",) if adapter else ()))
    if not all(importlib.util.find_spec(name) for name in needed):
        return Reference(None, NOT_INSTALLED)
    if why := too_large(num_params):
        return Reference(None, why)
    is_gguf = path.is_file()
    if is_gguf and (why := _dropped(config)):
        return Reference(None, f"it drops {why} of GGUF files")
    if is_gguf and not importlib.util.find_spec("accelerate"):
        return Reference(None, "it needs accelerate to read GGUF")
    version = importlib.metadata.version("peft" if adapter else "transformers")
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its bars know no switch
            logits = _logits(path, tokens, is_gguf, adapter, config)
        return Reference(logits, version)
    except UserError as error:
        return Reference(None, str(error))
    except Exception as error:  # whatever it raises for what it does not know
        return Reference(None, f"version {version} cannot load it: {_reason(error)}")


def _reason(error: Exception) -> str:
    """First line of an error, and the next one with text where the first announces it."""
    first, rest = first_line(error), str(error).strip().splitlines()[1:]
    more = [line.strip() for line in rest if line.strip()]
    return f"{first} {more[0].rstrip('.')}" if first.endswith(":") and more else first


HEAD_KEYS = ("id2label", "label2id", "problem_type", "classifier_pooling")


def _head_of(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The config of a model in a folder with a head over documents or tokens, as far as its class
    knows the keys; none of another model."""
    import transformers

    if "id2label" not in config or config.get("architectures", [""])[0] in ANSWERER.encoders():
        return {}
    by_number = {int(i): name for i, name in config["id2label"].items()}
    head = {key: config[key] for key in HEAD_KEYS if key in config} | {"id2label": by_number}
    known = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, **head)
    return {"config": known}


def _dropped(config: Mapping[str, Any]) -> str | None:
    """Setting that transformers silently ignores when it reads a GGUF file, if any."""
    if not any(config.get("model_type") in table.gguf_types for table in TABLES.values()):
        return f"some of {config.get('model_type')}'s settings"
    if config.get("attention_bias") or config.get("mlp_bias"):
        return "the biases"
    if (config.get("rope_parameters") or {}).get("rope_type", "default") != "default":
        return "the rope scaling"
    if config.get("model_type") == "qwen3" and config["head_dim"] != 128:
        return "the head_dim"
    return None


def _logits(
    path: Path, tokens: np.ndarray, is_gguf: bool, adapter: Path | None, config: Mapping[str, Any]
) -> np.ndarray:
    import torch
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # by its name alone it takes one of that name in the current folder
    folder, file = (path.parent, {"gguf_file": str(path.absolute())}) if is_gguf else (path, {})
    if not is_gguf:
        file["use_safetensors"] = True
    if adapter is None:
        own = {"architectures": [""]} if is_gguf else parse_json(folder / "config.json")
        if MASK_DECODER in own:
            raise UserError("it has no class with an enhanced mask decoder and opens another model")
        kind = _class_for(own["architectures"][0], not is_gguf and is_body(own, folder))
    else:  # which may bring a head, or be for an encoder without one
        own = parse_json(folder / "config.json") if not is_gguf else config
        factors = read_folder(adapter)
        whole = any(IN_WHOLE in name for name in factors.modules)
        kind = _class_for((own if whole else config)["architectures"][0])
        file |= _head_of(config, folder)
    try:
        theirs = kind.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, local_files_only=True, **file
        )
        if adapter is not None:
            theirs = _adapted(theirs, adapter, factors)
        theirs.config.use_cache = False  # some hold one of other sizes
        for module in theirs.modules():  # of Nemotron-H, whose decoding has no least step
            if getattr(module, "time_step_limit", (0.0,))[0] > 0:
                module.time_step_limit = (0.0, float("inf"))
        torch.nn.Module.float(theirs)  # layers that it rounds keep the dtype of the files
        # some of its layers are compiled, for which there may be no C++ compiler
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            out = theirs.eval()(input_ids=torch.tensor(tokens, dtype=torch.long))
    finally:
        transformers.logging.set_verbosity(level)
    logits = _given(out).float().numpy()
    return logits[:, None] if logits.ndim == 2 else logits  # of whole rows


def _given(out: Any) -> Any:
    """Logits or states that a model of transformers gave: [B, T, K], or [B, K] of whole rows."""
    import torch

    if "start_logits" in out:
        return torch.stack([out.start_logits, out.end_logits], dim=-1)
    return out.logits if "logits" in out else out.last_hidden_state


def _class_for(architecture: str, body: bool = False) -> Any:
    """transformers' class for the head of a model; an empty name means a language model. Only a
    `body` has no head, of the names that a detector has, too."""
    import transformers

    if architecture in DETECTOR.encoders() and not body:
        raise UserError("it has no class with a head for replaced tokens")
    if architecture.endswith("ForSequenceClassification"):
        return transformers.AutoModelForSequenceClassification
    if architecture.endswith("ForTokenClassification"):
        return transformers.AutoModelForTokenClassification
    if architecture in ANSWERER.encoders():
        return transformers.AutoModelForQuestionAnswering
    if architecture in EMBEDDER.encoders():
        return transformers.AutoModel
    # of which a text model is a part; that of Mistral 4 stands there alone, too
    if architecture.endswith(("ForConditionalGeneration", "Mistral4ForCausalLM")):
        return transformers.AutoModelForImageTextToText
    masked = architecture.endswith("ForMaskedLM")
    return transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM


def _adapted(theirs: Any, adapter: Path, factors: PeftFolder) -> Any:
    """The model with PEFT's adapter, which holds `factors`. Raises ValueError where PEFT left some
    out, UserError where it would match the adapter's patterns without end."""
    import peft

    path = adapter / peft.utils.CONFIG_NAME
    refuse_endless(parse_json(path), [name for name, _ in theirs.named_modules()], str(path))
    if lost := lost_in_peft(factors):  # without a warning
        raise ValueError(f"it leaves factors out ({some(lost)})")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        theirs = peft.PeftModel.from_pretrained(theirs, str(adapter), torch_device="cpu")
    if left := [str(w.message) for w in warned if "adapter keys" in str(w.message)]:
        raise ValueError(f"it leaves factors out ({left[0].splitlines()[0][:200]})")
    return theirs
