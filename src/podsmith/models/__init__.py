"""The registry of model families: one line each."""

from podsmith.models.gemma import Gemma
from podsmith.models.llama import Llama
from podsmith.models.olmo2 import Olmo2

KINDS = {"llama": Llama, "gemma": Gemma, "olmo2": Olmo2}
