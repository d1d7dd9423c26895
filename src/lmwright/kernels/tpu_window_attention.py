"""`window_attention.attend` for TPUs: JAX's splash kernel, with more keys than queries."""

from jax import Array

from lmwright.kernels import window_attention
from lmwright.kernels.tpu_attention import fits
from lmwright.kernels.tpu_splash import splash_attention
from lmwright.nn.attention import Scoring


def attend(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    scoring: Scoring,
    *,
    early: bool = False,
    interpret: bool = False,
) -> Array:
    """Attention through a near window, as `window_attention.attend`; it also takes what does not
    divide into blocks. `early` and `interpret` as in `tpu_attention.causal_attention`."""
    t = q.shape[1]
    if not (fits(t, early) and fits(k.shape[1], early)):
        return window_attention.attend(q, k, v, segment_ids, scoring)
    ids = segment_ids[:, -t:], segment_ids
    return splash_attention(q, k, v, *ids, scoring, early=early, interpret=interpret)
