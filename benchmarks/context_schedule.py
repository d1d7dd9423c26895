"""Ways to attend within rows that are cut over devices, as the TPU compiler schedules them.

    python benchmarks/context_schedule.py              # some minutes; needs libtpu
    python benchmarks/context_schedule.py --tokens 8192 --window 1024 --heads 4 2 128 --json

One row over all chips of a slice, one layer, forward and backward, by default with the heads and
the window of Gemma 2 9B. Beside the ways of `train.context_attention` there are two that are left
out of the package: a ring whose tokens stay in order, so that the last device has the most work and
the others wait for it, and a window that goes around the whole ring. Seconds are those of plan's
estimate of the compiled program; links: how long its collectives keep them busy, hidden or not.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from lmwright.hardware.slices import parse_slice, topology_request
from lmwright.planner.compiler.compile import COMPILER_ENVIRONMENT


def ring_in_order(q: Any, k: Any, v: Any, ids: Any, scoring: Any) -> Any:
    """Ring attention of https://arxiv.org/abs/2310.01889: all pairs of parts are computed."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from lmwright.core.sharding import by_shard
    from lmwright.kernels import online_softmax
    from lmwright.kernels import ring_attention as ring
    from lmwright.nn.intervals import causal

    rotated = partial(ring.rotated, ways := jax.sharding.get_abstract_mesh().shape[ring.AXIS])

    @jax.custom_vjp
    def attend(q: Any, k: Any, v: Any, seen: Any) -> Any:
        return forward(q, k, v, seen)[0]

    def forward(q: Any, k: Any, v: Any, seen: Any) -> Any:
        rank, size = lax.axis_index(ring.AXIS), k.shape[1]
        queries = (q * scoring.scale, seen)

        def step(carry: Any, turn: Any) -> Any:
            kv, sums = carry
            keys = (*kv, (rank - turn) % ways * size)
            return (rotated(kv), online_softmax.softmax_sums(scoring, queries, keys, sums)), None

        none = online_softmax.no_sums(q.shape)
        (_, sums), _ = lax.scan(step, ((k, v), none), jnp.arange(ways))
        out, log_sums = online_softmax.finished(sums, q.dtype)
        return out, (q, k, v, seen, out, log_sums)

    def backward(residuals: Any, g: Any) -> Any:
        q, k, v, seen, out, log_sums = residuals
        rank, size = lax.axis_index(ring.AXIS), k.shape[1]
        queries = (q, g, online_softmax.along(out, g), log_sums, seen)

        def step(carry: Any, turn: Any) -> Any:
            kv, dq, dkv = carry
            keys = (*kv, (rank - turn) % ways * size)
            new_dq, *new = online_softmax.pair_gradients(scoring, queries, keys)
            dkv = [a + b for a, b in zip(dkv, new, strict=True)]
            return (rotated(kv), dq + new_dq, rotated(dkv)), None

        wide = partial(jnp.zeros_like, dtype=jnp.float32)
        start = ((k, v), wide(q), [wide(k), wide(v)])
        (_, dq, (dk, dv)), _ = lax.scan(step, start, jnp.arange(ways))
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None

    attend.defvjp(forward, backward)

    def local(q: Any, k: Any, v: Any, ids: Any) -> Any:
        b, t, n, h = q.shape
        grouped = jnp.moveaxis(q.reshape(b, t, k.shape[2], -1, h), 1, 3)
        row = causal(lax.all_gather(ids, ring.AXIS, axis=1, tiled=True))
        start = lax.axis_index(ring.AXIS) * t
        seen = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, t, 1), row)
        return jnp.moveaxis(attend(grouped, k, v, seen), 3, 1).reshape(b, t, n, h)

    return by_shard(local)(q, k, v, ids)


def ways_of(window: int, device_kind: str) -> dict[str, tuple[Callable[..., Any], int | None]]:
    """Name -> (attention, window)."""
    from lmwright.core.compute import Compute
    from lmwright.kernels import ring_attention, select

    def by(choice: Any) -> Callable[..., Any]:
        kernels = select.kernels_for("tpu", 8, device_kind)
        return select.causal_attention(Compute(kernels=kernels, context_attention=choice))

    return {
        "ring, in order": (ring_in_order, None),
        "ring": (by("ring"), None),
        "all_to_all": (by("all_to_all"), None),
        "window around a ring": (ring_attention.causal_attention, window),
        "window, ring": (by("ring"), window),
        "window, all_to_all": (by("all_to_all"), window),
    }


def compile_all(asked: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Name -> seconds, seconds of the links, collectives by kind."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    from lmwright.core.sharding import AXES, make_mesh
    from lmwright.nn.attention import Scoring
    from lmwright.planner.compiler.cost import EXPOSED, estimate
    from lmwright.planner.compiler.hlo import parse

    where = parse_slice(asked["slice"])
    devices = topologies.get_topology_desc(**topology_request(where)).devices
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"context": len(devices)}, devices)
    place = NamedSharding(mesh, PartitionSpec(None, "context"))
    kind, (heads, kv_heads, size) = devices[0].device_kind, asked["heads"]

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct((1, asked["tokens"], *shape), dtype, sharding=place)

    arrays = (array(heads, size), array(kv_heads, size), array(kv_heads, size))
    found = {}
    with jax.set_mesh(mesh):
        for name, (attend, window) in ways_of(asked["window"], kind).items():
            if asked["only"] and name not in asked["only"]:
                continue
            scoring = Scoring(size**-0.5, window, 50.0)

            def loss(q: Any, k: Any, v: Any, ids: Any, attend=attend, scoring=scoring) -> Any:
                return jnp.sum(attend(q, k, v, ids, scoring).astype(jnp.float32) ** 2)

            step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
            text = step.lower(*arrays, array(dtype=jnp.int32)).compile().as_text()
            cost = estimate(parse(text), where)
            links = cost.hidden_s + cost.by_kind.get(EXPOSED, 0.0)
            found[name] = {
                "step_s": cost.step_s, "links_s": links, "matmul_flops": cost.matmul_flops,
                **cost.collectives,
            }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--slice", default="v5e-8")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--heads", type=int, nargs=3, default=[16, 8, 256])
    parser.add_argument("--only", nargs="+", help="of the rows, by name")
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(compile_all(json.loads(asked.child))))
        return
    what = {name: value for name, value in vars(asked).items() if name not in ("child", "json")}
    command = [sys.executable, __file__, "--child", json.dumps(what)]
    env = os.environ | COMPILER_ENVIRONMENT
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    if asked.json:
        print(done.stdout.splitlines()[-1])
        return
    print("                          ms   links ms   collective-permute   all-to-all")
    for name, one in json.loads(done.stdout.splitlines()[-1]).items():
        counts = [int(one.get(kind, 0)) for kind in ("collective-permute", "all-to-all")]
        times = [1000 * one["step_s"], 1000 * one["links_s"]]
        print(f"{name:<20} {times[0]:8.2f} {times[1]:10.2f} {counts[0]:20} {counts[1]:12}")


if __name__ == "__main__":
    main()
