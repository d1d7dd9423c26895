"""Writes a run directory as training leaves it, for the tests of the report."""

import json
import math

RUN = """\
name = "{name}"
dir = "runs/{name}"

[model]
kind = "llama"
embed_dim = {embed_dim}

[optim]
kind = "adamw"
learning_rate = {learning_rate}

[train]
steps = 60
global_batch_size = 4

[data]
dir = "prepared"

[[data.sources]]
path = "https://me:pw@example.org/books.txt?sig=abc"
"""


def write_run(
    folder,
    *,
    name="tiny",
    embed_dim=96,
    learning_rate=3e-4,
    sample="once upon",
    prompt="def main(",
    source="wiki",
    seconds_per_step=2.0,
    stopped_s=5000.0,
    steps=60,
):
    """60 steps logged one by one, evaluated each 20, stopped and resumed at 30."""
    folder.mkdir(parents=True)
    text = RUN.format(name=name, embed_dim=embed_dim, learning_rate=learning_rate)
    (folder / "run.toml").write_text(text)
    (folder / "plan.json").write_text(json.dumps({"num_params": 1234567, "mesh": {"fsdp": 1}}))
    env = {"packages": {"lmwright": "0.1.0"}, "device_kind": "TPU v4", "device_count": 16}
    (folder / "env.json").write_text(json.dumps(env))
    lines, now = [], 1.79e9

    def add(step, kind, **fields):
        lines.append({"step": step, "time": now, "kind": kind, **fields})

    for step in range(1, steps + 1):
        now += seconds_per_step
        loss = 2 + 6 * math.exp(-step / 12) + 0.1 * math.sin(step * 7)
        add(step, "train", loss=loss, learning_rate=learning_rate, tokens_seen=2048.0 * step)
        lines[-1] |= {"tokens_per_s": 900.0 + step, "step_time_p50_s": 2.25}
        lines[-1] |= {"step_time_p95_s": 2.5, "input_wait_share": 0.01, "grad_norm": 1 / step}
        if step % 20 == 0:
            for each, more in ((source, 0.1), ("code", 0.5)):
                scores = {"loss": loss + more, "ppl": math.exp(loss + more), "tokens": 99}
                add(step, "eval", source=each, **scores, bits_per_byte=loss / 3)
            add(step, "sample", prompt=prompt, text=f"{sample} {step}")
        if step == 30:
            add(step, "checkpoint", blocked_s=0.25)
            now += stopped_s
            add(step, "resume")
    content = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(content)
    return folder
