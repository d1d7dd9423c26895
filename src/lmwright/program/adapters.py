"""The registry of ways to train a little beside a frozen base; this module stays free of jax."""

from lmwright.program.lora_section import LowRank

KINDS = {"lora": LowRank}
