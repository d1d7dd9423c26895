"""Long cases of tests whose point a quicker case makes too: slow, each with what covers it.

Single cases stand here; a test that is slow as a whole says so itself.
"""

LONG = {
    "adapters/test_adapters_of_families.py": {
        "test_every_matrix_of_the_layers_takes_an_adapter[phi3]": "its parity with transformers",
    },
    "cloud/test_local.py": {
        "test_a_dead_agent_and_its_rank_are_replaced_together": "test_ssh: agents are replaced",
        "test_a_failed_job_is_started_again": "test_a_job_comes_back_after_failures_and_hangs",
    },
    "cloud/test_ssh.py": {
        "test_a_job_is_stopped_and_started_again": "test_local: verbs look after a job",
    },
    "data/test_chat_template.py": {
        "test_real_tokenizers_give_the_ids_of_transformers[llama3/tokenizer.model.tiktoken]":
            "the other tokenizers there",
    },
    "earlier/test_earlier.py": {
        "test_adapters_continue": "test_earlier_state: several adapters continue",
    },
    "evals/test_compute.py": {
        "test_layers_apart_write_the_same_text": "parity of generated text in tests/parity",
    },
    "evals/test_held_out.py": {
        "test_bytes_of_tokens_add_up_to_the_text[qwen]": "gpt2 there",
        "test_bytes_of_tokens_add_up_to_the_text[llama3]": "gpt2 there",
    },
    "formats/test_classifier.py": {
        "test_the_export_opens_in_transformers[modern]": "run and euro there",
    },
    "formats/test_classifier_lora.py": {
        "test_adapters_train_side_by_side_as_alone[modernbert]": "eurobert there",
        "test_predictions_of_the_run_its_export_the_merged_model_and_peft_agree[modernbert]":
            "eurobert there; gradients of modernbert",
    },
    "formats/test_detector.py": {
        "test_held_out_rows_say_how_well_it_detects": "test_rtd: its metrics; the curve of rtd",
        "test_a_step_from_the_compile_cache_runs": "core/test_weight: no choice in a product",
        "test_a_classifier_starts_from_the_discriminator[False]": "True there",
    },
    "formats/test_gguf_tokenizer.py": {
        "test_there_and_back[llama3]": "smaller tokenizers there",
    },
    "formats/test_regression.py": {
        "test_training_from_an_encoder_and_on": "test_classifier trains the same head",
    },
    "formats/test_two_parts.py": {
        "test_a_run_from_released_weights_and_runs_from_it":
            "weights at step 0 there; test_detector trains and exports both",
    },
    "kernels/test_tpu_disentangled.py": {
        "test_equal_to_the_reference[True-256-256]": "False there, and on a mesh",
    },
    "kernels/test_tpu_intervals.py": {
        "test_bands_of_long_rows[odd, near]": "any intervals within any reach, drawn",
        "test_equal_to_the_reference[long rows-near]": "odd there",
        "test_equal_to_the_reference[whole rows in blocks-near]": "odd there",
        "test_rows_cut_over_devices[blocks-sizes0-ring]": "near and odd there",
    },
    "kernels/test_tpu_long_attention.py": {
        "test_no_copy_races_with_another[384--0]": "[768-40-40] there",
        "test_no_copy_races_with_another[384--]": "[768-40-40] there",
    },
    "models/test_reasoning.py": {
        "test_it_starts_as_nothing_and_then_learns[reasoning1]": "all experts are as many chosen",
    },
    "nn/test_moe.py": {
        "test_the_bias_balances_without_a_gradient_of_the_loss": "train/test_balance",
    },
    "objectives/test_block_diffusion.py": {
        "test_the_same_update_however_a_batch_is_cut": "test_diffusion: the same masks",
    },
    "objectives/test_classify.py": {
        "test_an_update_is_the_same_however_a_batch_is_cut[4-1]": "[2-4] there",
    },
    "objectives/test_diffusion.py": {
        "test_the_same_tokens_are_masked_however_a_batch_is_cut[1-4]": "[2-4] there",
    },
    "objectives/test_embed.py": {
        "test_an_update_is_the_same_however_a_batch_is_cut[4-1-mesh0]": "[2-4-mesh3] there",
        "test_an_update_is_the_same_however_a_batch_is_cut[1-8-mesh2]": "[2-4-mesh3] there",
        "test_an_update_is_the_same_however_a_batch_is_cut[1-4-mesh4]": "[2-4-mesh3] there",
        "test_an_update_is_the_same_however_a_batch_is_cut[1-4-mesh5]": "[2-4-mesh3] there",
    },
    "objectives/test_kto.py": {
        "test_gradients_reach_adapters_alone_and_start_where_nothing_moved":
            "the same test of test_preference",
    },
    "objectives/test_mlm.py": {
        "test_the_same_tokens_are_hidden_however_a_batch_is_cut[1-4]": "[2-4] there",
    },
    "objectives/test_rtd.py": {
        "test_the_same_numbers_however_a_batch_is_cut[2-4]": "test_mlm, and the curve of rtd",
    },
    "objectives/test_two_models.py": {
        "test_each_trains_as_it_does_alone": "test_rtd: gradients of the composition",
    },
    "optim/test_adam8bit.py": {
        "test_training_follows_fp32[0.999]": "0.95 there",
    },
    "parity/test_encoders.py": {
        "test_rows_of_padding_alone_have_finite_gradients[ModernBert with biases]":
            "ModernBert and EuroBert there",
    },
    "parity/test_moe_parity.py": {
        "test_text_of_a_left_padded_batch[dots1]": "qwen3-moe there; logits of dots1",
    },
    "planner/test_search.py": {
        "test_the_smallest_slice_that_trains_it": "any compares machines cheapest first",
        "test_suggestions_are_in_the_order_of_harm": "cures fit and paste, offered adapters",
    },
    "planner/test_subject.py": {
        "test_a_preset_gets_the_most_rows_that_fit": "machines are compared at one batch",
    },
    "resume/test_elastic.py": {
        "test_noise_is_drawn_by_row[mesh2-2]": "[mesh0-1] there",
    },
    "resume/test_resume.py": {
        "test_a_killed_run_ends_bit_for_bit_the_same[before1]": "before2 there",
    },
    "sharded/test_block_inputs.py": {
        "test_adapters": "train/test_offload_models: chunks and the host change no adapter",
        "test_devices_change_little[axes1]": "[axes0] and [axes2] there",
    },
    "sharded/test_experts.py": {
        "test_products[model1-axes1]": "[model0-axes0] there",
    },
    "sharded/test_sharded_families.py": {
        "test_stages[gemma2]": "test_axes: stages alone; rows, tokens and heads of gemma2",
    },
    "train/test_balance.py": {
        "test_a_step_moves_the_bias_by_its_rate[2]": "nn/test_moe, and the curve of experts",
    },
    "train/test_diffusion_run.py": {
        "test_answers_are_learned_with_an_adapter": "test_sft, and the curve of diffusion",
        "test_blocks_are_learned_and_written": "objectives/test_block_diffusion, evals/test_fill",
    },
    "train/test_masked_run.py": {
        "test_a_grown_model_begins_below_a_fresh_one": "formats/test_grow: tiles, transformers",
    },
    "train/test_offload.py": {
        "test_chunks_of_an_mlp_add_up[relu2-1]": "swiglu there",
        "test_the_host_changes_no_bit[attention-mlp]": "products-block there",
    },
    "train/test_offload_models.py": {
        "test_chunks_change_no_adapter[1-dora]": "two on int8 there",
    },
    "train/test_step.py": {
        "test_meshes_equal_one_device[axes2-untied-none]": "[axes0] there",
    },
}  # fmt: skip
