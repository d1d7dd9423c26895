"""Models and runs whose curves are kept: families, objectives, adapters, steps, optimizers."""

SIZES = {"vocab_size": 384, "embed_dim": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
         "head_dim": 12, "seq_len": 96}  # fmt: skip
DENSE = SIZES | {"mlp_dim": 80}
EXPERTS = dict(num_experts=4, experts_per_token=2, mlp_dim=40, balance_loss=0.01, z_loss=0.001)
SHARED = EXPERTS | {"shared_dim": 40}
GATED = SHARED | {"shared_gate": "sigmoid"}
BALANCED = EXPERTS | {"score": "sigmoid", "bias_rate": 0.001}
BIASED = {"dense_layers": [0], "experts": SHARED | BALANCED | {"num_groups": 2}}
LATENT = {"num_kv_heads": 4, "qk_rope_head_dim": 4, "v_head_dim": 10, "kv_lora_rank": 16}
GROWING = {"rope_scaling": {"kind": "yarn", "factor": 4.0, "original_seq_len": 24}}
HYBRID = {"mixer_pattern": ["linear", "full"], "linear_num_key_heads": 2, "linear_head_dim": 12,
          "linear_num_value_heads": 4, "rotary_fraction": 0.5, "norm_eps": 0.05}  # fmt: skip
CONVS, R = {"mixer_pattern": ["conv", "full"]}, {"residual_multiplier": 0.4}
HALF, SECOND = {"rotary_fraction": 0.5}, {"experts": EXPERTS, "dense_layers": [1]}
HEADS = {"mamba_num_heads": 6, "mamba_head_dim": 16, "mamba_state_dim": 10, "mamba_num_groups": 2}
MEMORIES = {"mixer_pattern": ["linear", "full"], "linear_num_key_heads": 2, "linear_key_dim": 12,
            "linear_num_value_heads": 4, "linear_value_dim": 20, "norm_eps": 0.05}  # fmt: skip
MAMBA = HEADS | {"mixer_pattern": ["mamba", "full"]}
EVEN, MIX = DENSE | {"num_kv_heads": 4}, {"layer_pattern": ["local", "global"], "window": 24}
GEMMA4 = DENSE | MIX | {"num_layers": 4, "global_head_dim": 20, "num_shared_layers": 2,
                        "layer_input_dim": 10}  # fmt: skip
PLAIN = ("olmo2 bitnet fanformer eurobert glm4 hunyuan seed-oss apertus nanochat helium nemotron "
         "jais2").split()  # fmt: skip
