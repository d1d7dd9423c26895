"""Folders of packed integers as their own package, compressed-tensors, and transformers through it
read them."""

import json

import numpy as np
import pytest

from lmwright.formats.proof import logits
from lmwright.formats.safetensors import TensorFiles

IDS = np.random.default_rng(0).integers(0, 97, (1, 9)).astype(np.int32)


def is_read_by_others(folder, model, weights, tensors):
    """Asserts that the package unpacks every packed tensor to `tensors`, to the bit, that the rest
    is stored as they are, and that transformers' logits are those of `weights`."""
    pytest.importorskip("compressed_tensors", reason="reads the folder")
    torch = pytest.importorskip("torch", reason="torch is the reference")
    transformers = pytest.importorskip("transformers")
    found = values_of(folder)
    assert set(found) == set(tensors)
    for name, value in found.items():
        np.testing.assert_array_equal(value, np.asarray(tensors[name]), err_msg=name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        there = theirs(torch.tensor(IDS, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(logits(model, weights, IDS), there, atol=1e-5 * np.abs(there).max())


def values_of(folder):
    """float32 arrays by name, each packed one unpacked by the scheme that the package makes of
    config.json."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(said)
    (scheme,) = config.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
    files, values = TensorFiles(folder), {}
    for name in files:
        module, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            parts = {
                end: torch.tensor(np.array(files[f"{module}.{end}"]))
                for end in ("weight_packed", "weight_scale", "weight_shape")
            }
            dense = compressor.decompress(parts, scheme)["weight"]
            values[f"{module}.weight"] = dense.float().numpy()
        elif kind not in ("weight_scale", "weight_shape"):
            values[name] = np.array(files[name])
    return values
