"""Updates against torch, optax and papers written down in numpy, over 20 steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from lmwright.core.param import Param, map_params, walk
from lmwright.optim.build import build_optimizer, clip, gradient_norm
from lmwright.optim.kinds import AdamW, Constant, Group
from lmwright.optim.muon import is_hidden
from lmwright.optim.other_kinds import Adafactor, Lion, Muon, StableAdamW

STEPS = 20


def run(optim, spec, weights, gradients, steps=STEPS):
    tx = build_optimizer(optim, spec, steps)
    update = jax.jit(tx.update)
    state = tx.init(weights)
    for step in range(steps):
        updates, state = update(gradients(step), state, weights)
        weights = optax.apply_updates(weights, updates)
    return {path: np.asarray(w) for path, w in walk(weights)}


def run_torch(make, weights, gradients, steps=STEPS):
    """`make(parameters)` gives a torch optimizer; parameters are {path: Parameter}."""
    ps = {path: torch.nn.Parameter(torch.tensor(np.asarray(w))) for path, w in walk(weights)}
    optimizer = make(ps)
    for step in range(steps):
        for path, g in walk(gradients(step)):
            ps[path].grad = torch.tensor(g)
        optimizer.step()
    return {path: p.detach().numpy() for path, p in ps.items()}


def assert_close(got, want, atol):
    assert got.keys() == want.keys()
    for path in want:
        np.testing.assert_allclose(got[path], want[path], atol=atol, rtol=0, err_msg=path)


def test_adamw_is_torch(spec, weights, gradients):
    decays = {path: p.is_matrix for path, p in walk(spec)}
    said = dict(lr=1e-2, betas=(0.85, 0.93), eps=1e-7)

    def make(ps):
        groups = [
            {"params": [p for path, p in ps.items() if decays[path]], "weight_decay": 0.3},
            {"params": [p for path, p in ps.items() if not decays[path]], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, **said)

    optim = AdamW(
        learning_rate=1e-2, beta1=0.85, beta2=0.93, eps=1e-7, weight_decay=0.3, schedule=Constant()
    )
    got = run(optim, spec, weights, gradients)
    assert_close(got, run_torch(make, weights, gradients), atol=1e-6)


def test_groups_are_those_of_torch(spec, weights, gradients):
    """The last pattern that fits a weight says its rate, decay included; 0 freezes it."""
    rates = {"layers.*": 0.25, "embed": 0.0, "layers.q": 0.5}

    def make(ps):
        lr = {path: 2.5e-3 if path.startswith("layers.") else 1e-2 for path in ps}
        lr |= {"embed": 0.0, "layers.q": 5e-3}
        decay = {path: 0.3 * p.is_matrix for path, p in walk(spec)}
        groups = [{"params": [p], "lr": lr[n], "weight_decay": decay[n]} for n, p in ps.items()]
        return torch.optim.AdamW(groups, betas=(0.85, 0.93), eps=1e-7)

    groups = tuple(Group(weights=weights, rate=rate) for weights, rate in rates.items())
    optim = AdamW(
        learning_rate=1e-2, beta1=0.85, beta2=0.93, eps=1e-7, weight_decay=0.3,
        schedule=Constant(), groups=groups,
    )  # fmt: skip
    got = run(optim, spec, weights, gradients)
    assert_close(got, run_torch(make, weights, gradients), atol=1e-6)
    np.testing.assert_array_equal(got["embed"], dict(walk(weights))["embed"])


def test_adamw_is_optax_under_a_schedule(spec, weights, gradients):
    optim = AdamW(learning_rate=1e-2, beta1=0.0)  # cosine
    tx = optax.adamw(
        optax.cosine_decay_schedule(1e-2, STEPS, alpha=0.1),
        b1=0.0,
        b2=0.95,
        weight_decay=0.1,
        mask=map_params(lambda p: p.is_matrix, spec),
    )
    want, state = weights, tx.init(weights)
    for step in range(STEPS):
        updates, state = tx.update(gradients(step), state, want)
        want = optax.apply_updates(want, updates)
    got = run(optim, spec, weights, gradients)
    assert_close(got, {p: np.asarray(w) for p, w in walk(want)}, atol=2e-6)


def test_lion_is_its_paper(spec, weights, gradients):
    optim = Lion(learning_rate=1e-3, beta1=0.8, beta2=0.95, weight_decay=0.5, schedule=Constant())
    decays = {path: 0.5 * p.is_matrix for path, p in walk(spec)}
    want = {path: np.asarray(w, "float64") for path, w in walk(weights)}
    mean = {path: np.zeros_like(w) for path, w in want.items()}
    for step in range(STEPS):
        for path, g in walk(gradients(step)):
            mix = 0.8 * mean[path] + 0.2 * g
            want[path] = want[path] - 1e-3 * (np.sign(mix) + decays[path] * want[path])
            mean[path] = 0.95 * mean[path] + 0.05 * g
    assert_close(run(optim, spec, weights, gradients), want, atol=1e-6)


@pytest.mark.parametrize("until", [1.0, 0.5])
def test_stable_adamw_is_its_paper(spec, weights, gradients, until):
    """Its betas are corrected, not its moments; each matrix of a stack is a tensor of its own."""
    beta1, beta2, eps, rate, decay = 0.85, 0.7, 1e-6, 1e-2, 0.3
    optim = StableAdamW(
        learning_rate=rate, beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay,
        schedule=Constant(), weight_decay_until=until,
    )  # fmt: skip
    want = {path: np.asarray(w, "float64") for path, w in unstacked(spec, weights).items()}
    m, v = ({path: np.zeros_like(w) for path, w in want.items()} for _ in range(2))
    decays = {p: decay * dict(walk(spec))[p.split("#")[0]].is_matrix for p in want}
    greatest = 0.0
    for t in range(1, STEPS + 1):
        b1, b2 = (b * (1 - b ** (t - 1)) / (1 - b**t) for b in (beta1, beta2))
        for path, g in unstacked(spec, gradients(t - 1)).items():
            m[path] = b1 * m[path] + (1 - b1) * g
            v[path] = b2 * v[path] + (1 - b2) * g**2
            rms = np.sqrt(np.mean(g**2 / np.maximum(v[path], eps**2)))
            greatest = max(greatest, rms)
            own = rate / max(1, rms)
            decays_now = decays[path] * (t - 1 < until * STEPS)
            step = m[path] / (np.sqrt(v[path]) + eps) + decays_now * want[path]
            want[path] = want[path] - own * step
    assert greatest > 1.1
    found = run(optim, spec, weights, gradients)
    assert_close(unstacked(spec, nested(spec, found)), want, atol=2e-6)


def members(param, array):
    """The single matrices of a stack, as two-dimensional views; a vector each if no matrix."""
    flat = np.asarray(array).reshape(-1, *param.shape[len(param.batch) :])
    return [m.reshape(param.matrix_shape) if param.is_matrix else m for m in flat]


def unstacked(spec, tree):
    """{"path#i": matrix} for each member of each stack."""
    arrays = dict(walk(tree))
    return {
        f"{path}#{i}": member
        for path, param in walk(spec)
        for i, member in enumerate(members(param, arrays[path]))
    }


def nested(spec, flat):
    """Dotted paths back to a tree with the structure of `spec`."""
    tree = {}
    for path, _ in walk(spec):
        *above, name = path.split(".")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[name] = flat[path]
    return tree


def by_members(spec, weights, gradients, make, steps=STEPS):
    """torch on every member of every stack by itself: {"path#i": matrix}."""
    return run_torch(
        make, unstacked(spec, weights), lambda step: unstacked(spec, gradients(step)), steps
    )


def test_adafactor_is_torch_on_every_matrix_of_a_stack(spec, weights, gradients):
    """torch also caps the rate at 1/sqrt(t), which 0.01 stays under, and clamps with epsilon
    where the paper adds it. It factors the last two axes; several inputs or outputs are
    one axis here, while ours keeps them apart, so only matrices of one input and output
    axis are the same algorithm for it."""
    plain = {p for p, s in walk(spec) if not s.is_matrix or len(s.inputs + s.outputs) == 2}
    decay = {path: 0.2 * p.is_matrix for path, p in walk(spec)}

    def make(ps):
        groups = [{"params": [p], "weight_decay": decay[n.split("#")[0]]} for n, p in ps.items()]
        return torch.optim.Adafactor(groups, lr=0.01, eps=(1e-30, 1e-3))

    optim = Adafactor(learning_rate=0.01, weight_decay=0.2, schedule=Constant())
    got = run(optim, spec, weights, gradients)
    want = by_members(spec, weights, gradients, make)
    got = unstacked(spec, nested(spec, got))
    assert len(plain) == 6
    keep = [n for n in want if n.split("#")[0] in plain]
    assert_close({n: got[n] for n in keep}, {n: want[n] for n in keep}, atol=2e-6)


@pytest.mark.parametrize("size", [{"step_size": "absolute"}, {"min_weight_rms": 2.0}])
def test_adafactor_of_several_axes_in_numpy(size):
    rng = np.random.default_rng(0)
    param = Param("heads head_dim -> embed", (3, 5, 7))
    w = rng.normal(size=(3, 5, 7)).astype("float32")
    gs = rng.normal(size=(6, 3, 5, 7)).astype("float32")
    optim = Adafactor(
        learning_rate=0.1, weight_decay=0.0, schedule=Constant(), decay_exponent=0.6,
        update_rms=0.7, **size,
    )  # fmt: skip
    got = run(optim, {"o": param}, {"o": jnp.asarray(w)}, lambda i: {"o": gs[i]}, 6)["o"]
    row, col = np.zeros(15), np.zeros(7)
    want = w.astype("float64").reshape(15, 7)
    for t, g in enumerate(gs.astype("float64").reshape(6, 15, 7), 1):
        beta = 1 - t**-0.6
        row = beta * row + (1 - beta) * (g**2).mean(1)
        col = beta * col + (1 - beta) * (g**2).mean(0)
        u = g / np.sqrt(np.outer(row, col) / row.mean())
        step = u / max(1, np.sqrt((u**2).mean()) / 0.7)
        want -= 0.1 * step * (max(2.0, np.sqrt((want**2).mean())) if "step_size" not in size else 1)
    np.testing.assert_allclose(got.reshape(15, 7), want, atol=2e-6)


@pytest.mark.parametrize("form, scale, turns", [("nesterov", "rms", 5), ("plain", "width", 3)])
def test_muon_is_torch_on_every_matrix_of_a_stack(
    spec, weights, gradients, form, scale, turns, monkeypatch
):
    """torch iterates in bf16, where two orders of summing differ; here it is made fp32."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    hidden = {path for path, p in walk(spec) if is_hidden(p)}
    assert hidden == {"layers.q", "layers.o", "layers.up", "layers.down"}
    assert not is_hidden(Param("distances -> embed", (7, 4)))  # a table, as that of the vocabulary

    def transposed(tree):  # torch's first dimension is the output
        return {name: m.T if m.ndim == 2 else m for name, m in tree.items()}

    def make(ps):
        muon = [p for n, p in ps.items() if n.split("#")[0] in hidden]
        return torch.optim.Muon(
            muon,
            lr=1e-2,
            momentum=0.9,
            weight_decay=0.3,
            nesterov=form == "nesterov",
            adjust_lr_fn="match_rms_adamw" if scale == "rms" else "original",
            ns_steps=turns,
        )

    want = run_torch(
        make,
        transposed(unstacked(spec, weights)),
        lambda step: transposed(unstacked(spec, gradients(step))),
        steps=6,
    )
    optim = Muon(
        learning_rate=1e-2,
        momentum=0.9,
        weight_decay=0.3,
        momentum_form=form,
        scale=scale,
        newton_schulz_steps=turns,
        precision="fp32",
        schedule=Constant(),
    )
    got = run(optim, spec, weights, gradients, steps=6)
    # what Muon leaves alone is AdamW to the bit
    adamw = AdamW(learning_rate=1e-2, weight_decay=0.3, schedule=Constant())
    rest = run(adamw, spec, weights, gradients, steps=6)
    for path in set(got) - hidden:
        np.testing.assert_allclose(got[path], rest[path], atol=1e-7)
    got = unstacked(spec, nested(spec, got))
    keep = [n for n in want if n.split("#")[0] in hidden]
    assert_close({n: got[n] for n in keep}, {n: want[n].T for n in keep}, atol=2e-5)


