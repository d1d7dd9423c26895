"""A small model in the form in which gpt-oss is released: its experts in four bits."""

import json

import numpy as np
from safetensors.numpy import save_file

CONFIG = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "sliding_window": 7,
    "num_local_experts": 3, "num_experts_per_tok": 2, "max_position_embeddings": 8192,
    "pad_token_id": 0,
}  # fmt: skip
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]}


def write_released(folder, num_layers=2):
    """A folder with random codes and scales, as the released ones; biases and sinks are not
    zero."""
    import torch
    import transformers

    dice = np.random.default_rng(1)
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**CONFIG, num_hidden_layers=num_layers)
    theirs = transformers.GptOssForCausalLM._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter += 0.3 * torch.randn_like(parameter)
    theirs.to(torch.bfloat16).save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    tensors = {name: a.float().numpy() for name, a in theirs.state_dict().items()}
    for layer in range(num_layers):
        at = f"model.layers.{layer}.mlp.experts."
        for name, rows, width in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            del tensors[f"{at}{name}"]
            shape = (3, rows, width // 32)
            tensors[f"{at}{name}_blocks"] = dice.integers(0, 256, (*shape, 16), dtype=np.uint8)
            tensors[f"{at}{name}_scales"] = dice.integers(121, 127, shape, dtype=np.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"quantization_config": MXFP4}))
    return folder
