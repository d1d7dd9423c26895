"""The registry of objectives: one line each."""

from lmwright.config.registry import Registry

KINDS = Registry(
    __name__,
    {
        "clm": "clm.Clm",
        "sft": "sft.Sft",
        "distill": "distill.Distill",
        "dpo": "preference.Dpo",
        "orpo": "preference.Orpo",
        "kto": "kto.Kto",
        "mlm": "mlm.Mlm",
        "rtd": "rtd.Rtd",
        "diffusion": "diffusion.Diffusion",
        "classify": "classify.Classify",
        "multilabel": "multilabel.Multilabel",
        "regress": "regress.Regress",
        "embed": "embed.Embed",
        "similarity": "similarity.Similarity",
        "tag": "tag.Tag",
        "answer": "answer_spans.Answer",
    },
)
