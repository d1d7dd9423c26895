"""DeepSeek and the families with its layers: attention from latents, the first layers plain, shared
experts for every token. They differ in their routers."""

from typing import Literal

from lmwright.config.run import Positive, section
from lmwright.models.latent import Latent


@section
class DeepSeekV2(Latent):
    """DeepSeek-V2 (https://arxiv.org/abs/2405.04434): softmax routing, from the best groups in its
    large size, routing weights as the softmax leaves them."""

    kind: Literal["deepseek-v2"] = "deepseek-v2"


@section
class DeepSeekV3(Latent):
    """DeepSeek-V3 (https://arxiv.org/abs/2412.19437), Moonlight, Kimi K2: sigmoid routing from the
    best groups, balanced by a bias."""

    kind: Literal["deepseek-v3"] = "deepseek-v3"


@section
class Glm4MoeLite(Latent):
    """GLM-4.7-Flash (https://arxiv.org/abs/2508.06471): the layers of DeepSeek-V3."""

    kind: Literal["glm4-moe-lite"] = "glm4-moe-lite"
    norm_eps: Positive = 1e-5
