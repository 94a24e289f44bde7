"""TRL's settings that have a counterpart, with the defaults of TRL 1.16: `GRPOConfig`, `ModelConfig`, script arguments.

A choice whose value here is "" is legal in TRL and refused here.
"""

from __future__ import annotations

from hwgrpo.migrate.tables.peer_row import joint, same

REWARD = "reward.functions"
_COMPLETIONS = "trainer.prompts_per_step"
_COUNTS = "it counts prompts over all ranks, not completions"
_SCHEDULE = "optim.schedule"
_STRATEGY = "trainer.strategy"
LOSSES = {
    "grpo": ("ppo_clip", "seq-mean-token-mean"),
    "bnpo": ("ppo_clip", "token-mean"),
    "dapo": ("ppo_clip", "token-mean"),
    "dr_grpo": ("ppo_clip", "seq-mean-token-sum-norm"),
    "luspo": ("ppo_clip", "seq-mean-token-sum"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
    "vespo": ("vespo", "token-mean"),
}
"""TRL's loss_type -> policy loss, aggregation."""

_ALGORITHM = (
    joint(
        "loss_type",
        "algorithm.aggregation.name, algorithm.loss.name",
        "dapo",
        values={name: f"{aggregation} | loss {loss}" for name, (loss, aggregation) in LOSSES.items()},
    ),
    joint(
        "importance_sampling_level",
        "algorithm.loss.name",
        "token",
        values={"token": "ppo_clip", "sequence": "gspo"},
    ),
    joint("epsilon", "algorithm.loss.clip_low, algorithm.loss.clip_high", 0.2, "both bounds without epsilon_high"),
    joint("epsilon_high", "algorithm.loss.clip_high", None, "with cispo the cap c is c - 1 here", type="number"),
    same("delta", "algorithm.loss.delta", None, type="number"),
    joint("sapo_temperature_neg", "algorithm.loss.tau_neg", 1.05),
    joint("sapo_temperature_pos", "algorithm.loss.tau_pos", 1.0),
    joint("vespo_k_pos", "algorithm.loss.kwargs", 2.0),
    joint("vespo_lambda_pos", "algorithm.loss.kwargs", 3.0),
    joint("vespo_k_neg", "algorithm.loss.kwargs", 3.0),
    joint("vespo_lambda_neg", "algorithm.loss.kwargs", 2.0),
    joint(
        "scale_rewards",
        "algorithm.advantage.std",
        "group",
        "True is group, False is none",
        values={
            "group": "group",
            "batch": "batch",
            "none": "none",
            **dict.fromkeys(("True", "true"), "group"),
            **dict.fromkeys(("False", "false"), "none"),
        },
    ),
    joint(
        "multi_objective_aggregation",
        "algorithm.advantage.name",
        "sum_then_normalize",
        values={"sum_then_normalize": "grpo", "normalize_then_sum": "gdpo"},
    ),
    joint("beta", "algorithm.kl.coef", 0.0),
    joint("use_bias_correction_kl", "algorithm.kl.times_ratio", True),
    joint("sync_ref_model", "algorithm.kl.sync_every", False, "0 is false"),
    joint("ref_model_sync_steps", "algorithm.kl.sync_every", 512, "steps here, updates in TRL"),
    joint("ref_model_mixup_alpha", "algorithm.kl.sync_share", 0.6),
    same("mask_truncated_completions", "algorithm.mask_truncated", False),
    same("top_entropy_quantile", "algorithm.top_entropy_share", 1.0),
    same("off_policy_mask_threshold", "algorithm.off_policy_threshold", None, type="number"),
    same("entropy_coef", "algorithm.entropy_coef", 0.0),
    joint("use_adaptive_entropy", "algorithm.entropy_target", False, "null is false"),
    joint("entropy_target", "algorithm.entropy_target", 0.2),
    joint("entropy_coef_delta", "algorithm.entropy_coef_delta", 0.005),
    joint("entropy_coef_min", "algorithm.entropy_coef_min", 0.0),
    joint("entropy_coef_max", "algorithm.entropy_coef_max", 1.0),
    joint("vllm_importance_sampling_correction", "algorithm.correction.name", True, "with use_vllm; none is false"),
    joint(
        "vllm_importance_sampling_mode",
        "algorithm.correction.name",
        "sequence_mask",
        values={name: name for name in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")},
    ),
    joint("vllm_importance_sampling_clip_max", "algorithm.correction.high", 3.0),
    joint("vllm_importance_sampling_clip_min", "algorithm.correction.low", None, type="number"),
    same("router_aux_loss_coef", "model.router_loss_coef", None, "null: 0, not the model's own", type="number"),
)

_BATCHES = (
    joint("num_generations", "rollout.n", 8),
    joint("per_device_train_batch_size", _COMPLETIONS, 8, _COUNTS),
    joint("gradient_accumulation_steps", "trainer.prompts_per_update", 1, "prompts over all ranks and micro-batches"),
    joint("steps_per_generation", _COMPLETIONS, None, "prompts of one update; a step has several", type="int"),
    joint("generation_batch_size", _COMPLETIONS, None, _COUNTS, type="int"),
    joint("num_iterations", "trainer.epochs_per_batch", 1),
    joint("num_train_epochs", "trainer.epochs", 3.0),
    joint("max_steps", "trainer.max_steps", -1, "it counts batches of responses, not updates"),
    joint("num_processes", "", 1, "hwgrpo launch --devices"),
)

_OPTIMIZER = (
    same("learning_rate", "optim.lr", 1e-6),
    same("weight_decay", "optim.weight_decay", 0.0, "norms and biases are exempt, as in TRL"),
    joint("adam_beta1", "optim.betas", 0.9, "a list of both"),
    joint("adam_beta2", "optim.betas", 0.999, "a list of both"),
    same("adam_epsilon", "optim.eps", 1e-8),
    same("max_grad_norm", "optim.grad_clip", 1.0),
    joint(
        "lr_scheduler_type",
        _SCHEDULE,
        "linear",
        values={
            "linear": "linear",
            "cosine": "cosine",
            "constant": "constant",
            "constant_with_warmup": "constant | with optim.warmup_steps",
            "cosine_with_min_lr": "cosine | with optim.min_lr_ratio",
            **dict.fromkeys(
                (
                    *("cosine_with_restarts", "polynomial", "inverse_sqrt", "reduce_lr_on_plateau"),
                    *("cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy"),
                ),
                "",
            ),
        },
    ),
    joint("lr_scheduler_kwargs", "optim.min_lr_ratio", None, "min_lr, min_lr_rate", type="mapping"),
    joint(
        "warmup_steps",
        "optim.warmup_steps, optim.warmup_ratio",
        0.0,
        "below 1 it is a share of the updates; without effect beside constant",
    ),
    same(
        "optim",
        "optim.name",
        "adamw_torch_fused",
        values={
            **dict.fromkeys(
                (
                    *("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused"),
                    "paged_adamw_32bit",
                ),
                "adamw",
            ),
            **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), "adamw_8bit"),
            **dict.fromkeys(
                (
                    *("adafactor", "adamw_anyprecision", "adamw_torch_4bit", "ademamix", "sgd", "adagrad"),
                    *("ademamix_8bit", "lion_8bit", "lion_32bit", "paged_ademamix_32bit", "paged_ademamix_8bit"),
                    *("paged_lion_32bit", "paged_lion_8bit", "rmsprop", "rmsprop_bnb", "rmsprop_bnb_8bit"),
                    *("rmsprop_bnb_32bit", "galore_adamw", "galore_adamw_8bit", "galore_adafactor"),
                    *("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"),
                    *("lomo", "adalomo", "grokadamw", "schedule_free_radam", "schedule_free_adamw"),
                    *("schedule_free_sgd", "apollo_adamw", "apollo_adamw_layerwise", "stable_adamw"),
                ),
                "",
            ),
        },
    ),
)

