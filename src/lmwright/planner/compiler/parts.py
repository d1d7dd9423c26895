"""Parts: which part of the model an instruction of the compiled program belongs to.

The program keeps, for most instructions, the stack of our functions that made them (a table at
its top) and the einsum of a product. Both are read; nothing in a model says names for it.

    stack_frame_id --> _qkv (models/llama.py) > rms_norm (nn/norm.py)        --> norm
    op_name        --> .../btd,df->btf/dot_general                           --> mlp
"""

import re
from dataclasses import dataclass

from lmwright.planner.compiler.hlo import Instruction

# folder or file of lmwright (or optax), to part; the innermost frame that is listed wins
PLACES = {
    "nn/norm.py": "norm",
    "nn/layer_norm.py": "norm",
    "nn/rope.py": "attention",
    "nn/attention.py": "attention",
    "nn/intervals.py": "attention",
    "kernels/interval_attention.py": "attention",
    "kernels/disentangled_attention.py": "attention",
    "kernels/tpu_attention.py": "attention",
    "kernels/tpu_disentangled.py": "attention",
    "nn/disentangled.py": "attention",
    "kernels/tpu_interval_attention.py": "attention",
    "kernels/sink_attention.py": "attention",
    "kernels/halves.py": "attention",
    "kernels/tpu_row_intervals.py": "attention",
    "kernels/tpu_splash.py": "attention",
    "kernels/tpu_row_attention.py": "attention",
    "kernels/tpu_long_attention.py": "attention",
    "kernels/tpu_spans.py": "attention",
    "nn/delta_rule.py": "memories",
    "kernels/delta_rule_by.py": "memories",
    "kernels/tpu_delta_rule.py": "memories",
    "nn/ssd.py": "memories",
    "kernels/ssd_by.py": "memories",
    "kernels/tpu_ssd.py": "memories",
    "kernels/tpu_chunks.py": "memories",
    "nn/mlstm.py": "memories",
    "kernels/mlstm_marks.py": "memories",
    "kernels/tpu_mlstm.py": "memories",
    "nn/mlp.py": "mlp",
    "nn/swiglu_oai.py": "experts",
    "nn/moe.py": "experts",
    "nn/exchange.py": "experts",
    "nn/router.py": "experts",
    "core/ragged.py": "experts",
    "nn/xent.py": "head and loss",
    "core/stack.py": "layers",
    "objectives/": "head and loss",
    "optim/": "optimizer",
    "optax/": "optimizer",
}
FUNCTIONS = {
    "lookup": "embedding",
    "hidden": "layers",
    "clip": "optimizer",
    "apply_updates": "optimizer",
    "rope_tables": "attention",
}
LETTERS = {"v": "head and loss", "f": "mlp", "h": "attention"}
"""Letter of an einsum (v vocab, f mlp, h head_dim) that only one part has in its products."""

_EINSUM = re.compile(r"(?:^|/)([a-z]+(?:,[a-z]+)+->[a-z]*)(?:/|$)")
_TABLE = re.compile(r"^(\d+) (.*)$")
_NUMBERS = re.compile(r"(\w+)=(\d+)")
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")

OTHER = "other"


@dataclass(frozen=True)
class Frames:
    """The stack frames of a program: id to (file, function), innermost first."""

    stacks: dict[int, tuple[tuple[str, str], ...]]


def read_frames(text: str) -> Frames:
    """The table of stack frames at the top of a module's text; empty where there is none."""
    tables: dict[str, dict[int, str]] = {}
    current = None
    for line in text[: max(0, text.find("\nENTRY "))].splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            current = tables.setdefault(line, {})
        elif current is not None and (match := _TABLE.match(line)):
            current[int(match[1])] = match[2]
        elif line.startswith("%"):
            break
    names = {k: v.strip('"') for k, v in tables.get("FileNames", {}).items()}
    functions = {k: v.strip('"') for k, v in tables.get("FunctionNames", {}).items()}
    places = {}
    for key, value in tables.get("FileLocations", {}).items():
        ids = {name: int(number) for name, number in _NUMBERS.findall(value)}
        places[key] = (names[ids["file_name_id"]], functions[ids["function_name_id"]])
    stacks: dict[int, tuple[tuple[str, str], ...]] = {}
    for key, value in sorted(tables.get("StackFrames", {}).items()):
        ids = {name: int(number) for name, number in _NUMBERS.findall(value)}
        parent = stacks.get(ids.get("parent_frame_id", 0) - 1, ())  # counted from one; zero: none
        stacks[key] = (places[ids["file_location_id"]], *parent)
    return Frames(stacks)


def part_of(step: Instruction, frames: Frames) -> str:
    """The part of the model; `other` where the compiler did not keep where it comes from."""
    op_name = step.op_name
    if einsum := _EINSUM.findall(op_name):
        for letter, part in LETTERS.items():
            if letter in einsum[-1]:
                return part
    frame = _FRAME_ID.search(step.rest)
    for file, function in frames.stacks.get(int(frame[1]), ()) if frame else ():
        name = function.rpartition(".")[2] if not function.endswith(">") else function
        if name in FUNCTIONS:
            return FUNCTIONS[name]
        for place, part in PLACES.items():
            if f"/{place}" in file:
                return part
    return OTHER
