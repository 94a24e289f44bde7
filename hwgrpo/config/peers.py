"""What settings of verl and TRL are called here, for whoever types one out of habit.

Right of each name stands the setting or value here; behind ` | ` what differs. A name that means something else here
is left out, and so is one without a counterpart.
"""

from __future__ import annotations

_ACTOR = "actor_rollout_ref.actor."
_MODEL = "actor_rollout_ref.model."
_ROLLOUT = "actor_rollout_ref.rollout."
_CLIP = "algorithm.loss.clip_low, algorithm.loss.clip_high | both bounds"
_COMPLETIONS = "trainer.prompts_per_step | it counts prompts over all ranks, not completions"
_TOKENS = "trainer.tokens_per_micro_batch | it counts tokens, not sequences"
_REWARD = "reward.functions | e.g. [path/to/file.py:function]"

VERL = {
    "algorithm.adv_estimator": "algorithm.advantage.name",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.advantage.std | true is group, false is none",
    "algorithm.rollout_correction.rollout_is": "algorithm.correction.name | token is token_truncate",
    "algorithm.rollout_correction.rollout_is_threshold": "algorithm.correction.high",
    "algorithm.rollout_correction.rollout_is_batch_normalize": "algorithm.correction.normalize",
    "algorithm.rollout_correction.rollout_rs": "algorithm.correction.reject",
    "algorithm.rollout_correction.bypass_mode": "algorithm.old_logprobs | true is rollout",
    "algorithm.filter_groups.max_num_gen_batches": "algorithm.filter_groups.max_rounds",
    "data.train_files": "data.train",
    "data.val_files": "data.validation",
    "data.train_batch_size": "trainer.prompts_per_step",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.max_response_tokens",
    "data.filter_overlong_prompts": "data.overlong | true is filter",
    "data.truncation": "data.overlong | left is truncate_left, right is truncate_right",
    "data.reward_fn_key": "data.source_key",
    "data.train_max_samples": "data.max_rows | 0 uses all",
    "data.val_max_samples": "data.validation_max_rows | 0 uses all",
    "data.apply_chat_template_kwargs": "data.chat_template_kwargs",
    "data.trust_remote_code": "model.trust_remote_code",
    "data.seed": "trainer.seed",
    _MODEL + "path": "model.path",
    _MODEL + "tokenizer_path": "model.tokenizer",
    _MODEL + "custom_chat_template": "model.chat_template | it names a file",
    _MODEL + "trust_remote_code": "model.trust_remote_code",
    _MODEL + "enable_gradient_checkpointing": "model.gradient_checkpointing",
    _MODEL + "lora_rank": "model.lora.rank",
    _MODEL + "lora_alpha": "model.lora.alpha",
    _MODEL + "target_modules": "model.lora.target_modules",
    _MODEL + "lora_adapter_path": "model.lora.adapter",
    _MODEL + "use_remove_padding": "model.layout | auto never pads where it need not",
    _ACTOR + "lora.r": "model.lora.rank",
    _ACTOR + "lora.alpha": "model.lora.alpha",
    _ACTOR + "lora.target_modules": "model.lora.target_modules",
    _ACTOR + "ppo_mini_batch_size": "trainer.prompts_per_update",
    _ACTOR + "ppo_micro_batch_size_per_gpu": _TOKENS,
    _ACTOR + "ppo_max_token_len_per_gpu": "trainer.tokens_per_micro_batch",
    _ACTOR + "ppo_epochs": "trainer.epochs_per_batch",
    _ACTOR + "clip_ratio": _CLIP,
    _ACTOR + "clip_ratio_low": "algorithm.loss.clip_low",
    _ACTOR + "clip_ratio_high": "algorithm.loss.clip_high",
    _ACTOR + "clip_ratio_c": "algorithm.loss.dual_clip",
    _ACTOR + "policy_loss.loss_mode": "algorithm.loss.name | vanilla is ppo_clip",
    _ACTOR + "loss_agg_mode": "algorithm.aggregation.name",
    _ACTOR + "loss_scale_factor": "algorithm.aggregation.norm_length",
    _ACTOR + "use_kl_loss": "algorithm.kl.coef | 0 is off",
    _ACTOR + "kl_loss_coef": "algorithm.kl.coef",
    _ACTOR + "kl_loss_type": "algorithm.kl.estimator | low_var_kl is k3",
    "algorithm.use_kl_in_reward": "algorithm.kl.in_reward",
    "algorithm.kl_penalty": "algorithm.kl.estimator | low_var_kl is k3",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl.coef",
    "algorithm.kl_ctrl.type": "algorithm.kl.target | null is fixed",
    "algorithm.kl_ctrl.target_kl": "algorithm.kl.target",
    "algorithm.kl_ctrl.horizon": "algorithm.kl.horizon",
    _ACTOR + "entropy_coeff": "algorithm.entropy_coef",
    _ACTOR + "calculate_sum_pi_squared": "algorithm.advantage.name | optimal_token_baseline computes it",
    _ACTOR + "grad_clip": "optim.grad_clip",
    _ACTOR + "optim.optimizer": "optim.name",
    _ACTOR + "optim.lr": "optim.lr",
    _ACTOR + "optim.betas": "optim.betas",
    _ACTOR + "optim.weight_decay": "optim.weight_decay",
    _ACTOR + "optim.lr_warmup_steps": "optim.warmup_steps",
    _ACTOR + "optim.lr_scheduler_type": "optim.schedule",
    _ACTOR + "optim.min_lr_ratio": "optim.min_lr_ratio",
    _ACTOR + "strategy": "trainer.strategy",
    _ACTOR + "ulysses_sequence_parallel_size": "trainer.sequence_parallel_size",
    _ACTOR + "fsdp_config.ulysses_sequence_parallel_size": "trainer.sequence_parallel_size",
    _ACTOR + "fsdp_config.gradient_checkpointing": "model.gradient_checkpointing",
    _ACTOR + "fsdp_config.param_offload": "trainer.fsdp2.offload",
    _ACTOR + "fsdp_config.optimizer_offload": "trainer.offload | true is optimizer",
    _ACTOR + "fsdp_config.offload_policy": "trainer.fsdp2.offload",
    _ACTOR + "fsdp_config.reshard_after_forward": "trainer.fsdp2.reshard_after_forward",
    _ROLLOUT + "n": "rollout.n",
    "actor_rollout.ref.rollout.n": "rollout.n",
    _ROLLOUT + "name": "rollout.engine | hf is local, sglang is sglang_server",
    _ROLLOUT + "temperature": "rollout.temperature",
    _ROLLOUT + "top_p": "rollout.top_p",
    _ROLLOUT + "top_k": "rollout.top_k | 0 is off, not -1",
    _ROLLOUT + "tensor_model_parallel_size": "rollout.tensor_parallel_size",
    _ROLLOUT + "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    _ROLLOUT + "free_cache_engine": "rollout.sleep_mode | auto is true on the training devices, never is false",
    _ROLLOUT + "max_model_len": "rollout.max_model_len",
    _ROLLOUT + "max_num_seqs": "rollout.max_sequences",
    _ROLLOUT + "enforce_eager": "rollout.enforce_eager",
    _ROLLOUT + "dtype": "rollout.dtype",
    _ROLLOUT + "engine_kwargs": "rollout.engine_kwargs",
    _ROLLOUT + "response_length": "rollout.max_response_tokens",
    _ROLLOUT + "prompt_length": "data.max_prompt_tokens",
    _ROLLOUT + "val_kwargs.n": "trainer.validation_n",
    "custom_reward_function.path": _REWARD,
    "custom_reward_function.name": _REWARD,
    "reward.custom_reward_function.path": _REWARD,
    "reward.custom_reward_function.name": _REWARD,
    "trainer.total_epochs": "trainer.epochs",
    "trainer.total_training_steps": "trainer.max_steps",
    "trainer.save_freq": "trainer.save_every | 0 is off, not -1",
    "trainer.test_freq": "trainer.validate_every | 0 is off, not -1",
    "trainer.val_before_train": "trainer.validate_at_start",
    "trainer.max_actor_ckpt_to_keep": "trainer.keep_checkpoints",
    "trainer.default_local_dir": "trainer.output_dir",
    "trainer.resume_mode": "trainer.resume | disable is never",
    "trainer.resume_from_path": "trainer.resume",
    "trainer.logger": "observe.loggers | the console is observe.progress",
    "trainer.project_name": "observe.project",
    "trainer.experiment_name": "observe.run_name",
    "trainer.device": "backend.name",
}
"""Keys of `verl.trainer.main_ppo`."""

