"""The registry of model families: one line each."""

from lmwright.models.dots1 import Dots1
from lmwright.models.gemma import Gemma
from lmwright.models.llama import Llama
from lmwright.models.mixtral import Mixtral
from lmwright.models.olmo2 import Olmo2
from lmwright.models.olmoe import Olmoe
from lmwright.models.phi3 import Phi3
from lmwright.models.qwen3_moe import Qwen3Moe

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