MODELS = {
    "llama": DENSE | {"qk_norm": "head", "bias": "qkv"},
    "gemma": DENSE | {"window": 24, "attention_soft_cap": 50.0, "logits_soft_cap": 30.0},
    "gemma4": GEMMA4, "gemma4-moe": GEMMA4 | {"experts": EXPERTS}, "qwen3-5": DENSE | HYBRID,
    **dict.fromkeys(PLAIN, DENSE),
    "smollm3": DENSE | {"rope_pattern": ["rope", "nope"]}, "ministral3": DENSE | GROWING,
    "granite": DENSE | {"embedding_multiplier": 6.0, "residual_multiplier": 0.4,
                        "attention_multiplier": 0.2, "logits_scaling": 2.0}, "gemma1": DENSE,
    "granite4": DENSE | MAMBA | R, "granite4-moe": DENSE | MAMBA | R | {"experts": EXPERTS},
    **dict.fromkeys(("qwen3-5-moe", "qwen3-next"), SIZES | HYBRID | {"experts": GATED}),
    "lfm2": DENSE | CONVS, "lfm2-moe": DENSE | BIASED | CONVS, "ernie4-5": DENSE | {"bias": "all"},
    "lfm3": DENSE | {"mixer_pattern": ["conv", "local"], "window": 24}, "nemotron-h": DENSE | MAMBA,
    "nemotron-h-moe": DENSE | MAMBA | {"mixer_pattern": ["mamba", "moe"], "experts": SHARED},
    **dict.fromkeys(("modernbert", "modernbert-decoder"), EVEN | {"num_layers": 4, "window": 17}),
    "bert": EVEN | {"separator_id": 5},
    "deberta": EVEN | {"position_buckets": 16, "max_distance": 64}, "gpt2": EVEN, "opt": EVEN,
    "gpt-bigcode": DENSE | {"num_kv_heads": 1},
    **dict.fromkeys(("roberta", "xlm-roberta"), EVEN | {"first_position": 356}),
    "llada": DENSE | {"predicts": "next"}, "mixtral": SIZES | {"experts": EXPERTS},
    "xlstm": {k: v for k, v in DENSE.items() if k != "num_kv_heads"} | {
        "key_dim": 6, "chunk_tokens": 32}, "granite-swa": DENSE | {"window": 24},
    "xlstm-blocks": {k: v for k, v in DENSE.items() if k not in ("num_kv_heads", "head_dim")} | {
        "block_pattern": ["mlstm", "slstm"], "chunk_tokens": 32},
    "phi3": DENSE | {"window": 32} | HALF, "gpt-neox": EVEN | HALF,
    "qwen3-moe": DENSE | SECOND, "qwen2-moe": DENSE | SECOND | {"experts": GATED},
    "ernie4-5-moe": DENSE | {"dense_layers": [0], "experts": SHARED | {"bias_rate": 0.001}},
    "phimoe": SIZES | {"experts": EXPERTS | {"shares": "near", "margin": 0.3}},
    "hunyuan-moe": SIZES | {"experts": SHARED},
    "mellum": DENSE | MIX | SECOND, "minimax-m2": SIZES | {"experts": BALANCED},
    "olmo-hybrid": DENSE | MEMORIES, "granite-moe": DENSE | R | {"experts": EXPERTS},
    "granite-moe-swa": SIZES | R | {"window": 24, "experts": EXPERTS},
    "olmoe": SIZES | {"experts": EXPERTS | {"shares": "all"}, "qkv_limit": 8.0},
    "gpt-oss": SIZES | {"window": 24, "experts": EXPERTS | {"bias": "all"}},
    **{kind: DENSE | MIX | BIASED for kind in ("exaone-moe", "afmoe")},
    "llama4": DENSE | {"chunk_tokens": 24, "growth_tokens": 32, "layer_pattern": MIX[
        "layer_pattern"], "dense_layers": [0], "experts": SHARED | {"score": "sigmoid", "shares":
        "all", "weighed": "inputs"}},
    "solar-open": SIZES | {"experts": SHARED | BALANCED},
    **{kind: DENSE | BIASED for kind in ("dots1", "glm4-moe")},
    **{kind: DENSE | {"window": 24} for kind in ("exaone4", "cwm")},
    "cohere": DENSE | MIX, "starcoder2": DENSE | {"window": 24}, "olmo": DENSE | {"qkv_limit": 0.7},
    "stablelm": DENSE | HALF | {"residual": "parallel", "qk_norm": "head"}, "phi": DENSE | HALF,
    "mistral4": DENSE | LATENT | GROWING | {"experts": SHARED}, "falcon-h1": DENSE | HEADS,
    "bamba": DENSE | MAMBA | {"rotary_fraction": 0.67},
    "mamba2": {k: SIZES[k] for k in ("vocab_size", "embed_dim", "num_layers", "seq_len")} | HEADS,
    **{kind: DENSE | BIASED | LATENT for kind in ("deepseek-v3", "glm4-moe-lite")},
    "deepseek-v2": DENSE | LATENT | {"experts": SHARED | {"num_groups": 2, "best_of_group": 1}},
}  # fmt: skip

ENCODERS = ("eurobert", "modernbert", "deberta", "bert", "roberta", "xlm-roberta")
ENCODER = {"kind": "eurobert", **DENSE}
MODERN = {"kind": "modernbert", **MODELS["modernbert"]}
DIFFUSION = {"data": "masked", "objective": {"kind": "diffusion", "eval_samples": 3}}

