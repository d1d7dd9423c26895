"""The registry of objectives: one line each."""

from lmwright.objectives.clm import Clm
from lmwright.objectives.kto import Kto
from lmwright.objectives.preference import Dpo, Orpo
from lmwright.objectives.sft import Sft

KINDS = {"clm": Clm, "sft": Sft, "dpo": Dpo, "orpo": Orpo, "kto": Kto}