_GENERATION = (
    same("max_completion_length", "rollout.max_response_tokens", 512),
    joint("max_prompt_length", "data.max_prompt_tokens", None, "TRL has no limit since 1.0", type="int"),
    same("temperature", "rollout.temperature", 1.0),
    same("top_p", "rollout.top_p", 1.0),
    same("top_k", "rollout.top_k", 0, replaces={-1: 0}),
    same("min_p", "rollout.min_p", None, "0 is off", type="number"),
    joint("generation_kwargs", "rollout.stop", None, "stop strings; others are refused", type="mapping"),
    same("chat_template_kwargs", "data.chat_template_kwargs", None, type="mapping"),
    joint(
        "max_tool_calling_iterations",
        "rollout.agent.max_turns",
        None,
        "turns: one more, which reads the last results",
        type="int",
    ),
    joint("use_vllm", "rollout.engine", False, "vllm in the training process, vllm_server in its own"),
    joint("vllm_mode", "rollout.engine", "colocate", values={"colocate": "vllm", "server": "vllm_server"}),
    joint("vllm_enable_sleep_mode", "rollout.sleep_mode", False, "auto is true, never is false"),
    joint("vllm_server_base_url", "rollout.server.url", None, type="text"),
    joint("vllm_server_host", "rollout.server.url", "0.0.0.0"),
    joint("vllm_server_port", "rollout.server.url", 8000),
    joint("vllm_server_timeout", "rollout.server.start_timeout", 240.0),
    joint("vllm_gpu_memory_utilization", "rollout.gpu_memory_utilization", type="number", note="TRL's default is 0.3"),
    joint("vllm_max_model_length", "rollout.max_model_len", None, type="int"),
    joint("vllm_tensor_parallel_size", "rollout.tensor_parallel_size", 1),
)

