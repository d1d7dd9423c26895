"""The registry of objectives: one line each."""

from podsmith.objectives.clm import Clm

KINDS = {"clm": Clm}
