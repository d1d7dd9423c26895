"""Optimizers and learning-rate schedules; this module does not import jax.

    optim section --build_optimizer(optim, spec, steps)--> optax.GradientTransformation
                  --make_schedule(optim, steps)----------> step -> learning rate

`KINDS` is what a run file may name; `lmwright.optim.build` makes them.
"""

from lmwright.config.registry import Registry

KINDS = Registry(
    __name__,
    {
        "adamw": "kinds.AdamW",
        "adam8bit": "kinds.Adam8bit",
        "adafactor": "other_kinds.Adafactor",
        "lion": "other_kinds.Lion",
        "muon": "other_kinds.Muon",
        "stable-adamw": "other_kinds.StableAdamW",
    },
)