ONE_LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.1}
THREE_LORAS = {"rank": 4, "base": "int8", "adapters": [
    {"name": "first", "rank": 2, "rows": 2},
    {"name": "second", "steps": 12, "learning_rate": 3e-3},
    {"name": "third", "dropout": 0.1, "schedule": {"kind": "linear", "warmup_steps": 3}},
]}  # fmt: skip

CASES: dict[str, dict] = {
    **{f"family {kind}": {"model": {"kind": kind, **sizes}} for kind, sizes in MODELS.items()},
    **{f"family {kind}": {"data": "masked", "model": {"kind": kind, **MODELS[kind]},
       "objective": {"kind": "mlm"}} for kind in ENCODERS},
    "family llada": DIFFUSION | {"model": {"kind": "llada", **MODELS["llada"]}},
    "objective diffusion": DIFFUSION | {"model": {"kind": "llada", **DENSE}},
    "objective mlm": {"data": "masked", "model": ENCODER, "objective": {
        "kind": "mlm", "random_share": 0.1, "kept_share": 0.1}},
    "objective rtd": {"data": "masked", "model": {"kind": "deberta", **MODELS["deberta"]},
                      "objective": {"kind": "rtd"}},
    "objective classify": {"data": "labeled", "model": ENCODER, "objective": {
        "kind": "classify", "labels": ["short", "middle", "long"]}},
    "objective multilabel": {"data": "several", "model": ENCODER, "objective": {
        "kind": "multilabel", "labels": ["short", "middle", "long"]}},
    "objective regress": {"data": "numbered", "model": MODERN, "objective": {"kind": "regress"}},
    "objective embed": {"data": "related", "model": ENCODER, "objective": {
        "kind": "embed", "direction": "both"}},
    "objective similarity": {"data": "scored", "model": ENCODER, "objective": {
        "kind": "similarity", "compares": "order"}},
    "objective tag": {"data": "tagged", "model": ENCODER, "objective": {
        "kind": "tag", "labels": ["O", "B-LONG", "I-LONG"]}},
    "objective answer": {"data": "answered", "model": MODERN, "objective": {
        "kind": "answer", "window_tokens": 64, "window_overlap": 16}},
    "objective sft": {"data": "sft", "objective": {"kind": "sft", "label_smoothing": 0.1}},
    "objective dpo": {"data": "pairs", "objective": {"kind": "dpo"}, "lora": ONE_LORA},
    "objective distill": {"teacher": "family llama", "objective": {"kind": "distill",
        "temperature": 2.0}, "model": {"kind": "olmo2", **DENSE}},
    "objective orpo": {"data": "pairs", "objective": {"kind": "orpo"}},
    "objective kto": {"data": "rated", "objective": {"kind": "kto"}, "lora": ONE_LORA},
    "lora one": {"lora": ONE_LORA},
    "lora three": {"lora": THREE_LORAS},
    "lora dora": {"lora": {"rank": 4, "variant": "dora", "scaling": "sqrt-rank", "base": "int4",
                           "b_rate_ratio": 4.0}},
    "lora three sft": {"data": "sft", "objective": {"kind": "sft"}, "lora": THREE_LORAS},
    "step microbatches ema": {"train": {"num_microbatches": 2, "ema_decay": 0.9, "remat": "dots"}},
    "step bf16 block": {"train": {"precision": "bf16", "remat": "block"}},
    "step masks of words": {"data": "masked", "model": ENCODER, "objective": {
        "kind": "mlm", "unit": "word", "mask_ratio": {"start": 0.5, "end": 0.1, "until": 0.8},
        "random_share": {"start": 0.0, "end": 0.2}, "eval_mask_ratio": 0.2},
        "train": {"num_microbatches": 2}},
    **{f"optim {kind}": {"optim": {"kind": kind}}
       for kind in ("adam8bit", "adafactor", "lion", "muon")},
}  # fmt: skip
QUICK = ("objective sft",)  # parity/test_lora has fifty steps of an adapter
