"""The registry of model families: one line each."""

from podsmith.models.llama import Llama

KINDS = {"llama": Llama}
