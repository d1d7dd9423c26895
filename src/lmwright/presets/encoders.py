"""Presets of released encoders and masked diffusion models, with the shapes of their config.json on
the Hugging Face hub."""

from typing import Any

from lmwright.presets.rows import Shape, row, sizes


def _eurobert(shape: Shape) -> Any:
    from lmwright.models.eurobert import EuroBert

    fields = {"vocab_size": 128_256, "seq_len": 8192, "rope_theta": 250_000.0}
    return EuroBert(**sizes(shape), **fields, head_dim=shape[0] // shape[3])


def _modernbert(shape: Shape, **fields: Any) -> Any:
    from lmwright.models.modernbert import ModernBert

    fields = {"vocab_size": 50_368, "seq_len": 8192} | fields
    return ModernBert(**sizes(shape), **fields, head_dim=64)


def _ettin(shape: Shape) -> Any:
    return _modernbert(shape, seq_len=7999, local_rope_theta=160_000.0)


def _deberta(shape: Shape, vocab_size: int = 128_100) -> Any:
    from lmwright.models.deberta import Deberta

    return Deberta(**sizes(shape), vocab_size=vocab_size, seq_len=512, head_dim=64)


def _bert(shape: Shape, kind: str = "bert", **fields: Any) -> Any:
    from lmwright.models import KINDS

    return KINDS[kind](**sizes(shape), **fields, seq_len=512, head_dim=shape[0] // shape[3])


UNCASED = {"vocab_size": 30_522, "separator_id": 102}
ROBERTAS = {"kind": "roberta", "vocab_size": 50_265}
XLMRS = {"kind": "xlm-roberta", "vocab_size": 250_002}
BERT = "https://arxiv.org/abs/1810.04805"
ROBERTA = "https://arxiv.org/abs/1907.11692"
XLMR = "https://arxiv.org/abs/1911.02116"
MODERNBERT = "https://arxiv.org/abs/2412.13663"
ETTIN = "https://arxiv.org/abs/2507.11412"
DEBERTA = "https://arxiv.org/abs/2111.09543"


def _llada(shape: Shape) -> Any:
    from lmwright.models.llada import Llada

    fields = {"vocab_size": 126_464, "seq_len": 4096, "rope_theta": 500_000.0}
    return Llada(**sizes(shape), **fields, head_dim=shape[0] // shape[3])


PRESETS = {
    "eurobert-210m": row(
        "0.31 B: EuroBERT 210m with its head (https://arxiv.org/abs/2503.05500)",
        _eurobert, (768, 3072, 12, 12, 12)),
    "eurobert-610m": row(
        "0.756 B: EuroBERT 610m with its head (https://arxiv.org/abs/2503.05500)",
        _eurobert, (1152, 4096, 26, 18, 6)),
    "eurobert-2.1b": row(
        "2.4 B: EuroBERT 2.1B with its head (https://arxiv.org/abs/2503.05500)",
        _eurobert, (2304, 6144, 32, 18, 6)),
    "modernbert-base": row(
        f"0.15 B: ModernBERT base with its head ({MODERNBERT})",
        _modernbert, (768, 1152, 22, 12, 12)),
    "modernbert-large": row(
        f"0.396 B: ModernBERT large with its head ({MODERNBERT})",
        _modernbert, (1024, 2624, 28, 16, 16)),
    "ettin-17m": row(f"0.0169 B: Ettin encoder ({ETTIN})", _ettin, (256, 384, 7, 4, 4)),
    "ettin-32m": row(f"0.0321 B: Ettin encoder ({ETTIN})", _ettin, (384, 576, 10, 6, 6)),
    "ettin-68m": row(f"0.0685 B: Ettin encoder ({ETTIN})", _ettin, (512, 768, 19, 8, 8)),
    "ettin-150m": row(f"0.15 B: Ettin encoder ({ETTIN})", _ettin, (768, 1152, 22, 12, 12)),
    "ettin-400m": row(f"0.396 B: Ettin encoder ({ETTIN})", _ettin, (1024, 2624, 28, 16, 16)),
    "ettin-1b": row(f"1.03 B: Ettin encoder ({ETTIN})", _ettin, (1792, 3840, 28, 28, 28)),
    "deberta-v3-xsmall": row(
        f"0.071 B: DeBERTa-v3 xsmall with its head ({DEBERTA})",
        _deberta, (384, 1536, 12, 6, 6)),
    "deberta-v3-small": row(
        f"0.142 B: DeBERTa-v3 small with its head ({DEBERTA})",
        _deberta, (768, 3072, 6, 12, 12)),
    "deberta-v3-base": row(
        f"0.185 B: DeBERTa-v3 base with its head ({DEBERTA})",
        _deberta, (768, 3072, 12, 12, 12)),
    "deberta-v3-large": row(
        f"0.435 B: DeBERTa-v3 large with its head ({DEBERTA})",
        _deberta, (1024, 4096, 24, 16, 16)),
    "mdeberta-v3-base": row(
        f"0.279 B: mDeBERTa-v3 base with its head ({DEBERTA})",
        _deberta, (768, 3072, 12, 12, 12), vocab_size=251_000),
    "bert-base": row(
        f"0.11 B: BERT base uncased with its head ({BERT})",
        _bert, (768, 3072, 12, 12, 12), **UNCASED),
    "bert-large": row(
        f"0.335 B: BERT large uncased with its head ({BERT})",
        _bert, (1024, 4096, 24, 16, 16), **UNCASED),
    "minilm-l6": row(
        "0.0227 B: the shape of all-MiniLM-L6-v2 (https://arxiv.org/abs/2002.10957)",
        _bert, (384, 1536, 6, 12, 12), **UNCASED),
    "roberta-base": row(
        f"0.125 B: RoBERTa base with its head ({ROBERTA})",
        _bert, (768, 3072, 12, 12, 12), **ROBERTAS),
    "roberta-large": row(
        f"0.355 B: RoBERTa large with its head ({ROBERTA})",
        _bert, (1024, 4096, 24, 16, 16), **ROBERTAS),
    "xlm-roberta-base": row(
        f"0.278 B: XLM-R base with its head ({XLMR})",
        _bert, (768, 3072, 12, 12, 12), **XLMRS),
    "xlm-roberta-large": row(
        f"0.56 B: XLM-R large with its head ({XLMR})",
        _bert, (1024, 4096, 24, 16, 16), **XLMRS),
    "llada-8b": row(
        "8.02 B: LLaDA 8B, masked diffusion (https://arxiv.org/abs/2502.09992)",
        _llada, (4096, 12288, 32, 32, 32)),
}  # fmt: skip
