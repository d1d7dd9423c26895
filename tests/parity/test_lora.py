"""Fifty steps of LoRA beside PEFT and torch: same base, rows, order, start and settings."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.config.run import Data, Run, Train
from lmwright.core.contract import Batch
from lmwright.formats.train_state import init_state
from lmwright.formats.weights import load_frozen
from lmwright.models.llama import Llama
from lmwright.objectives.clm import Clm
from lmwright.optim import KINDS
from lmwright.optim.kinds import Linear
from lmwright.program.lora_section import LowRank
from lmwright.program.plan import resolve
from lmwright.program.step import make_step

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

MODEL = Llama(
    vocab_size=101, embed_dim=24, mlp_dim=40, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=10, seq_len=18, rope_theta=5000.0,
)  # fmt: skip
STEPS, ROWS, RATE, DECAY, CLIP, RATIO = 50, 4, 2e-2, 0.05, 0.3, 3.0
NAMES = ["q_proj", "v_proj", "down_proj"]


def torch_losses(model, tokens, folder, said):
    """Losses of PEFT with torch's AdamW; the base and the fresh adapter are left in `folder`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = model.hf.config(model)
    del config["architectures"]
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.save_pretrained(folder / "base")
    lora = peft.LoraConfig(target_modules=NAMES, r=5, lora_alpha=9, task_type="CAUSAL_LM", **said)
    model = peft.get_peft_model(model, lora)
    model.save_pretrained(folder / "start")
    groups = [
        {"params": [p for n, p in model.named_parameters() if key in n], **rate}
        for key, rate in {
            "lora_A": {"lr": RATE}, "lora_B": {"lr": RATE * RATIO},
            "lora_magnitude": {"lr": RATE, "weight_decay": 0.0},
            "norm.modules_to_save": {"lr": RATE, "weight_decay": 0.0},
            "embed_tokens.modules_to_save": {"lr": RATE},
            "lm_head.modules_to_save": {"lr": RATE},
        }.items()
    ]  # fmt: skip
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], betas=(0.9, 0.95), weight_decay=DECAY
    )
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 - k / STEPS)
    losses = []
    for rows in torch.tensor(tokens):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        falling.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return np.array(losses)


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ({}, {}),
        ({"use_dora": True, "use_rslora": True}, {"variant": "dora", "scaling": "sqrt-rank"}),
        (
            {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
            {"whole": ("embed",)},
        ),
        (
            {"modules_to_save": ["embed_tokens", "lm_head", "model.norm"]},
            {"whole": ("embed_tokens", "lm_head", "norm")},
        ),
    ],
    ids=["lora", "dora, rslora", "table", "table, head and norm"],
)
def test_fifty_steps_follow_peft(theirs, ours, tmp_path, record_property):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 20, (STEPS, ROWS, MODEL.seq_len))  # few ids: there is much to learn
    model = replace(MODEL, head="untied" if len(ours.get("whole", ())) > 1 else MODEL.head)
    expected = torch_losses(model, tokens, tmp_path, theirs)
    run = Run(
        name="x", dir="x", model=model, objective=Clm(), data=Data(dir="x"),
        optim=KINDS["adamw"](
            learning_rate=RATE, schedule=Linear(), weight_decay=DECAY, clip_norm=CLIP
        ),
        lora=LowRank(
            base="fp32", targets=tuple(NAMES), rank=5, alpha=9.0, b_rate_ratio=RATIO,
            init_from=str(tmp_path / "start"), **ours,
        ),
        train=Train(
            steps=STEPS, global_batch_size=ROWS, precision="fp32",
            init_from=str(tmp_path / "base"),
        ),
    )  # fmt: skip
    plan = resolve(run, jax.devices()[:1])
    with jax.set_mesh(plan.mesh):
        step, losses = make_step(plan), []
        state = init_state(plan, load_frozen(plan))
        for rows in tokens:
            shape = (1, *rows.shape)
            batch = Batch(
                tokens=jnp.asarray(rows[None], jnp.int32),
                segment_ids=jnp.ones(shape, jnp.int32),
                positions=jnp.broadcast_to(jnp.arange(shape[2], dtype=jnp.int32), shape),
                loss_weight=jnp.ones(shape, jnp.float32),
            )
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    difference = float(np.abs(np.array(losses) - expected).max())
    record_property("largest difference of loss", float(difference))
    print(f"largest difference of loss over {STEPS} steps: {difference:.2e}")
    assert difference < 2e-4
    assert expected[-5:].mean() < expected[:5].mean() - 0.04
