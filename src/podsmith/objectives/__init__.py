"""The registry of objectives: one line each."""

from podsmith.objectives.clm import Clm
from podsmith.objectives.kto import Kto
from podsmith.objectives.preference import Dpo, Orpo
from podsmith.objectives.sft import Sft

KINDS = {"clm": Clm, "sft": Sft, "dpo": Dpo, "orpo": Orpo, "kto": Kto}
