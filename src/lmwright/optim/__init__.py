"""Optimizers and learning-rate schedules; this module does not import jax.

    optim section --build_optimizer(optim, spec, steps)--> optax.GradientTransformation
                  --make_schedule(optim, steps)----------> step -> learning rate

`KINDS` is what a run file may name; `lmwright.optim.build` makes them.
"""

from lmwright.optim.kinds import Adafactor, Adam8bit, AdamW, Lion, Muon

KINDS = {
    "adamw": AdamW,
    "adam8bit": Adam8bit,
    "adafactor": Adafactor,
    "lion": Lion,
    "muon": Muon,
}
