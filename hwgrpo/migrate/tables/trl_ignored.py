"""TRL's settings that mean nothing here: accepted, and reported with the reason."""

from __future__ import annotations

from hwgrpo.migrate.tables.peer_row import ignored

_PADDING = "nothing is padded where it need not be"
_CHUNKS = "logits are never held at once: the kernels stream the vocabulary"
_SCORING = "validations use all prompts at once"
_DATA = "data is read by each rank itself"
_DDP = "trainer.strategy=ddp has no such option; the gradient is the same"
_LOGS = "metrics.jsonl has the metrics of every step"
_HUB = "nothing is pushed to the hub"
_OPEN_R1 = "an argument of open-r1's script, not of TRL"
_PUSH = f"{_HUB}: run hwgrpo export OUTPUT_DIR FOLDER, then hf upload NAME FOLDER"
_GUARDED = "updates whose gradient is not finite are skipped and counted"
_COMPILE = "not a setting of a run; the gradient is the same"
_TRACKIO = "trackio's own"
_CHECKPOINTS = "checkpoints have all that an exact resume needs"
_IMAGES = "only used with images"
_BEST = "no checkpoint is the best one; EarlyStoppingCallback reads it"
_ENGINE = "the engine's own; rollout.engine_kwargs passes others"
_MEMORY = "memory alone; the kernels stream what it would save"

IGNORED = (
    *ignored("models load without dropout", "disable_dropout"),
    *ignored(_PADDING, "pad_to_multiple_of", "train_sampling_strategy", "length_column_name"),
    *ignored(_CHUNKS, "use_liger_kernel", "liger_kernel_config"),
    *ignored("reward functions get the columns that they name", "remove_unused_columns", "label_names"),
    *ignored("keys and values are cached while sampling alone", "cache_implementation", "use_cache"),
    *ignored("non-reentrant, always", "gradient_checkpointing_kwargs"),
    *ignored("the local engine batches continuously", "use_transformers_continuous_batching"),
    *ignored("the local engine batches continuously", "transformers_continuous_batching_config"),
    *ignored(_SCORING, "per_device_eval_batch_size", "eval_accumulation_steps", "eval_do_concat_batches"),
    *ignored(_SCORING, "eval_use_gather_object", "batch_eval_metrics", "include_for_metrics", "prediction_loss_only"),
    *ignored("validations are sampled as training is", "bf16_full_eval"),
    *ignored(_DATA, "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *ignored(_DATA, "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
    *ignored("epochs follow each other without a gap", "dataloader_drop_last"),
    *ignored("TRL draws the order of prompts from seed; so does trainer.seed", "data_seed"),
    *ignored("the data order is restored exactly", "ignore_data_skip"),
    *ignored(_DDP, "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
    *ignored("the backend has its communication library", "ddp_backend"),
    *ignored("torchrun's environment has it", "local_rank"),
    *ignored("counts are those of all devices", "average_tokens_across_devices"),
    *ignored(_GUARDED, "logging_nan_inf_filter"),
    *ignored(_LOGS, "logging_first_step", "log_on_each_node", "include_num_input_tokens_seen", "skip_memory_metrics"),
    *ignored("messages go to standard error", "log_level", "log_level_replica"),
    *ignored("completions.jsonl has groups, each with its prompt", "log_unique_prompts"),
    *ignored(_IMAGES, "log_multimodal"),
    *ignored(_TRACKIO, "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    *ignored(_COMPILE, "torch_compile_backend", "torch_compile_mode", "tf32", "torch_compile"),
    *ignored("freed memory is kept for the next step", "torch_empty_cache_steps"),
    *ignored(_CHECKPOINTS, "save_only_model", "save_on_each_node", "restore_callback_states_from_checkpoint"),
    *ignored("a signal writes a checkpoint, always", "enable_jit_checkpoint"),
    *ignored(_PUSH, "push_to_hub"),
    *ignored(_HUB, "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
    *ignored(_BEST, "metric_for_best_model", "greater_is_better"),
    *ignored("transformers' scripts read it; GRPOTrainer.train() trains", "do_train", "do_eval", "do_predict"),
    *ignored("the engine chooses a port", "vllm_group_port"),
    *ignored("rows are read at once", "dataset_streaming", "streaming"),
    *ignored("buffers are not broadcast", "ignore_bias_buffers"),
    *ignored(_MEMORY, "use_bnb_nested_quant", "bnb_4bit_quant_storage"),
    *ignored("the optimizer's states are all its own", "optim_target_modules"),
    *ignored("adapters are for causal language models", "lora_task_type"),
    *ignored(
        "an argument of older transformers",
        *("overwrite_output_dir", "logging_dir", "save_safetensors", "group_by_length", "half_precision_backend"),
        *("fp16_backend", "fp16_opt_level", "jit_mode_eval", "use_ipex", "past_index", "include_inputs_for_metrics"),
        *("include_tokens_per_second", "ray_scope", "tpu_num_cores", "torchdynamo", "use_mps_device", "mp_parameters"),
    ),
    *ignored(_OPEN_R1, "benchmarks", "hub_model_revision", "wandb_entity", "wandb_run_group"),
    *ignored(_OPEN_R1, "code_language", "code_eval_test_batch_size", "code_eval_scoring_mode", "code_provider"),
    *ignored(_OPEN_R1, "parallel_code_exec_per_proc"),
    *ignored("vLLM is on the device of the training process", "vllm_device"),
    *ignored("accelerate's", "num_machines", "machine_rank", "main_process_ip", "main_process_port"),
)