def test_muon_in_bf16_stays_near_fp32_and_rates_differ_by_the_ratio(spec, weights, gradients):
    def change(**said):
        new = run(
            Muon(learning_rate=1e-2, weight_decay=0, schedule=Constant(), **said),
            spec,
            weights,
            gradients,
            steps=1,
        )
        return {path: new[path] - np.asarray(w) for path, w in walk(weights)}

    exact, rough = change(precision="fp32"), change(precision="bf16")
    for path in ("layers.q", "layers.down"):
        error = np.linalg.norm(rough[path] - exact[path]) / np.linalg.norm(exact[path])
        assert 0 < error < 0.1, path  # five steps, each multiplying small errors by up to 3.4
    half = change(precision="fp32", adamw_rate_ratio=0.5)
    np.testing.assert_allclose(half["embed"], exact["embed"] / 2, atol=1e-6)
    np.testing.assert_allclose(half["layers.q"], exact["layers.q"], atol=1e-7)


def test_muon_in_bf16_is_as_near_to_float64_as_torch():
    def exact(x):
        a, b, c = 3.4445, -4.7750, 2.0315
        x = x / np.linalg.norm(x)
        for _ in range(5):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x

    def of_torch(x):
        w = torch.nn.Parameter(torch.zeros(x.shape))
        w.grad = torch.tensor(x)
        options = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
        torch.optim.Muon([w], lr=1.0, adjust_lr_fn="original", **options).step()
        return -w.detach().numpy()

    errors = []
    for seed, shape in enumerate([(64, 64), (64, 256), (128, 320), (32, 48), (48, 192)]):
        x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
        param = Param("embed -> mlp", shape)
        optim = Muon(
            learning_rate=1.0, momentum=0.0, momentum_form="plain", scale="width",
            weight_decay=0.0, precision="bf16", schedule=Constant(),
        )  # fmt: skip
        moved = run(optim, {"w": param}, {"w": jnp.zeros(shape)}, lambda i, x=x: {"w": x}, 1)["w"]
        moved = -moved / max(1, shape[1] / shape[0]) ** 0.5
        want = exact(x.astype(np.float64))
        errors.append([np.linalg.norm(got - want) for got in (moved, of_torch(x))])
        assert errors[-1][0] / np.linalg.norm(want) < 1.7e-2
    ours, theirs = np.sum(errors, axis=0)
    assert ours < 1.1 * theirs


