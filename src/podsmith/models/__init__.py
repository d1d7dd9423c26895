"""The registry of model families: one line each."""

from podsmith.models.gemma import Gemma
from podsmith.models.llama import Llama
from podsmith.models.olmo2 import Olmo2
from podsmith.models.phi3 import Phi3

KINDS = {"llama": Llama, "gemma": Gemma, "olmo2": Olmo2, "phi3": Phi3}
