"""The work of a decoder, derived from its Params."""

from functools import lru_cache

from lmwright.core.contract import Attention, Work
from lmwright.core.param import Param, walk
from lmwright.models.decoder import Decoder


@lru_cache(256)
def work_of(model: Decoder, seq_len: int) -> Work:
    """Work of a token in a row of `seq_len`; with an untied head the embedding is only looked
    up."""
    spec = model.spec()
    active = {path: active_share(model, path, param) for path, param in walk(spec)}
    if model.head == "untied":
        active["embed"] = 0.0
    return Work(
        spec=spec,
        seq_len=seq_len,
        num_layers=model.num_layers,
        embed_dim=model.embed_dim,
        vocab_size=model.vocab_size,
        active=active,
        attention=Attention(
            model.windows, model.num_heads, model.num_kv_heads, model.head_dim, model.both_ways
        ),
        soft_capped=model.logits_soft_cap is not None,
        normed=frozenset((*model.normed_branches, *("qk" if model.qk_norm != "none" else ""))),
    )


def active_share(model: Decoder, path: str, param: Param) -> float:
    """Fraction of a weight that each token meets: all of it, of experts the chosen ones."""
    if "experts" not in param.batch:
        return 1.0
    own = path.rpartition(".")[2].startswith("reasoning_")
    return model.mixtures["reasoning" if own else "router"].active_share
