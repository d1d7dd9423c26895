"""One MLIR context for the lowering of many programs of a thread.

JAX makes one for each program, and loading the dialects into it takes longer than lowering a small
program does.
"""

import sys
import threading
from functools import wraps

USES = 30
"""Programs that one context sees: it keeps their constants until it goes."""


def share_context():
    """Lets JAX lower in the context that it made before."""
    mlir = sys.modules.get("jax._src.interpreters.mlir")
    if mlir is not None and not hasattr(mlir.make_ir_context, "kept"):
        mlir.make_ir_context = remembering(mlir.make_ir_context)


def remembering(make):
    """`make` whose context serves several times."""
    kept = threading.local()

    @wraps(make)
    def shared(*choices):
        if choices:
            return make(*choices)
        if getattr(kept, "left", 0) == 0:
            kept.context, kept.left = make(), USES
        kept.left -= 1
        return kept.context

    shared.kept = kept
    return shared
