"""Memory: what one device holds during a step, reckoned without a compiler.

    state          weights, optimizer, moving average: exact, from the shardings
    cast           the weights in the precision of the products, where that is another
    gradients      of the weights; with several microbatches also their sum, old and new
    saved          what the backward pass keeps of the forward pass, layer by layer
    temporaries    the larger of two moments: a chunk of logits with its gradient, or one
                   layer's backward pass

How many arrays are alive at once in the two moments is what the TPU compiler was seen to need
(`benchmarks/plan_quick.py`); it changes with the compiler.
"""

from dataclasses import dataclass

from podsmith.plan.layout import WEIGHT_BYTES, Layout, Weight

LOGITS_ALIVE = 2.5  # float32 logits, their gradient, and that in bfloat16
HEAD_ALIVE = 2  # arrays of the size of the head in float32
WIDE_ALIVE = 6  # arrays of an mlp's width in a layer's backward pass
STREAM_ALIVE = 12  # and of the residual stream's
SCORES_ALIVE = 3  # float32 [B, N, T, T] where attention has no kernel


@dataclass(frozen=True)
class Memory:
    """Bytes of one device at the peak of a step."""

    weights: float
    optimizer: float
    cast: float
    gradients: float
    saved: float
    temporaries: float

    @property
    def state(self) -> float:
        """What is there before the first step."""
        return self.weights + self.optimizer

    @property
    def peak(self) -> float:
        return self.state + self.cast + self.gradients + self.saved + self.temporaries

    def parts(self) -> dict[str, float]:
        """By what they are for, adding up to the peak."""
        return {
            "weights": self.weights,
            "optimizer": self.optimizer,
            "weights once more, cast": self.cast,
            "gradients": self.gradients,
            "saved activations": self.saved,
            "temporaries": self.temporaries,
        }


def memory(layout: Layout) -> Memory:
    """The peak of a step of this layout."""
    run = layout.run
    weights, optimizer = layout.weight_elements * WEIGHT_BYTES, layout.optimizer_bytes
    if run.train.ema_decay is not None:
        optimizer += weights
    size = layout.activation_bytes
    summed = run.train.num_microbatches > 1
    return Memory(
        weights=weights,
        optimizer=optimizer,
        cast=layout.weight_elements * size if size != WEIGHT_BYTES else 0.0,
        gradients=weights * (3 if summed else 1),
        saved=saved_bytes(layout),
        temporaries=max(logits_bytes(layout), layer_bytes(layout)),
    )


def saved_bytes(layout: Layout) -> float:
    """What the backward pass keeps, by `train.remat`; with pipeline stages, that of all
    microbatches under way."""
    remat = layout.run.train.remat
    inside = [w for w in layout.weights if w.stacked and w.is_matrix]
    kept = layout.attention_bytes if keeps_attention(layout) else 0.0
    if remat == "none":
        # in and out of two norms and two additions, in both precisions where they differ
        kept += layout.stream_bytes() * (4 + 4 * WEIGHT_BYTES / layout.activation_bytes)
        outputs = (w for w in inside if w.outputs != ("embed",))
        kept += sum(layout.output_bytes(w) * layout.share(w) for w in outputs)
        kept += layout.attention_bytes  # once more, turned around for the next product
        kept += max((layout.output_bytes(w) for w in inside if w.is_wide), default=0.0)
        kept += score_bytes(layout)
    else:
        kept += layout.stream_bytes()
    if remat in ("mlp", "gate", "dots"):
        # the block's last product is added to the stream, and not needed again
        named = (w for w in inside if "mlp" not in w.inputs)
        named = (w for w in named if not is_recomputed(layout, w))
        kept += sum(layout.output_bytes(w) * layout.share(w) for w in named)
    under_way = layout.run.train.num_microbatches if layout.stages > 1 else 1
    return layout.layers * kept * under_way


def is_recomputed(layout: Layout, weight: Weight) -> bool:
    """Whether the backward pass computes a layer's product again. The block's last product
    is not needed again."""
    remat = layout.run.train.remat
    if remat == "block":
        return "mlp" not in weight.inputs
    return weight.is_wide if remat == "mlp" else remat == "gate" and weight.is_gate


def keeps_attention(layout: Layout) -> bool:
    """Whether attention's own result outlives the forward pass: rematerialization knows it by
    the name that the kernels give it."""
    remat = layout.run.train.remat
    return remat == "none" or (remat != "block" and layout.kernels in ("cpu", "tpu"))


def score_bytes(layout: Layout) -> float:
    """Float32 scores of one layer, where attention keeps them whole."""
    if layout.kernels != "reference":
        return 0.0
    heads = layout.model.num_heads / layout.ways("batch", "seq", "heads")
    return layout.tokens * layout.seq_len * heads * 4


def logits_bytes(layout: Layout) -> float:
    """A chunk of logits and what goes with it."""
    m, train = layout.model, layout.run.train
    chunk = min(train.loss_chunk_tokens, layout.seq_len)
    ways = layout.ways("batch", "seq", "vocab")
    chunk_tokens = layout.tokens * chunk / layout.seq_len
    head = m.vocab_size * m.embed_dim / ways * WEIGHT_BYTES
    return (
        LOGITS_ALIVE * chunk_tokens * m.vocab_size / ways * 4
        + HEAD_ALIVE * head
        + 2 * layout.stream_bytes()
    )


def layer_bytes(layout: Layout) -> float:
    """One layer's backward pass: its weights gathered for two layers at once, their gradient
    before it is cut, activations and theirs."""
    inside = [w for w in layout.weights if w.stacked and w.is_matrix]
    one = layout.model.num_layers  # the mean of all layers
    gathered = sum(w.size / one / layout.product_ways(w) for w in inside)
    wide = max((layout.output_bytes(w) for w in inside if w.is_wide), default=0.0)
    return (
        gathered * (2 * layout.activation_bytes + WEIGHT_BYTES)
        + WIDE_ALIVE * wide
        + STREAM_ALIVE * layout.stream_bytes()
        + SCORES_ALIVE * score_bytes(layout)
    )
