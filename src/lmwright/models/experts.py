"""Experts in place of a layer's mlp: the section of a run, their weights, what they compute.

    h [B, T, D] --+--> router --> k experts of E --> sum by share --+--> [B, T, D]
                  +--> shared experts, for every token -------------+

With `latent_dim`, experts read and write latents, which two matrices make of h and back; the router
and shared experts read h itself.

Beside it a layer returns what its router did (`nn.router.router_sums`), which `penalty` makes
into losses and metrics once all layers are through.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from lmwright.config.run import NonNegative, Positive, PositiveInt, section
from lmwright.core.param import Param, Tree
from lmwright.core.stack import Aux
from lmwright.core.weight import dot
from lmwright.errors import UserError
from lmwright.models.block import feed_forward
from lmwright.nn.mlp import Mlp
from lmwright.nn.moe import TWO_INPUTS, Dispatch, ExpertMlp, mixture
from lmwright.nn.router import Routing, choose, load_balance, router_sums

ROUTER, SHARED, EXPERT = "router", "shared_", "expert_"
EXPERT_SCALE = "router_expert_scale"
"""A factor of each expert on its routing weights, in families that have one."""


@section
class Experts:
    """A mixture of experts in place of a layer's mlp."""

    num_experts: PositiveInt
    experts_per_token: PositiveInt
    mlp_dim: PositiveInt
    """Width of one expert."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns router logits into routing weights."""
    shares: Literal["chosen", "all", "near"] = "chosen"
    """`chosen` normalizes routing weights over the experts that a token chose, `all` leaves them as
    scored, `near` normalizes each over the experts left that come within `margin` of it."""
    margin: NonNegative | None = None
    """For `shares = "near"`: what logits are less by, at most, as a share of their size."""
    scale: Positive = 1.0
    """Factor on the routing weights."""
    weighed: Literal["outputs", "inputs"] = "outputs"
    """Whether routing weights multiply what experts give, or what they read."""
    num_groups: PositiveInt = 1
    """Equal groups of experts."""
    groups_per_token: PositiveInt = 1
    """Groups that a token's experts come from."""
    best_of_group: PositiveInt = 2
    """Experts of a group whose scores together are its worth: the best ones."""
    latent_dim: PositiveInt | None = None
    """Width of what the experts read and write; that of the model if unset."""
    shared_dim: PositiveInt | None = None
    """Width of the shared experts together, which see every token; none if unset."""
    shared_gate: Literal["none", "sigmoid"] = "none"
    """Whether a token says by a sigmoid how much of the shared experts it takes."""
    bias: Literal["none", "all"] = "none"
    """Whether the router and all projections of experts add a bias."""
    bias_rate: NonNegative | None = None
    """Step of a bias that balances the choice without a loss; no bias if unset."""
    balance_loss: NonNegative = 0.0
    """Weight of the load-balance loss, which is `experts_per_token` where all are equally busy."""
    z_loss: NonNegative = 0.0
    """Weight of the squared log of the router's softmax sum, which keeps its logits small."""
    capacity_factor: Positive | None = None
    """Capacity slots of an expert per row, as a multiple of an even split; tokens without a slot
    are dropped. Unset, no token is."""

    def __post_init__(self) -> None:
        refuse_more(self.experts_per_token, self.num_experts, "experts")
        if self.num_experts % self.num_groups:
            raise UserError(
                f"model.experts.num_groups: {self.num_groups} does not divide the "
                f"{self.num_experts} of model.experts.num_experts; choose one that does"
            )
        if (self.shares == "near") != (self.margin is not None):
            raise UserError(
                'model.experts.margin: goes with model.experts.shares = "near", and with nothing '
                "else; set both, or leave it out"
            )
        if self.shares == "near" and (
            self.score != "softmax" or self.num_groups > 1 or self.bias_rate is not None
        ):
            raise UserError(
                'model.experts.shares: "near" goes with softmax routing without groups and '
                "without bias_rate; leave these out"
            )
        if self.shared_gate != "none" and self.shared_dim is None:
            raise UserError(
                "model.experts.shared_gate: there are no shared experts; set "
                "model.experts.shared_dim, or leave it out"
            )
        within = self.groups_per_token * (self.num_experts // self.num_groups)
        if self.groups_per_token > self.num_groups or within < self.experts_per_token:
            raise UserError(
                f"model.experts.groups_per_token: {self.groups_per_token} of "
                f"{self.num_groups} groups cannot give {self.experts_per_token} experts; change it"
            )

    @property
    def routing(self) -> Routing:
        """Routing settings for the router."""
        return Routing(
            self.experts_per_token, self.score, self.shares, self.scale,
            self.num_groups, self.groups_per_token, self.best_of_group, self.margin,
        )  # fmt: skip

    @property
    def active_share(self) -> float:
        """Fraction of its experts that a token goes to."""
        return self.experts_per_token / self.num_experts

    def spec(self, mlp: ExpertMlp, embed_dim: int, into_stream: float) -> Tree:
        """Weights of the router, the experts and the shared experts of a layer; products into the
        residual stream are scaled by `into_stream`."""
        d, e, f = embed_dim, self.num_experts, self.mlp_dim
        inputs = ("gate", "up") if mlp in TWO_INPUTS else ("up",)
        width, scale = self.latent_dim or d, 1.0 if self.latent_dim else into_stream
        spec = {
            ROUTER: Param("embed -> experts", (d, e)),
            **{f"{EXPERT}{name}": Param("[experts] embed -> mlp", (e, width, f))
               for name in inputs},
            f"{EXPERT}down": Param("[experts] mlp -> embed", (e, f, width), std=scale * f**-0.5),
        }  # fmt: skip
        if self.latent_dim:
            spec["latent_in"] = Param("embed -> embed", (d, width))
            std = into_stream * width**-0.5
            spec["latent_out"] = Param("embed -> embed", (width, d), std=std)
        if self.bias == "all":
            spec["router_logit_bias"] = Param("experts", (e,), fill=0.0)
            each = {f"{EXPERT}{name}_bias": Param("[experts] mlp", (e, f), fill=0.0)
                    for name in inputs}  # fmt: skip
            spec |= each | {f"{EXPERT}down_bias": Param("[experts] norm", (e, width), fill=0.0)}
        if self.bias_rate is not None:
            spec["router_bias"] = Param("experts", (e,), fill=0.0, balance_rate=self.bias_rate)
        if self.shared_dim is not None:
            width = self.shared_dim
            spec |= {f"{SHARED}{name}": Param("embed -> mlp", (d, width)) for name in inputs}
            std = into_stream * width**-0.5
            spec[f"{SHARED}down"] = Param("mlp -> embed", (width, d), std=std)
            if self.shared_gate == "sigmoid":
                spec[f"{ROUTER}_shared"] = Param("embed -> gates", (d, 1))
        return spec

    def run(
        self, mlp: ExpertMlp, w: Tree, h: Array, real: Array, chunk_tokens: int | None = None,
        routed: Array | None = None,
    ) -> tuple[Array, Aux]:  # fmt: skip
        """[B, T, D] of h [B, T, D], and what the router did; `real` [B, T] is False at padding.
        Shared experts take `chunk_tokens` of each row at a time. The router reads `routed`, h if
        None."""
        bias = w.get("router_bias")
        logits = dot(
            "btd,de->bte", (h if routed is None else routed).astype(jnp.float32), w[ROUTER]
        )
        if self.bias == "all":
            logits = logits + w["router_logit_bias"].astype(jnp.float32)
        choice = choose(logits, bias, self.routing)
        dispatch, shares = Dispatch(self.num_experts, mlp, self.capacity_factor), choice.shares
        if (scale := w.get(EXPERT_SCALE)) is not None:  # by comparison, as in `choose`
            own = choice.experts[..., None] == jnp.arange(self.num_experts)
            shares = shares * jnp.sum(jnp.where(own, scale.astype(jnp.float32), 0), axis=-1)
        x = h if self.latent_dim is None else dot("btd,dl->btl", h, w["latent_in"])
        run = self._weighed_inputs if self.weighed == "inputs" else mixture
        y, dropped = run(x, choice.experts, shares, real, part(w, EXPERT), dispatch)
        if self.latent_dim is not None:
            y = dot("btl,ld->btd", y, w["latent_out"])
        if self.shared_dim is not None:
            assert mlp != "swiglu_oai"  # whose family has none
            y = y + self._shared(mlp, w, h, chunk_tokens)
        sums = router_sums(choice, logits, real, dropped, bias)
        return y, {f"{ROUTER}_{name}": value for name, value in sums.items()}

    def _weighed_inputs(
        self, x: Array, experts: Array, shares: Array, real: Array, w: Tree, dispatch: Dispatch
    ) -> tuple[Array, Array]:
        """`mixture` whose shares [B, T, k] multiply what experts read: each choice of a token is a
        token by itself."""
        b, t, k = experts.shape
        each = (x[:, :, None] * shares[..., None].astype(x.dtype)).reshape(b, t * k, -1)
        alone = experts.reshape(b, t * k, 1)
        once = jnp.ones_like(alone, shares.dtype)
        y, dropped = mixture(each, alone, once, jnp.repeat(real, k, axis=1), w, dispatch)
        return jnp.sum(y.reshape(b, t, k, -1), axis=2), jnp.sum(dropped.reshape(b, t, k), axis=2)

    def _shared(self, mlp: Mlp, w: Tree, h: Array, chunk_tokens: int | None) -> Array:
        """[B, T, D] of the shared experts."""
        y = feed_forward(mlp, part(w, SHARED), h, chunk_tokens)
        if self.shared_gate == "none":
            return y
        return y * jax.nn.sigmoid(dot("btd,de->bte", h, w[f"{ROUTER}_shared"]))

    def penalty(self, aux: Aux, prefix: str) -> tuple[Array, dict[str, tuple[Array, Array]]]:
        """Losses of `balance_loss` and `z_loss`, added to the mean loss of a token, and metrics as
        (sum, weight), from the sums over layers whose names begin with `prefix`."""
        a = part(aux, f"{prefix}_")
        balance = load_balance(a["counts"], a["probs"], a["tokens"])
        tokens = jnp.maximum(a["tokens"], 1.0)
        total = self.balance_loss * balance + self.z_loss * a["z"] / tokens
        if "balance" in a:  # adds nothing; its gradient is what moves the bias
            total = total + (a["balance"] - jax.lax.stop_gradient(a["balance"]))
        metrics = {
            "balance": (balance, jnp.ones(())),
            "z": (a["z"], tokens),
            "entropy": (a["entropy"], tokens),
            "busiest": (a["busiest"], a["layers"]),
            "dropped": (a["dropped"], jnp.sum(a["counts"])),
        }
        return total, {f"{prefix}_{name}": value for name, value in metrics.items()}


def refuse_more(chosen: int, there: int, section: str) -> None:
    """Raises UserError where a token would go to more experts than there are."""
    if chosen > there:
        raise UserError(
            f"model.{section}.experts_per_token: {chosen} of {there} experts; "
            f"at most {there} can be chosen"
        )


def part(w: Tree, prefix: str) -> Tree:
    """The weights whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): a for name, a in w.items() if name.startswith(prefix)}