TRL = {
    "num_generations": "rollout.n",
    "num_generations_eval": "trainer.validation_n",
    "max_completion_length": "rollout.max_response_tokens",
    "max_new_tokens": "rollout.max_response_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "generation_batch_size": _COMPLETIONS,
    "per_device_train_batch_size": _COMPLETIONS,
    "gradient_accumulation_steps": "trainer.prompts_per_update | prompts over all ranks and micro-batches",
    "steps_per_generation": "trainer.prompts_per_update | prompts of one update; a step has several",
    "num_iterations": "trainer.epochs_per_batch",
    "num_train_epochs": "trainer.epochs",
    "max_steps": "trainer.max_steps | it counts batches of responses, not updates",
    "beta": "algorithm.kl.coef",
    "kl_coef": "algorithm.kl.coef",
    "epsilon": _CLIP,
    "epsilon_high": "algorithm.loss.clip_high",
    "loss_type": "algorithm.aggregation.name, algorithm.loss.name | dapo is token-mean, grpo is seq-mean-token-mean",
    "importance_sampling_level": "algorithm.loss.name | sequence is gspo",
    "scale_rewards": "algorithm.advantage.std",
    "delta": "algorithm.loss.delta",
    "off_policy_mask_threshold": "algorithm.off_policy_threshold",
    "top_entropy_quantile": "algorithm.top_entropy_share",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "replay_buffer_size": "algorithm.filter_groups.replay_groups",
    "sync_ref_model": "algorithm.kl.sync_every | 0 is false",
    "ref_model_sync_steps": "algorithm.kl.sync_every",
    "ref_model_mixup_alpha": "algorithm.kl.sync_share",
    "use_bias_correction_kl": "algorithm.kl.times_ratio",
    "entropy_coef": "algorithm.entropy_coef",
    "use_adaptive_entropy": "algorithm.entropy_target | null is false",
    "entropy_target": "algorithm.entropy_target",
    "entropy_coef_delta": "algorithm.entropy_coef_delta",
    "entropy_coef_min": "algorithm.entropy_coef_min",
    "entropy_coef_max": "algorithm.entropy_coef_max",
    "router_aux_loss_coef": "model.router_loss_coef",
    "vllm_importance_sampling_mode": "algorithm.correction.name",
    "vllm_importance_sampling_clip_max": "algorithm.correction.high",
    "vllm_importance_sampling_clip_min": "algorithm.correction.low",
    "vllm_importance_sampling_cap": "algorithm.correction.high",
    "reward_funcs": _REWARD,
    "reward_function": _REWARD,
    "reward_weights": "reward.functions | each has a weight, e.g. [{name: math, weight: 0.5}]",
    "learning_rate": "optim.lr",
    "weight_decay": "optim.weight_decay",
    "adam_beta1": "optim.betas | a list of both",
    "adam_beta2": "optim.betas | a list of both",
    "adam_epsilon": "optim.eps",
    "lr_scheduler_type": "optim.schedule",
    "warmup_steps": "optim.warmup_steps",
    "max_grad_norm": "optim.grad_clip",
    "model_name_or_path": "model.path",
    "model_revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "attn_implementation": "model.attention",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "bf16": "model.dtype | true is bfloat16",
    "optim": "optim.name",
    "load_in_4bit": "model.quantize | true is nf4",
    "load_in_8bit": "model.quantize | true is int8",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "lora_target_modules": "model.lora.target_modules",
    "use_rslora": "model.lora.rslora",
    "use_dora": "model.lora.dora",
    "dataset_name": "data.train",
    "dataset_train_split": "data.split",
    "dataset_test_split": "data.validation_split",
    "chat_template_kwargs": "data.chat_template_kwargs",
    "shuffle_dataset": "data.shuffle",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.min_p",
    "use_vllm": "rollout.engine | vllm in the training process, vllm_server in its own",
    "vllm_mode": "rollout.engine | colocate is vllm, server is vllm_server",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm_enable_sleep_mode": "rollout.sleep_mode | auto is true on the training devices, never is false",
    "vllm_max_model_length": "rollout.max_model_len",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel_size",
    "vllm_server_base_url": "rollout.server.url",
    "vllm_server_host": "rollout.server.host",
    "vllm_server_port": "rollout.server.port",
    "vllm_server_timeout": "rollout.server.start_timeout",
    "output_dir": "trainer.output_dir",
    "seed": "trainer.seed",
    "save_steps": "trainer.save_every",
    "save_total_limit": "trainer.keep_checkpoints",
    "eval_steps": "trainer.validate_every",
    "eval_on_start": "trainer.validate_at_start",
    "resume_from_checkpoint": "trainer.resume",
    "report_to": "observe.loggers",
    "run_name": "observe.run_name",
    "logging_steps": "observe.log_every",
}
"""Fields of TRL's `GRPOConfig`, its base, and the options of its scripts."""

