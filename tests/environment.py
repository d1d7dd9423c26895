"""Every test sees eight CPU devices; JAX reads the variables at its first import."""

import os
import sys
import tempfile

from tests.quick_compile import FLAGS

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":  # a card's programs as users have them
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} {FLAGS} --xla_force_host_platform_device_count=8"
    )
# where in Python each operation of a program stands is written into all, and read by few
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# hundreds of processes import the package: each would compile it anew
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# No answer from before, nothing left in the home. All workers share one: many tests compile the
# same small program, and those that train in a process of its own inherit it, too.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="lmwright-tests-")
    os.environ["XDG_CACHE_HOME"] = _cache.name
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(_cache.name, "compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
