"""Checkpoints that MaxText itself trains for a step, and its logits for them.

    python tests/formats/maxtext/make.py FOLDER [CASE ...]   with maxtext 0.2.5 from PyPI, on a CPU

Each case becomes CASE.tar.xz (what `trainers.pre_train.train` saved) and CASE.npz beside this file.
"""

import subprocess
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).parent
LENGTH = 12
COMMON = {
    "hardware": "cpu", "dataset_type": "synthetic", "steps": 1, "per_device_batch_size": 1,
    "max_target_length": LENGTH, "base_emb_dim": 16, "base_num_query_heads": 4,
    "base_num_kv_heads": 2, "base_mlp_dim": 24, "base_num_decoder_layers": 2, "head_dim": 8,
    "vocab_size": 32, "dtype": "float32", "weight_dtype": "float32", "attention": "dot_product",
    "matmul_precision": "highest", "skip_jax_distributed_system": "true",
    "logits_via_embedding": "false", "decoder_block": "llama2", "learning_rate": 0.01,
    "enable_checkpointing": "true", "async_checkpointing": "false", "checkpoint_period": 1,
    "enable_goodput_recording": "false", "monitor_goodput": "false", "opt_type": "sgd",
}  # fmt: skip
GEMMA = {
    "mlp_activations": "[gelu,linear]", "logits_via_embedding": "true", "sliding_window_size": 5,
    "use_post_attn_norm": "true", "use_post_ffw_norm": "true", "normalization_layer_epsilon": 1e-6,
}  # fmt: skip
CASES = {
    "llama": {"opt_type": "adamw"},
    "llama_apart_tied": {"scan_layers": "false", "logits_via_embedding": "true"},
    "llama31": {"rope_type": "llama3.1", "rope_max_timescale": 500_000},
    "qwen2": {"decoder_block": "qwen2", "attention_bias": "true"},
    "qwen3": {"decoder_block": "qwen3", "use_qk_norm": "true"},
    "gemma2": GEMMA | {
        "decoder_block": "gemma2", "final_logits_soft_cap": 30, "attn_logits_soft_cap": 50,
    },
    "gemma3": GEMMA | {
        "model_name": "gemma3-4b", "override_model_config": "true", "use_multimodal": "false",
        "base_num_decoder_layers": 8, "decoder_block": "gemma3", "rope_linear_scaling_factor": 1,
    },
}  # fmt: skip


def arguments(name, folder, **more):
    """Command line of MaxText for a case."""
    import maxtext

    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    settings = COMMON | CASES[name] | more
    settings |= {"run_name": name, "base_output_directory": folder}
    return [str(base), *(f"{key}={value}" for key, value in settings.items())]


def train(name, folder):
    """One step, and its checkpoint."""
    command = [sys.executable, "-m", "maxtext.trainers.pre_train.train"]
    subprocess.run([*command, *arguments(name, folder)], check=True, capture_output=True)
    with tarfile.open(HERE / f"{name}.tar.xz", "w:xz") as tar:
        tar.add(Path(folder, name, "checkpoints", "0"), arcname=name)


def evaluate(name, folder):
    """Logits of MaxText's own model with these weights."""
    import jax
    import numpy as np
    from maxtext.configs import pyconfig
    from maxtext.utils import model_creation_utils

    items = Path(folder, name, "checkpoints", "0", "items")
    more = {"load_parameters_path": items, "per_device_batch_size": 2}
    config = pyconfig.initialize(["", *arguments(name, folder, **more)])
    model, mesh = model_creation_utils.from_pretrained(config), None
    if isinstance(model, tuple):
        model, mesh = model
    ids = np.random.default_rng(0).integers(0, 32, (2, LENGTH)).astype(np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids.shape)
    with mesh or jax.sharding.Mesh(jax.devices()[:1], ("x",)):
        logits = model(ids, positions, np.ones_like(ids), enable_dropout=False)
    logits = logits[0] if isinstance(logits, tuple) else logits
    np.savez(HERE / f"{name}.npz", ids=ids, logits=np.asarray(logits, np.float32))


if __name__ == "__main__":
    out, *names = sys.argv[1:]
    for each in names or CASES:
        train(each, out)
        evaluate(each, out)
        print(each, flush=True)
