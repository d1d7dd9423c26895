"""The registry of model families; that of their tables in Hugging Face is `models.hf`."""

from importlib import import_module
from typing import Any

from lmwright.config.registry import Registry

CLASSES = {
    "llama": "llama.Llama", "gemma1": "gemma1.Gemma1", "gemma": "gemma.Gemma",
    "gemma4": "gemma4.Gemma4", "gemma4-moe": "gemma4.Gemma4Moe", "olmo2": "olmo2.Olmo2",
    "olmo-hybrid": "olmo_hybrid.OlmoHybrid", "smollm3": "smollm3.SmolLm3", "cwm": "cwm.Cwm",
    "ministral3": "ministral3.Ministral3", "granite": "granite.Granite",
    "granite-swa": "granite_swa.GraniteSwa", "granite4": "granite4.Granite4",
    "granite4-moe": "granite4.Granite4Moe", "granite-moe": "granite_moe.GraniteMoe",
    "granite-moe-swa": "granite_moe.GraniteMoeSwa", "nemotron-h": "nemotron_h.NemotronH",
    "nemotron-h-moe": "nemotron_h.NemotronHMoe", "qwen3-5": "qwen3_5.Qwen35",
    "qwen3-5-moe": "qwen3_5.Qwen35Moe", "qwen3-next": "qwen3_next.Qwen3Next",
    "falcon-h1": "falcon_h1.FalconH1", "lfm2": "lfm2.Lfm2", "lfm2-moe": "lfm2.Lfm2Moe",
    "lfm3": "lfm3.Lfm3", "phi3": "phi3.Phi3", "glm4": "glm4.Glm4", "ernie4-5": "ernie4_5.Ernie45",
    "ernie4-5-moe": "ernie4_5.Ernie45Moe", "helium": "helium.Helium", "exaone4": "exaone4.Exaone4",
    "apertus": "apertus.Apertus", "hunyuan": "hunyuan.Hunyuan",
    "hunyuan-moe": "hunyuan_moe.HunyuanMoe", "seed-oss": "seed_oss.SeedOss",
    "cohere": "cohere.Cohere", "starcoder2": "starcoder2.Starcoder2",
    "stablelm": "stablelm.StableLm", "phi": "phi.Phi", "olmo": "olmo.Olmo",
    "nemotron": "nemotron.Nemotron", "jais2": "nemotron.Jais2", "nanochat": "nanochat.NanoChat",
    "gpt-neox": "gpt_neox.GptNeox", "gpt2": "gpt2.Gpt2", "opt": "opt.Opt",
    "gpt-bigcode": "gpt_bigcode.GptBigcode", "modernbert-decoder": "modernbert.ModernBertDecoder",
    "mixtral": "moe.Mixtral", "phimoe": "phimoe.Phimoe", "qwen3-moe": "moe.Qwen3Moe",
    "olmoe": "moe.Olmoe", "dots1": "moe.Dots1", "qwen2-moe": "qwen2_moe.Qwen2Moe",
    "mellum": "mellum.Mellum", "deepseek-v2": "deepseek.DeepSeekV2",
    "deepseek-v3": "deepseek.DeepSeekV3", "glm4-moe": "moe.Glm4Moe",
    "minimax-m2": "minimax_m2.MinimaxM2", "glm4-moe-lite": "deepseek.Glm4MoeLite",
    "mistral4": "mistral4.Mistral4", "exaone-moe": "exaone_moe.ExaoneMoe",
    "solar-open": "solar_open.SolarOpen", "afmoe": "afmoe.Afmoe", "llama4": "llama4.Llama4",
    "gpt-oss": "gpt_oss.GptOss", "eurobert": "eurobert.EuroBert",
    "modernbert": "modernbert.ModernBert", "deberta": "deberta.Deberta", "bert": "bert.Bert",
    "roberta": "bert.Roberta", "xlm-roberta": "bert.XlmRoberta", "llada": "llada.Llada",
    "xlstm": "xlstm.Xlstm", "xlstm-blocks": "xlstm_blocks.XlstmBlocks", "bitnet": "bitnet.BitNet",
    "fanformer": "fanformer.Fanformer", "bamba": "bamba.Bamba", "mamba2": "mamba2.Mamba2",
}  # fmt: skip
KINDS = Registry(__name__, CLASSES)


class TableOf:
    """`model.hf` and `Family.hf`: the table of the kind, imported when it is asked for."""

    def __get__(self, model: Any, family: Any) -> Any:
        return import_module(f"{__name__}.hf").TABLES[family.kind]()
