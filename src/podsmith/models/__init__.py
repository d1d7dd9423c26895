"""The registry of model families: one line each."""

from podsmith.models.gemma import Gemma
from podsmith.models.llama import Llama

KINDS = {"llama": Llama, "gemma": Gemma}
