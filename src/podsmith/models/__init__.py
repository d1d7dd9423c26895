"""The registry of model families: one line each."""

from podsmith.models.dots1 import Dots1
from podsmith.models.llama import Llama
from podsmith.models.mixtral import Mixtral
from podsmith.models.olmoe import Olmoe
from podsmith.models.qwen3_moe import Qwen3Moe

KINDS = {
    "llama": Llama,
    "mixtral": Mixtral,
    "qwen3-moe": Qwen3Moe,
    "olmoe": Olmoe,
    "dots1": Dots1,
}