_RUN = (
    same("output_dir", "trainer.output_dir", "trainer_output"),
    same("seed", "trainer.seed", 42),
    same("shuffle_dataset", "data.shuffle", True),
    same("full_determinism", "trainer.deterministic", False),
    joint("use_cpu", "backend.name", False, "true is cpu"),
    joint(
        "eval_strategy",
        "trainer.validate_every",
        "no",
        values={"no": "0 | no validation", "steps": "eval_steps", "epoch": "the steps of an epoch"},
    ),
    joint("eval_steps", "trainer.validate_every", None, "steps here, updates in TRL", type="number"),
    joint("eval_on_start", "trainer.validate_at_start", False),
    joint("num_generations_eval", "trainer.validation_n", None, "beside a greedy response", type="int"),
    joint(
        "save_strategy",
        "trainer.save_every",
        "steps",
        "a checkpoint at the end is always written",
        values={"no": "0", "steps": "save_steps", "epoch": "the steps of an epoch", "best": ""},
    ),
    joint("save_steps", "trainer.save_every", 500.0, "steps here, updates in TRL"),
    same("save_total_limit", "trainer.keep_checkpoints", type="int", note="TRL keeps all by default"),
    joint("resume_from_checkpoint", "trainer.resume", None, type="bool|text"),
    joint("report_to", "observe.loggers", "none", type="text|list"),
    joint("run_name", "observe.run_name", None, type="text"),
    joint("project", "observe.project", "huggingface"),
    joint(
        "logging_strategy",
        "observe.log_every",
        "steps",
        values={"no": "0", "steps": "logging_steps", "epoch": "the steps of an epoch"},
    ),
    joint("logging_steps", "observe.log_every", 10.0, "steps here, updates in TRL"),
    joint("disable_tqdm", "observe.progress", None, "plain is true", type="bool"),
    joint("log_completions", "observe.completions_per_step", False, "completions.jsonl has them"),
    joint("num_completions_to_print", "observe.completions_per_step", None, type="int"),
    joint("ddp_timeout", "trainer.process_group_timeout", type="int", note="TRL's default is 1800"),
    joint("fsdp", _STRATEGY, None, "fsdp2", type="bool|text|list"),
    joint("fsdp_config", "trainer.fsdp2.reshard_after_forward, trainer.fsdp2.offload", None, type="text|mapping"),
    joint("deepspeed", "trainer.deepspeed.stage, trainer.strategy", None, "with its stage", type="text|mapping"),
    joint("ds3_gather_for_generation", "", True, "rollout.engine=local gathers module by module"),
)

_MODEL = (
    joint(
        "model_name_or_path",
        "model.path, model.train_vision, model.lora.vision",
        None,
        "with the tower of a model that reads images, which TRL trains, too",
        type="text",
    ),
    joint("model_revision", "model.revision", "main"),
    same("trust_remote_code", "model.trust_remote_code", False),
    joint("attn_implementation", "model.attention", None, "auto chooses", type="text"),
    joint("model_init_kwargs", "model.revision, model.attention", None, "revision, dtype", type="text|mapping"),
    same("gradient_checkpointing", "model.gradient_checkpointing", True),
    joint("bf16", "model.dtype", None, "true is bfloat16", type="bool"),
    same(
        "cast_lm_head_to_fp32",
        "kernels.logits_dtype",
        False,
        "true is float32",
        replaces={True: "float32", False: "auto"},
    ),
    joint("dtype", "", "float32", "parameters are fp32 masters", type="text"),
    joint("use_peft", "model.lora.rank", False, "0 is off"),
    joint("lora_r", "model.lora.rank", 16),
    joint("lora_alpha", "model.lora.alpha", 32),
    joint("lora_dropout", "model.lora.dropout", 0.05),
    joint("lora_target_modules", "model.lora.target_modules", None, type="text|list"),
    joint("use_rslora", "model.lora.rslora", False),
    joint("use_dora", "model.lora.dora", False),
    joint("load_in_4bit", "model.quantize", False, "true is nf4"),
    joint("load_in_8bit", "model.quantize", False, "true is int8"),
)

_SCRIPT = (
    joint("dataset_name", "data.train", None, type="text"),
    joint("dataset_train_split", "data.split", "train"),
    joint("dataset_test_split", "data.validation_split", "test"),
    joint("datasets", "data.train", None, "a list of path and split", type="list"),
    joint("reward_funcs", REWARD, None, "e.g. [path/to/file.py:function]", type="text|list"),
    joint("reward_weights", REWARD, None, "each has a weight, e.g. [{name: math, weight: 0.5}]", type="list"),
    joint("reward_model_name_or_path", REWARD, None, "the reward reward_model", type="text"),
)

_OPEN_R1 = (
    joint("dataset_prompt_column", "data.prompt_key", "prompt", "of open-r1"),
    joint("system_prompt", "data.system_prompt", None, "of open-r1", type="text"),
)

MAPPED = (*_BATCHES, *_ALGORITHM, *_OPTIMIZER, *_GENERATION, *_MODEL, *_SCRIPT, *_RUN, *_OPEN_R1)
