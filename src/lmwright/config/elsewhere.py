"""Words of other tools for fields and choices of a run file; docs/coming-from.md has tables."""

ELSEWHERE = {
    ("train.remat", "full"): "block",
    ("train.remat", "minimal"): "dots",
    ("train.precision", "float32"): "fp32",
    ("train.precision", "bfloat16"): "bf16",
}
"""Choices by the field and their name for it."""

CALLED = {
    # transformers
    "output_dir": "dir", "run_name": "name", "max_steps": "train.steps",
    "num_train_epochs": "train.epochs", "per_device_train_batch_size": "train.global_batch_size",
    "train_batch_size": "train.global_batch_size",
    "gradient_accumulation_steps": "train.num_microbatches", "lr": "optim.learning_rate",
    "max_grad_norm": "optim.clip_norm", "adam_beta1": "optim.beta1", "adam_beta2": "optim.beta2",
    "adam_epsilon": "optim.eps", "lr_scheduler_type": "optim.schedule.kind",
    "warmup_ratio": "optim.schedule.warmup_steps", "bf16": "train.precision",
    "fp16": "train.precision", "gradient_checkpointing": "train.remat",
    "neftune_noise_alpha": "objective.neftune_alpha",
    "label_smoothing_factor": "objective.label_smoothing",
    "logging_steps": "metrics.log_every_steps", "report_to": "metrics.trackers",
    "eval_steps": "eval.every_steps", "eval_on_start": "eval.first",
    "save_steps": "checkpoint.save_every_steps", "save_total_limit": "checkpoint.keep_last",
    "data_seed": "data.shuffle.seed", "parallelism_config": "mesh.fsdp",
    "push_to_hub": "publish.repo", "hub_model_id": "publish.repo",
    "hub_private_repo": "publish.visibility", "model_name_or_path": "train.init_from",
    # TRL, unsloth
    "max_length": "data.pack.seq_len", "max_seq_length": "data.pack.seq_len",
    "packing_strategy": "data.pack.method", "assistant_only_loss": "data.chat.train_on",
    "completion_only_loss": "data.chat.train_on", "chat_template_path": "data.chat.template",
    "dataset_text_field": "data.sources.text_column", "dataset_num_proc": "data.workers",
    "truncation_mode": "data.chat.too_long", "router_aux_loss_coef": "model.experts.balance_loss",
    "activation_offloading": "train.offload",
    # PEFT, bitsandbytes
    "r": "lora.rank", "lora_r": "lora.rank", "lora_rank": "lora.rank", "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout", "target_modules": "lora.targets", "rank_pattern": "lora.ranks",
    "alpha_pattern": "lora.alphas", "rslora": "lora.scaling", "use_rslora": "lora.scaling",
    "dora": "lora.variant", "use_dora": "lora.variant", "modules_to_save": "lora.whole",
    "base_model_name_or_path": "train.init_from", "load_in_8bit": "lora.base",
    "load_in_4bit": "lora.base", "bnb_4bit_compute_dtype": "train.precision",
    # axolotl
    "base_model": "train.init_from", "datasets": "data.sources",
    "chat_template": "data.chat.template", "val_set_size": "data.holdout_fraction",
    "dataset_prepared_path": "data.dir", "sequence_len": "data.pack.seq_len",
    "micro_batch_size": "train.global_batch_size", "num_epochs": "train.epochs",
    "optimizer": "optim.kind", "lr_scheduler": "optim.schedule.kind",
    "evals_per_epoch": "eval.every_steps", "saves_per_epoch": "checkpoint.save_every_steps",
    "adapter": "lora.rank", "lora_target_linear": "lora.targets",
    "lora_target_modules": "lora.targets", "lora_modules_to_save": "lora.whole",
    "train_on_inputs": "data.chat.train_on", "rl": "objective.kind", "rl_beta": "objective.beta",
    "wandb_project": "metrics.project",
    # LLaMA-Factory
    "cutoff_len": "data.pack.seq_len", "template": "data.chat.template",
    "dataset": "data.sources.path", "dataset_dir": "data.sources.path",
    "finetuning_type": "lora.rank", "lora_target": "lora.targets",
    "val_size": "data.holdout_fraction", "preprocessing_num_workers": "data.workers",
    "pref_beta": "objective.beta", "quantization_bit": "lora.base",
    "adapter_name_or_path": "lora.adapters", "additional_target": "lora.whole",
    "use_gradient_checkpointing": "train.remat",
    # torchtune
    "batch_size": "train.global_batch_size", "max_seq_len": "data.pack.seq_len",
    "max_steps_per_epoch": "train.steps", "clip_grad_norm": "optim.clip_norm",
    "lr_warmup_steps": "optim.schedule.warmup_steps",
    "enable_activation_checkpointing": "train.remat",
    "enable_activation_offloading": "train.offload", "lora_attn_modules": "lora.targets",
    "log_every_n_steps": "metrics.log_every_steps",
    "num_warmup_steps": "optim.schedule.warmup_steps",
    # MaxText, Levanter
    "base_output_directory": "dir", "model_name": "model.preset",
    "per_device_batch_size": "train.global_batch_size", "max_target_length": "model.seq_len",
    "warmup_steps_fraction": "optim.schedule.warmup_steps",
    "learning_rate_final_fraction": "optim.schedule.floor_fraction", "opt_type": "optim.kind",
    "lr_schedule_type": "optim.schedule.kind", "adam_b1": "optim.beta1", "adam_b2": "optim.beta2",
    "adam_eps": "optim.eps", "adam_weight_decay": "optim.weight_decay",
    "gradient_clipping_threshold": "optim.clip_norm", "skip_step_on_spikes": "train.skip_spikes",
    "ici_fsdp_parallelism": "mesh.fsdp", "ici_tensor_parallelism": "mesh.tensor",
    "ici_context_parallelism": "mesh.context", "ici_expert_parallelism": "mesh.expert",
    "ici_pipeline_parallelism": "mesh.stage", "dcn_data_parallelism": "mesh.data",
    "remat_policy": "train.remat", "log_period": "metrics.log_every_steps",
    "eval_interval": "eval.every_steps", "init_weights_seed": "seed",
    "data_shuffle_seed": "data.shuffle.seed", "dataset_path": "data.sources.path",
    "hf_path": "data.sources.path", "tokenizer_path": "data.tokenizer.path",
    "tokenizer_type": "data.tokenizer.path", "checkpoint_period": "checkpoint.save_every_steps",
    "load_parameters_path": "train.init_from", "dtype": "train.precision",
    "weight_dtype": "train.precision", "profiler": "metrics.profile_steps",
    "profiler_steps": "metrics.profile_steps", "num_train_steps": "train.steps",
}  # fmt: skip
"""Fields by their name for them."""

_PACKED = "leave it out, rows are always packed"
_FOLLOWS = "leave it out, there is nothing to set"
NOT_SET = {
    "packing": _PACKED, "padding_free": _PACKED, "sample_packing": _PACKED,
    "pad_to_sequence_len": _PACKED,
    "resume_from_checkpoint": "leave it out, the same command goes on where a run ended",
    "compile_topology": "leave it out, and name the machine in `lmwright plan RUN --on MACHINE`",
    "eos_token": "leave it out, it is the tokenizer's", "pad_token": "leave it out, there is none",
    "torch_compile": _FOLLOWS, "dataloader_num_workers": _FOLLOWS, "flash_attention": _FOLLOWS,
    "flash_attn": _FOLLOWS, "attn_implementation": _FOLLOWS, "deepspeed": _FOLLOWS,
    "tf32": _FOLLOWS, "overwrite_output_dir": _FOLLOWS, "ddp_timeout": _FOLLOWS,
}  # fmt: skip
"""What to do about settings that have no field."""