@pytest.mark.filterwarnings("error::DeprecationWarning")
@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e3])
def test_clip_is_torch(spec, gradients, factor):
    grads = jax.tree.map(lambda g: jnp.asarray(g * factor), gradients(0))
    ps = []
    for _, g in walk(grads):
        ps.append(torch.nn.Parameter(torch.zeros(g.shape)))
        ps[-1].grad = torch.tensor(np.asarray(g))
    norm = torch.nn.utils.clip_grad_norm_(ps, 0.7)
    ours = gradient_norm(grads, spec)
    np.testing.assert_allclose(ours, norm.numpy(), rtol=1e-5)
    got = clip(grads, ours, 0.7)
    for p, (path, g) in zip(ps, walk(got), strict=True):
        np.testing.assert_allclose(g, p.grad.numpy(), rtol=1e-5, err_msg=path)
    assert clip(grads, jnp.float32(1e9), None) is grads


def test_the_norm_leaves_out_what_only_carries_counts():
    bias = Param("experts", (4,), fill=0.0, balance_rate=0.1)
    spec = {"w": Param("embed -> mlp", (2, 3)), "bias": bias}
    grads = {"w": jnp.full((2, 3), 2.0), "bias": jnp.full((4,), 1e6)}
    np.testing.assert_allclose(gradient_norm(grads, spec), np.sqrt(6 * 2.0**2), rtol=1e-6)
