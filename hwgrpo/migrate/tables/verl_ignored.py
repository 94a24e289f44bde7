"""verl's settings that mean nothing here: accepted, and reported with the reason."""

from __future__ import annotations

from hwgrpo.migrate.tables.peer_row import ignored, section

_CRITIC = "GRPO has no critic"
_PADDING = "nothing is padded where it need not be"
_SCORING = "scoring passes are cut by trainer.tokens_per_micro_batch"
_CHUNKS = "logits are never held at once: the kernels stream the vocabulary"
_KERNELS = "the fastest kernel of the device is selected; hwgrpo kernels shows it"
_COMPILE = "not a setting of a run; the gradient is the same"
_PROFILE = "trainer.profile_steps profiles steps by torch's profiler; timing_s/* is always logged"
_RAY = "there is no Ray: torchrun starts one process per device"
_SEED = "trainer.seed seeds the data order and sampling"
_SYNC = "weights are copied to the engine by its own means"
_ENGINE = "the training engine's own; trainer.strategy=fsdp2 trains the same gradient"
_REFERENCE = "the reference model is sharded and scored as the policy is"
_WORKERS = "data is read by each rank itself"
_ALWAYS = "always so here"
_LOGS = "completions.jsonl has samples of each step; see observe.completions_per_step"
_REWARD_WORKERS = "functions run in the trainer, or in processes: the workers of an entry in reward.functions"
_OFF = "without effect while it is off"

