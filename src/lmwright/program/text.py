"""Program: the text of a lowered step, as the same source gives it in any folder.

JAX prints a step without the lines of source that made it, but a Pallas kernel is inside as
bytecode, and that has them, with the paths of their files, and the version of the format that
the runtime reads. A fingerprint is of what the kernel does alone.
"""

import base64
import hashlib
import re
from functools import cache

# JSON within a string of MLIR: a quotation mark is \22
_KERNEL = re.compile(r"(\\22body\\22: \\22)([A-Za-z0-9+/=]+)(?=\\22)")

_VERSION = "stable_mosaic.version"  # of the format; a TPU's runtime may take another than plan


def canonical(text: str) -> str:
    """The text of a lowered program with each Pallas TPU kernel as a hash of its
    instructions, source lines left out."""
    known: dict[str, str] = {}

    def hashed(match: re.Match) -> str:
        body = match[2]
        if body not in known:
            known[body] = hashlib.sha256(_kernel_text(base64.b64decode(body))).hexdigest()
        return match[1] + known[body]

    return _KERNEL.sub(hashed, text)


def fingerprint(text: str) -> str:
    """A hash of the canonical text."""
    return hashlib.sha256(canonical(text).encode()).hexdigest()[:32]


@cache
def _kernel_text(bytecode: bytes) -> bytes:
    """A kernel as text without locations; the bytecode itself where this JAX cannot read it,
    which costs a hit in another folder and never gives a wrong one."""
    try:
        from jax._src.interpreters.mlir import make_ir_context
        from jax._src.lib import tpu
        from jaxlib.mlir import ir
        from jaxlib.mlir.passmanager import PassManager

        context = make_ir_context()
        tpu.register_dialect(context)
        with context, ir.Location.unknown():
            context.allow_unregistered_dialects = True
            module = ir.Module.parse(bytecode)
            PassManager.parse("builtin.module(mosaic-serde{serialize=false})").run(module.operation)
            if _VERSION in module.operation.attributes:
                del module.operation.attributes[_VERSION]
            return module.operation.get_asm(enable_debug_info=False).encode()  # type: ignore[attr-defined]
    except Exception:  # these are JAX's own modules, which may move
        return bytecode
