"""The registry of model families: one line each."""

from podsmith.models.dots1 import Dots1
from podsmith.models.gemma import Gemma
from podsmith.models.llama import Llama
from podsmith.models.mixtral import Mixtral
from podsmith.models.olmo2 import Olmo2
from podsmith.models.olmoe import Olmoe
from podsmith.models.phi3 import Phi3
from podsmith.models.qwen3_moe import Qwen3Moe

KINDS = {
    "llama": Llama,
    "gemma": Gemma,
    "olmo2": Olmo2,
    "phi3": Phi3,
    "mixtral": Mixtral,
    "qwen3-moe": Qwen3Moe,
    "olmoe": Olmoe,
    "dots1": Dots1,
}