IGNORED = (
    *ignored(_RAY, "ray_kwargs.*", "ray_init.*", "trainer.ray_wait_register_center_timeout"),
    *ignored("Hydra's own settings", "hydra.*", "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"),
    *ignored(_PROFILE, "global_profiler.*", "trainer.profile_steps", "trainer.profile_continuous_steps"),
    *ignored("data goes from rank to rank without a queue", "transfer_queue.*"),
    *ignored(_CRITIC, "critic.*", "trainer.max_critic_ckpt_to_keep", "algorithm.lam"),
    *ignored(_OFF, "algorithm.pf_ppo.*", "distillation.*", "skip.*"),
    *ignored(
        "memory is freed when the engine sleeps; see rollout.sleep_mode", "actor_rollout_ref.rollout.enable_sleep_mode"
    ),
    *ignored(
        "trainer.process_group_timeout (7200 s) bounds the wait for other ranks", "actor_rollout_ref.nccl_timeout"
    ),
    *section(
        "actor_rollout_ref.actor.",
        ignored(_PADDING, "use_remove_padding", "megatron.use_remove_padding", "pad_to_length"),
        ignored("model.layout=auto computes a group's prompt once where it can", "use_prefix_grouper"),
        ignored(_COMPILE, "use_torch_compile", "fsdp_config.use_torch_compile"),
        ignored(_CHUNKS, "entropy_from_logits_with_chunking", "fsdp_config.entropy_from_logits_with_chunking"),
        ignored(_CHUNKS, "entropy_from_logits_chunk_size", "fsdp_config.entropy_from_logits_chunk_size"),
        ignored(_CHUNKS, "entropy_checkpointing", "fsdp_config.entropy_checkpointing"),
        ignored(_KERNELS, "use_fused_kernels"),
        ignored("actor/entropy is always logged", "calculate_entropy"),
        ignored("the estimator optimal_token_baseline computes it", "calculate_sum_pi_squared"),
        ignored(_CHUNKS, "sum_pi_squared_checkpointing"),
        ignored("the updates of a step are cut in the order of the prompts", "shuffle"),
        ignored(_SEED, "data_loader_seed", "fsdp_config.seed"),
        ignored("checkpoints have all that an exact resume needs; hwgrpo export writes models", "checkpoint.*"),
        ignored("derived from other settings", "rollout_n", "optim.total_training_steps"),
        ignored(_PROFILE, "profiler.*"),
        ignored(_OFF, "router_replay.record_file", "router_replay.replay_file", "qat.*"),
        ignored("torch's own optimizers", "optim.optimizer_impl"),
        ignored(
            "parameters are fp32 masters, computed with in model.dtype; gradients are reduced in fp32",
            "fsdp_config.model_dtype",
            "fsdp_config.mixed_precision.*",
        ),
        ignored(
            "every layer is one shard group, over all ranks",
            *("fsdp_config.wrap_policy.*", "fsdp_config.fsdp_size", "fsdp_config.use_orig_params"),
            *("fsdp_config.forward_prefetch", "fsdp_config.forward_only", "fsdp_config.strategy"),
            "fsdp_config.turbo_config.*",
        ),
        ignored(
            "where the optimizer's states are is trainer.offload's",
            *(
                "optim.override_optimizer_config.optimizer_offload_fraction",
                "optim.override_optimizer_config.offload_fraction",
            ),
            "optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d",
            "optim.override_optimizer_config.use_precision_aware_optimizer",
        ),
        ignored(_ENGINE, "megatron.*", "veomni.*", "engine.*", "torchtitan.*", "automodel.*"),
        ignored("schedules end with the run", "optim.lr_decay_steps"),
    ),
    *section(
        "actor_rollout_ref.ref.",
        ignored(_SCORING, "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz"),
        ignored(_SCORING, "log_prob_max_token_len_per_gpu"),
        ignored(_COMPILE, "use_torch_compile"),
        ignored(
            _CHUNKS, "entropy_from_logits_with_chunking", "entropy_checkpointing", "entropy_from_logits_chunk_size"
        ),
        ignored(_REFERENCE, "strategy", "fsdp_config.*", "megatron.*", "veomni.*", "engine.*", "router_replay.*"),
        ignored(_REFERENCE, "ulysses_sequence_parallel_size", "rollout_n"),
        ignored(_PROFILE, "profiler.*"),
    ),
    *section(
        "actor_rollout_ref.rollout.",
        ignored("the engine and the trainer work in turns, unless rollout.max_staleness is above 0", "mode"),
        ignored(_SCORING, "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz"),
        ignored(_SCORING, "log_prob_max_token_len_per_gpu"),
        ignored(_ALWAYS, "calculate_log_probs", "skip_tokenizer_init", "logprobs_mode", "disable_log_stats"),
        ignored(_SYNC, "load_format", "layered_summon", "checkpoint_engine.*", "multi_stage_wake_up"),
        ignored(
            "the engine's own default; rollout.engine_kwargs passes others",
            "scheduling_policy",
            "cudagraph_capture_sizes",
        ),
        ignored(_SEED, "seed"),
        ignored("there are no agent workers", "agent.num_workers", "agent.agent_loop_manager_class"),
        ignored(
            "tokens are never decoded and tokenized again between turns",
            "multi_turn.use_inference_chat_template",
            "multi_turn.tokenization_sanity_check_mode",
        ),
        ignored(_OFF, "multi_turn.*", "skip_dump_dir", "quantization_config_file", "mtp"),
        ignored("metrics.jsonl and completions.jsonl have it", "trace.*", "prometheus.*"),
        ignored(_PROFILE, "profiler.*"),
        ignored("TensorRT-LLM's own", "engine_kwargs.trtllm", "engine_kwargs.trtllm.*"),
    ),
    *section(
        "actor_rollout_ref.model.",
        ignored(_PADDING, "use_remove_padding"),
        ignored(_KERNELS, "use_fused_kernels", "fused_kernel_options.*", "use_liger"),
        ignored("activations are recomputed instead: model.gradient_checkpointing", "enable_activation_offload"),
        ignored("long sequences are spread over ranks: trainer.sequence_parallel_size", "tiled_mlp.*"),
        ignored("files are read from where they are", "use_shm"),
        ignored("new adapters start as the identity, at random", "lora.lora_A_init_method", "lora.lora_B_init_method"),
        ignored(_OFF, "mtp.*"),
        ignored("adapters are sent to the engine as they are", "lora.merge", "lora.dropout_position"),
        ignored("adapters are fp32 masters", "lora.dtype", "lora.a2a_experimental"),
    ),
    *section(
        "data.",
        ignored(_WORKERS, "use_shm", "dataloader_num_workers", "filter_overlong_prompts_workers"),
        ignored(
            "prompts are kept as messages and as tokens",
            "return_raw_input_ids",
            "return_raw_chat",
            "return_full_prompt",
        ),
        ignored("the model's processor has it", "image_patch_size"),
        ignored("a prompt keeps what its images became", "return_multi_modal_inputs"),
        ignored("prompts show the tools of rollout.multi_turn", "tool_config_path"),
        ignored(
            "validations use all prompts at once, in the order of the file", "val_batch_size", "validation_shuffle"
        ),
    ),
    *section(
        "reward.",
        ignored(_REWARD_WORKERS, "num_workers", "launch_reward_fn_async"),
        ignored(_OFF, "reward_model.*", "sandbox_fusion.max_concurrent", "sandbox_fusion.memory_limit_mb"),
        ignored("registered by its name", "reward_manager.source", "reward_manager.module.name"),
        ignored("derived from other settings", "use_reward_loop"),
    ),
    *section(
        "trainer.",
        ignored("ranks are always balanced by their tokens", "balance_batch"),
        ignored(_LOGS, "log_val_generations", "rollout_data_dir", "validation_data_dir"),
        ignored("a checkpoint is written on a signal, too", "esi_redundant_time"),
        ignored("trainer.keep_checkpoints deletes old ones", "del_local_ckpt_after_load"),
        ignored("there is one implementation", "use_legacy_worker_impl"),
        ignored("only used by verl's asynchronous trainers", "v1.*"),
    ),
)