_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "float": "float32"}
VALUES = {
    "algorithm.advantage.name": {
        "grpo_vectorized": "grpo",
        "rloo_vectorized": "rloo",
        "dr_grpo": "grpo | with algorithm.advantage.std=none",
    },
    "algorithm.advantage.std": {"true": "group", "True": "group", "false": "none", "False": "none"},
    "algorithm.loss.name": {
        "vanilla": "ppo_clip",
        "grpo": "ppo_clip | with algorithm.aggregation.name=seq-mean-token-mean",
        "dapo": "ppo_clip | with algorithm.aggregation.name=token-mean",
        "dr_grpo": "ppo_clip | with algorithm.aggregation.name=seq-mean-token-sum-norm",
    },
    "algorithm.kl.estimator": {
        "kl": "k1",
        "kl+": "k1+",
        "mse": "k2",
        "mse+": "k2 | its gradient is that of k2 already",
        "k2+": "k2 | its gradient is that of k2 already",
        "low_var_kl": "k3",
        "low_var_kl+": "k3+",
    },
    "algorithm.aggregation.name": {
        "dapo": "token-mean",
        "grpo": "seq-mean-token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
        "luspo": "seq-mean-token-sum",
    },
    "algorithm.correction.name": {"token": "token_truncate", "sequence": "sequence_truncate"},
    "data.overlong": {"left": "truncate_left", "right": "truncate_right"},
    "model.dtype": _DTYPES,
    "rollout.dtype": _DTYPES,
    "kernels.logits_dtype": _DTYPES,
    "optim.name": {
        **dict.fromkeys(("AdamW", "adamw_torch", "adamw_torch_fused"), "adamw"),
        "Muon": "muon",
        **dict.fromkeys(("AdamW8bit", "adamw_bnb_8bit"), "adamw_8bit"),
    },
    "trainer.offload": {"true": "optimizer", "True": "optimizer", "false": "none", "False": "none"},
    "optim.schedule": {"constant_with_warmup": "constant | with optim.warmup_steps"},
    "rollout.engine": {"hf": "local", "colocate": "vllm", "server": "vllm_server", "sglang": "sglang_server"},
    "trainer.strategy": {"fsdp": "fsdp2"},
}
"""Setting here -> value of verl or TRL -> value here."""


def name_here(key: str) -> str | None:
    """Return the name here of a setting of verl or TRL, or None for another name."""
    key = key.lstrip("+")
    return _sentence(VERL.get(key) or TRL.get(key))


def last_name_here(key: str) -> str | None:
    """Return the same for a key of which only the last name is verl's or TRL's."""
    last = key.rpartition(".")[2]
    found = TRL.get(last) or next((here for name, here in VERL.items() if name.rpartition(".")[2] == last), None)
    return _sentence(found)


def value_here(key: str, value: object) -> str | None:
    """Return the value here for a value of verl or TRL, or None for another one."""
    return _sentence(VALUES.get(key, {}).get(str(value)))


def _sentence(entry: str | None) -> str | None:
    if entry is None:
        return None
    here, _, note = entry.partition(" | ")
    return f"that is {here.replace(', ', ' and ')} here{f' ({note})' if note else ''}"
