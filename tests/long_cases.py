"""Long cases of tests whose point a quicker case makes too: slow, each with what covers it.

Single cases stand here; a test that is slow as a whole says so itself.
"""

LONG = {
    "adapters/test_adapters_of_families.py": {
        "test_every_matrix_of_the_layers_takes_an_adapter[phi3]": "its parity with transformers",
    },
    "aot/test_kernels.py": {
        "test_a_near_layer_that_looks_both_ways_costs_its_band":
            "kernels/test_tpu_intervals: equal; every generation compiles",
        "test_disentangled_attention_compiles[v6e]":
            "kernels/test_tpu_disentangled; presets of DeBERTa, slow",
    },
    "cloud/test_local.py": {
        "test_a_dead_agent_and_its_rank_are_replaced_together": "test_ssh: agents are replaced",
        "test_a_failed_job_is_started_again": "test_a_job_comes_back_after_failures_and_hangs",
    },
    "cloud/test_ssh.py": {
        "test_a_job_is_stopped_and_started_again": "test_local: verbs look after a job",
    },
    "core/test_leaves.py": {
        "test_a_low_rank_sum_computes_as_the_merged_weight[bf16]": "int4 and int8 there",
        "test_a_low_rank_sum_computes_as_the_merged_weight[fp32]": "int4 and int8 there",
    },
    "data/test_bombs.py": {
        "test_a_column_is_unfolded_piece_by_piece[dictionary]": "nested and arrow there",
    },
    "data/test_chat_template.py": {
        "test_real_tokenizers_give_the_ids_of_transformers[llama3/tokenizer.model.tiktoken]":
            "the other tokenizers there",
    },
    "data/test_tokenizer.py": {
        "test_qwen_ranks": "llama3 ranks there",
    },
    "data/test_tokenizer_routes.py": {
        "test_real_tokenizers[gpt2]": "smollm2 and llama2 there",
        "test_real_tokenizers[t5/spiece.model]": "smollm2 and llama2 there",
    },
    "earlier/test_earlier.py": {
        "test_adapters_continue": "test_earlier_state: several adapters continue",
    },
    "evals/test_compute.py": {
        "test_layers_apart_write_the_same_text": "parity of generated text in tests/parity",
    },
    "evals/test_embed.py": {
        "test_an_interrupted_command_goes_on[jsonl]": "parquet there",
        "test_an_interrupted_command_goes_on[npz]": "parquet there",
    },
    "evals/test_held_out.py": {
        "test_bytes_of_tokens_add_up_to_the_text[qwen]": "gpt2 there",
        "test_bytes_of_tokens_add_up_to_the_text[llama3]": "gpt2 there",
    },
    "evals/test_text.py": {
        "test_windows[32-8-50]": "the other sizes there",
        "test_windows[16-16-50]": "the other sizes there",
        "test_windows[16-5-64]": "the other sizes there",
        "test_windows[32-8-64]": "the other sizes there",
    },
    "formats/test_bitnet_files.py": {
        "test_gguf_is_what_llama_cpp_computes[tq1_0]": "fp32 and tq2_0 there",
    },
    "formats/test_classifier.py": {
        "test_the_export_opens_in_transformers[modern]": "run and euro there",
    },
    "formats/test_classifier_lora.py": {
        "test_adapters_train_side_by_side_as_alone[modernbert]": "eurobert there",
        "test_predictions_of_the_run_its_export_the_merged_model_and_peft_agree[modernbert]":
            "eurobert there; gradients of modernbert",
        "test_a_base_with_a_head_for_the_same_classes_lends_it[modernbert]": "eurobert there",
        "test_logits_and_gradients_are_those_of_peft[modernbert]": "test_answerer_lora: modernbert",
    },
    "formats/test_detector.py": {
        "test_held_out_rows_say_how_well_it_detects": "test_rtd: its metrics; the curve of rtd",
        "test_a_step_from_the_compile_cache_runs": "core/test_weight: no choice in a product",
        "test_a_classifier_starts_from_the_discriminator[False]": "test_embedder: a start",
        "test_a_classifier_starts_from_the_discriminator[True]":
            "test_embedder: a detector is the start",
    },
    "formats/test_embedder.py": {
        "test_a_detector_is_the_start_without_its_head[folder]": "run there",
        "test_a_masked_encoder_is_the_start_without_its_head[modernbert-folder]":
            "the others there",
        "test_a_deberta_opens_in_sentence_transformers": "the export opens there",
    },
    "formats/test_gguf_tokenizer.py": {
        "test_there_and_back[llama3]": "smaller tokenizers there",
        "test_there_and_back[smollm2]": "gpt2 and llama2 there",
    },
    "formats/test_heads_lora.py": {
        "test_the_loss_and_the_gradients_are_those_of_peft[embed]":
            "tag there; vectors of embed agree with PEFT's",
    },
    "formats/test_peft.py": {
        "test_an_adapter_of_peft_computes_the_same_here[rslora]":
            "parity/test_lora: fifty steps of rslora",
    },
    "formats/test_regression.py": {
        "test_training_from_an_encoder_and_on": "test_classifier trains the same head",
        "test_adapters_of_numbers": "test_classifier_lora: the same head",
    },
    "formats/test_two_parts.py": {
        "test_a_run_from_released_weights_and_runs_from_it":
            "weights at step 0 there; test_detector trains and exports both",
    },
    "kernels/test_block_attention.py": {
        "test_equal_to_a_dense_mask[tpu-False-48-2]": "tpu-True there",
        "test_equal_to_a_dense_mask[cpu-False-48-1]": "cpu-False-1-2 there",
    },
    "kernels/test_context_attention.py": {
        "test_all_to_all_equals_the_reference[reference]": "splash there",
        "test_chunks_go_where_the_work_is_even[8]": "2 there",
        "test_windows_over_devices_by_the_kernel_of_tpus[masks1]": "masks0 there",
    },
    "kernels/test_tpu_attention.py": {
        "test_windows_and_soft_caps_equal_the_reference[long rows-choices1]":
            "two choices there; any intervals, drawn",
        "test_windows_and_soft_caps_equal_the_reference[long rows-choices2]":
            "two choices there; any intervals, drawn",
        "test_windows_and_soft_caps_equal_the_reference[long rows-choices3]":
            "two choices there; any intervals, drawn",
        "test_windows_and_soft_caps_equal_the_reference[whole rows-choices1]":
            "two choices there; any intervals, drawn",
        "test_windows_and_soft_caps_equal_the_reference[whole rows-choices2]":
            "two choices there; any intervals, drawn",
        "test_windows_and_soft_caps_equal_the_reference[whole rows-choices3]":
            "two choices there; any intervals, drawn",
        "test_windows_and_soft_caps_equal_the_reference[whole rows in blocks-choices1]":
            "two choices there; any intervals, drawn",
        "test_windows_and_soft_caps_equal_the_reference[whole rows in blocks-choices2]":
            "two choices there; any intervals, drawn",
        "test_windows_and_soft_caps_equal_the_reference[whole rows in blocks-choices3]":
            "two choices there; any intervals, drawn",
    },
    "kernels/test_tpu_disentangled.py": {
        "test_equal_to_the_reference[True-256-256]": "False there, and on a mesh",
    },
    "kernels/test_tpu_intervals.py": {
        "test_bands_of_long_rows[odd, near]": "any intervals within any reach, drawn",
        "test_equal_to_the_reference[long rows-near]": "odd there",
        "test_equal_to_the_reference[whole rows in blocks-near]": "odd there",
        "test_rows_cut_over_devices[blocks-sizes0-ring]": "near and odd there",
        "test_equal_to_the_reference[whole rows in blocks-odd]":
            "any intervals within any reach, drawn",
        "test_equal_to_the_reference[whole rows-causal window]":
            "any intervals within any reach, drawn",
        "test_equal_to_the_reference[odd long rows-odd]": "any intervals within any reach, drawn",
        "test_equal_to_the_reference[whole rows-both ways]":
            "any intervals within any reach, drawn",
        "test_equal_to_the_reference[whole rows-blocks]": "any intervals within any reach, drawn",
        "test_equal_to_the_reference[whole rows-near]": "any intervals within any reach, drawn",
        "test_equal_to_the_reference[whole rows-itself]": "any intervals within any reach, drawn",
        "test_rows_cut_over_devices[odd-sizes0-ring]":
            "near by the ring, blocks by all-to-all there",
        "test_rows_cut_over_devices[near-sizes1-ring]":
            "near by the ring, blocks by all-to-all there",
        "test_rows_cut_over_devices[near-sizes0-all_to_all]":
            "near by the ring, blocks by all-to-all there",
        "test_rows_cut_over_devices[odd-sizes1-all_to_all]":
            "near by the ring, blocks by all-to-all there",
        "test_rows_cut_over_devices[odd-sizes0-all_to_all]":
            "near by the ring, blocks by all-to-all there",
        "test_rows_cut_over_devices[near-sizes1-all_to_all]":
            "near by the ring, blocks by all-to-all there",
        "test_rows_cut_over_devices[blocks-sizes1-all_to_all]":
            "near by the ring, blocks by all-to-all there",
        "test_an_odd_number_of_spans[near]": "both ways there",
        "test_an_odd_number_of_spans[odd]": "both ways there",
        "test_equal_on_a_mesh[blocks]": "near there",
        "test_equal_on_a_mesh[odd]": "near there",
    },
    "kernels/test_tpu_long_attention.py": {
        "test_no_copy_races_with_another[384--0]": "[768-40-40] there",
        "test_no_copy_races_with_another[384--]": "[768-40-40] there",
        "test_spans_of_packed_rows[parts of blocks]": "blocks there",
        "test_spans_of_packed_rows[one block a span]": "blocks there",
        "test_windows_and_soft_caps[choices1]": "choices0 there",
        "test_windows_and_soft_caps[choices2]": "choices0 there",
    },
    "models/test_reasoning.py": {
        "test_it_starts_as_nothing_and_then_learns[reasoning1]": "all experts are as many chosen",
    },
    "nn/test_moe.py": {
        "test_the_bias_balances_without_a_gradient_of_the_loss": "train/test_balance",
    },
    "objectives/test_answer_spans.py": {
        "test_an_update_is_the_same_however_a_batch_is_cut[2-4-mesh0]":
            "test_classify: documents are scored the same",
    },
    "objectives/test_block_diffusion.py": {
        "test_the_same_update_however_a_batch_is_cut": "test_mlm: the same test",
        "test_complementary_views_bound_the_likelihood":
            "test_diffusion: the bound is that of all sets; the views there",
        "test_a_block_of_the_whole_row_is_masked_diffusion":
            "loss and gradients, blocks of one token there",
    },
    "objectives/test_classify.py": {
        "test_an_update_is_the_same_however_a_batch_is_cut[4-1]": "[2-4] there",
        "test_the_loss_is_that_of_pooling_written_out[bos]": "parity/test_classifiers: bos",
        "test_packed_documents_are_as_alone[mean]": "bos and late there",
    },
    "objectives/test_diffusion.py": {
        "test_the_same_tokens_are_masked_however_a_batch_is_cut[1-4]": "test_mlm: the same test",
        "test_rows_of_a_device_have_evenly_spread_times[8-2]": "[2-8] there",
        "test_held_out_rows_are_measured_the_same_each_time": "test_mlm: the same test",
        "test_the_same_tokens_are_masked_however_a_batch_is_cut[2-4]": "test_mlm: the same test",
    },
    "objectives/test_embed.py": {
        "test_an_update_is_the_same_however_a_batch_is_cut[4-1-mesh0]": "[2-4-mesh3] there",
        "test_an_update_is_the_same_however_a_batch_is_cut[1-8-mesh2]": "[2-4-mesh3] there",
        "test_an_update_is_the_same_however_a_batch_is_cut[1-4-mesh4]": "[2-4-mesh3] there",
        "test_an_update_is_the_same_however_a_batch_is_cut[1-4-mesh5]": "[2-4-mesh3] there",
        "test_an_update_is_the_same_however_a_batch_is_cut[8-1-mesh1]": "[2-4-mesh3] there",
        "test_modernbert_gives_vectors_too": "evals/test_embed: vectors of modernbert",
        "test_loss_and_gradients_are_those_of_sentence_transformers[1-choice3]": "choice5 there",
        "test_loss_and_gradients_are_those_of_sentence_transformers[0-choice2]": "choice5 there",
    },
    "objectives/test_forward_passes.py": {
        "test_passes_of_the_reference_are_counted[objective1]": "the others there",
    },
    "objectives/test_kto.py": {
        "test_gradients_reach_adapters_alone_and_start_where_nothing_moved":
            "the same test of test_preference",
    },
    "objectives/test_mask_decoder.py": {
        "test_loss_and_gradients_are_those_of_the_composition[1]": "3 there",
    },
    "objectives/test_mlm.py": {
        "test_the_same_tokens_are_hidden_however_a_batch_is_cut[1-4]": "[2-4] there",
    },
    "objectives/test_mlm_ramps.py": {
        "test_microbatches_hide_the_same_tokens[2]": "test_mlm: however a batch is cut",
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
    "parity/test_classifiers.py": {
        "test_logits_and_gradients[ModernBert cls]": "its mean there; numbers of its cls",
        "test_logits_and_gradients[EuroBert mean]": "bos and late there",
        "test_any_number_of_classes[EuroBert bos]": "ModernBert there",
        "test_numbers[EuroBert late]": "ModernBert there",
    },
    "parity/test_encoders.py": {
        "test_rows_of_padding_alone_have_finite_gradients[ModernBert with biases]":
            "ModernBert and EuroBert there",
        "test_rows_of_padding_alone_have_finite_gradients[DebertaV2]":
            "ModernBert and EuroBert there",
        "test_packed_documents_are_as_alone[ModernBert with biases-reference]": "the others there",
        "test_packed_documents_are_as_alone[ModernBert with biases-cpu]": "the others there",
        "test_packed_documents_are_as_alone[EuroBert-reference]": "the others there",
        "test_packed_documents_are_as_alone[DebertaV2-reference]": "the others there",
    },
    "parity/test_families.py": {
        "test_text_of_a_left_padded_batch[qwen3]": "llama, gemma3 and phi3 there",
        "test_text_of_a_left_padded_batch[qwen2]": "llama, gemma3 and phi3 there",
        "test_text_of_a_left_padded_batch[gemma2]": "llama, gemma3 and phi3 there",
        "test_text_of_a_left_padded_batch[olmo2]": "llama, gemma3 and phi3 there",
        "test_text_of_a_left_padded_batch[mistral]": "llama, gemma3 and phi3 there",
        "test_logits_loss_and_gradients[llama]": "test_llama: the same model",
        "test_logits_loss_and_gradients[qwen2]": "test_llama: the same model",
    },
    "parity/test_moe_parity.py": {
        "test_text_of_a_left_padded_batch[dots1]": "qwen3-moe there; logits of dots1",
        "test_text_of_a_left_padded_batch[olmoe]": "mixtral there",
        "test_text_of_a_left_padded_batch[qwen3-moe]": "mixtral there",
    },
    "parity/test_taggers.py": {
        "test_logits_and_gradients[EuroBert bos]": "the others there",
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
    "resume/test_gradient_error.py": {
        "test_it_is_measured_again_where_a_run_goes_on": "it is measured on the first rows",
        "test_it_is_measured_on_the_first_rows": "train/test_gradient_error: a small model",
    },
    "resume/test_not_finite.py": {
        "test_a_run_that_goes_bad_keeps_its_good_checkpoints[2]": "1 there",
    },
    "resume/test_readers.py": {
        "test_readers_beside_a_run_that_saves": "the verbs that read change no file",
    },
    "resume/test_resume.py": {
        "test_a_killed_run_ends_bit_for_bit_the_same[before1]": "before2 there",
    },
    "sharded/test_axes.py": {
        "test_an_axis_alone[context]": "products there",
        "test_an_axis_alone[expert]": "products there",
        "test_an_axis_alone[tensor]": "products there",
        "test_a_pipeline_alone": "products there",
    },
    "sharded/test_block_inputs.py": {
        "test_adapters": "train/test_offload_models: chunks and the host change no adapter",
        "test_devices_change_little[axes1]": "[axes2] there",
        "test_devices_change_little[axes0]": "[axes2] there",
        "test_other_settings_of_memory_change_nothing[{'num_microbatches': 2}]": "offload there",
        "test_other_settings_of_memory_change_nothing[{'mlp_chunk_tokens': 8}]": "offload there",
    },
    "sharded/test_experts.py": {
        "test_products[model1-axes1]": "[model0-axes0] there",
    },
    "sharded/test_rounded.py": {
        "test_gradients[axes0-train0]": "test_ternary: weights rounded on a mesh",
    },
    "sharded/test_sharded_families.py": {
        "test_stages[gemma2]": "test_axes: stages in products; rows, tokens and heads of gemma2",
        "test_rows_and_heads_cut[deberta]": "xlstm there; nn/test_disentangled",
    },
    "train/test_balance.py": {
        "test_a_step_moves_the_bias_by_its_rate[2]": "nn/test_moe, and the curve of experts",
    },
    "train/test_bitnet_run.py": {
        "test_an_adapter_is_merged_exactly": "test_qat_run: an adapter inside the rounding",
    },
    "train/test_diffusion_run.py": {
        "test_answers_are_learned_with_an_adapter": "test_sft, and the curve of diffusion",
        "test_blocks_are_learned_and_written": "objectives/test_block_diffusion, evals/test_fill",
        "test_a_causal_model_is_converted": "formats/test_diffusion_folders: Qwen 2 is converted",
    },
    "train/test_masked_run.py": {
        "test_a_grown_model_begins_below_a_fresh_one": "formats/test_grow: tiles, transformers",
        "test_a_run_that_stops_and_goes_on_hides_the_same_tokens":
            "objectives/test_mlm_ramps: a stop in the middle",
    },
    "train/test_offload.py": {
        "test_chunks_of_an_mlp_add_up[relu2-1]": "swiglu there",
        "test_the_host_changes_no_bit[attention-mlp]": "products-block there",
        "test_head_gradient_has_an_effect_or_is_refused[diffusion]": "rtd and clm there",
        "test_head_gradient_has_an_effect_or_is_refused[mlm]": "rtd and clm there",
        "test_head_gradient_has_an_effect_or_is_refused[orpo]": "rtd and clm there",
        "test_head_gradient_has_an_effect_or_is_refused[sft]": "rtd and clm there",
    },
    "train/test_offload_models.py": {
        "test_chunks_change_no_adapter[1-dora]": "two on int8 there",
        "test_chunks_change_no_adapter[1-two on int8]":
            "test_offload: chunks add up; the host changes no bit of adapters",
        "test_the_host_changes_no_bit_of_adapters[one on int8-block_inputs]":
            "test_offload: the host changes no bit",
    },
    "train/test_relu_signs.py": {
        "test_signs_change_no_bit_of_a_step[one device]": "eight devices there",
    },
    "train/test_step.py": {
        "test_meshes_equal_one_device[axes2-untied-none]": "sharded/test_axes: products",
        "test_meshes_equal_one_device[axes0-untied-none]":
            "sharded/test_axes: a whole step on a mesh",
    },
}  # fmt: skip
