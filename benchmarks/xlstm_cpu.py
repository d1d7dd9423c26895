"""xLSTM beside transformers' class, the package of its authors, and a llama of the same size, on
this CPU.

    python benchmarks/xlstm_cpu.py --shape train           # steps of rows of 1,024 tokens
    python benchmarks/xlstm_cpu.py --shape decode --quick  # tokens behind 4,096 others

All models have 7.4 M weights. transformers trains by its chunks (`mode="train"`) and decodes with
its cache. The package, xlstm 2.0.6 and mlstm_kernels, runs with its plain torch kernels; where
it is installed transformers uses it too, so it stays in an environment of its own:

    --python torch-package-eager-fp32=OTHER_ENVIRONMENT/bin/python

Run as `contestants.py` says.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
from contestants import Step, compete, lmwright_steps, torch_steps

SHARED = dict(vocab_size=8192, embed_dim=256, num_layers=4, seq_len=8192, head="untied")
MODELS = {
    "xlstm": SHARED | dict(mlp_dim=704, num_heads=4, key_dim=32, head_dim=64),
    "llama": SHARED | dict(mlp_dim=704, num_heads=4, num_kv_heads=4, head_dim=64),
}
ROWS, SEQ_LEN, CONTEXT, NEW = 2, 1024, 4096, 16
PACKAGE = "torch-package-eager-fp32"
TORCH = ("torch-xlstm-eager-fp32", "torch-llama-eager-fp32")
CONTESTANTS = ("lmwright-xlstm-fp32", "lmwright-llama-fp32", *TORCH, PACKAGE)


def model_of(kind: str) -> Any:
    """Our model of that kind."""
    from lmwright.models import KINDS

    return KINDS[kind](**MODELS[kind])


def rows_of(length: int, count: int = ROWS) -> np.ndarray:
    """Random tokens, [count, length]."""
    return np.random.default_rng(0).integers(0, 8192, (count, length), dtype=np.int32)


def lmwright_step(shape: str, kind: str, precision: str) -> Step:
    """A step of training, or NEW tokens after CONTEXT others."""
    if shape == "decode":
        return lmwright_decoding(model_of(kind))
    from lmwright.config.run import Data, Run, Train
    from lmwright.objectives.clm import Clm
    from lmwright.optim import KINDS

    run = Run(
        name="benchmark", dir="unused", model=model_of(kind), objective=Clm(),
        optim=KINDS["adamw"](learning_rate=1e-4, clip_norm=1.0), data=Data(dir="unused"),
        train=Train(steps=10_000, global_batch_size=ROWS, precision=precision),
    )  # fmt: skip
    tokens = rows_of(SEQ_LEN)
    ones, places = np.ones_like(tokens), np.arange(SEQ_LEN, dtype=np.int32)
    return lmwright_steps(
        run, tokens=tokens, segment_ids=ones, loss_weight=ones.astype(np.float32),
        positions=np.broadcast_to(places, tokens.shape),
    )  # fmt: skip


def lmwright_decoding(model: Any) -> Step:
    """NEW tokens for one row, as `generate` writes them; each time from the same state."""
    import jax
    import jax.numpy as jnp

    from lmwright.core.param import init_weights
    from lmwright.evals.compute import decode_compute
    from lmwright.models import cached

    w = init_weights(model.spec(), jax.random.key(0))
    compute = decode_compute(model, w, CONTEXT)
    w = cached.layers_apart(model, w) if compute.unroll else w
    tokens = jnp.asarray(rows_of(CONTEXT, 1))
    start = cached.new_cache(model, 1, CONTEXT + NEW, compute)
    fill = jax.jit(
        lambda w, cache: cached.extend(
            model, w, tokens, tokens >= 0, cache, compute, empty_cache=True
        )
    )
    _, filled = fill(w, start)

    @jax.jit
    def write(w: Any, cache: Any) -> Any:
        def one(carry: Any, _: Any) -> Any:
            token, cache = carry
            hidden, cache = cached.extend(model, w, token, token >= 0, cache, compute)
            return (jnp.argmax(model.logits(w, hidden), axis=-1), cache), None

        return jax.lax.scan(one, (tokens[:, -1:], cache), length=NEW)[0][0]

    def one() -> float:
        return float(write(w, filled)[0, 0])

    return one


def torch_step(shape: str, kind: str, mode: str, precision: str) -> Step:
    """The same in torch."""
    import torch

    torch.manual_seed(0)
    if kind == "package":
        return package_step(shape, mode, precision)
    import transformers

    model = model_of(kind)
    said = model.hf.config(model)
    if kind == "xlstm" and shape == "train":
        said |= {"mode": "train", "use_cache": False}
    cls = getattr(transformers, said["architectures"][0])
    theirs = cls(cls.config_class(**said))
    if shape == "train":
        ids = torch.from_numpy(rows_of(SEQ_LEN).astype(np.int64))
        return torch_steps(theirs, mode, precision, {"input_ids": ids, "labels": ids}, lr=1e-4)
    ids = torch.from_numpy(rows_of(CONTEXT, 1).astype(np.int64))
    name = "cache_params" if kind == "xlstm" else "past_key_values"
    with torch.no_grad():
        cache = getattr(theirs.eval()(input_ids=ids, use_cache=True), name)

    def one() -> float:
        token = ids[:, -1:]
        with torch.no_grad():
            for _ in range(NEW):
                out = theirs(input_ids=token, use_cache=True, **{name: cache})
                token = out.logits[:, -1:].argmax(-1)
        return float(token[0, 0])

    return one


def package_step(shape: str, mode: str, precision: str) -> Step:
    """The same by the package's class."""
    import torch
    from xlstm.xlstm_large.model import xLSTMLarge, xLSTMLargeConfig

    said = MODELS["xlstm"]
    config = xLSTMLargeConfig(
        embedding_dim=said["embed_dim"], num_heads=said["num_heads"],
        num_blocks=said["num_layers"], vocab_size=said["vocab_size"],
        mode="train" if shape == "train" else "inference", return_last_states=True,
        chunkwise_kernel="chunkwise--native_autograd", step_kernel="native",
        sequence_kernel="native_sequence__native", autocast_kernel_dtype="float32",
    )  # fmt: skip
    model = xLSTMLarge(config)
    if shape == "train":

        class WithLoss(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self, ids):
                logits = self.model(ids)[0][:, :-1].flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
                return SimpleNamespace(loss=loss)

        ids = torch.from_numpy(rows_of(SEQ_LEN).astype(np.int64))
        return torch_steps(WithLoss(), mode, precision, {"ids": ids}, lr=1e-4)
    ids = torch.from_numpy(rows_of(CONTEXT, 1).astype(np.int64))
    with torch.no_grad():
        _, filled = model.eval()(ids)

    def one() -> float:
        token, state = ids[:, -1:], filled
        with torch.no_grad():
            for _ in range(NEW):
                logits, state = model(token, state)
                token = logits[:, -1:].argmax(-1)
        return float(token[0, 0])

    return one


if __name__ == "__main__":
    compete(
        __doc__.split("\n")[0], {"train": (2, ROWS * SEQ_LEN), "decode": (4, NEW)},
        CONTESTANTS, CONTESTANTS[:3], lmwright=lmwright_step, torch=torch_step, apart=(PACKAGE,),
    )  # fmt: skip
