"""What settings of verl and TRL are called here, for whoever types one out of habit.

Right of each name stands the setting or value here; behind ` | ` what differs. A name that means something else here
is left out, and so is one without a counterpart.
"""

from __future__ import annotations

from collections.abc import Mapping

from hwgrpo.catalog import ENGINES
from hwgrpo.peer_tables.verl_names import counterparts

_CLIP = "algorithm.loss.clip_low, algorithm.loss.clip_high | both bounds"
_COMPLETIONS = "trainer.prompts_per_step | it counts prompts over all ranks, not completions"
_TOKENS = "trainer.tokens_per_micro_batch | it counts tokens, not sequences"
_REWARD = "reward.functions | e.g. [path/to/file.py:function]"

VERL = {key: f"{row.here} | {row.note}" if row.note else row.here for key, row in counterparts() if key != row.here}
"""Keys of `verl.trainer.main_ppo`, from the tables of the importer."""

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
_OTHERS: Mapping[str, Mapping[str, str]] = {
    "algorithm.advantage.name": {"dr_grpo": "grpo | with algorithm.advantage.std=none"},
    "algorithm.advantage.std": {"true": "group", "True": "group", "false": "none", "False": "none"},
    "algorithm.loss.name": {
        "grpo": "ppo_clip | with algorithm.aggregation.name=seq-mean-token-mean",
        "dapo": "ppo_clip | with algorithm.aggregation.name=token-mean",
        "dr_grpo": "ppo_clip | with algorithm.aggregation.name=seq-mean-token-sum-norm",
    },
    "algorithm.aggregation.name": {
        "dapo": "token-mean",
        "grpo": "seq-mean-token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
        "luspo": "seq-mean-token-sum",
    },
    "model.dtype": _DTYPES,
    "rollout.dtype": _DTYPES,
    "kernels.logits_dtype": _DTYPES,
    "optim.name": {
        **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), "adamw"),
        "adamw_bnb_8bit": "adamw_8bit",
    },
    "trainer.offload": {"true": "optimizer", "True": "optimizer", "false": "none", "False": "none"},
    "optim.schedule": {"constant_with_warmup": "constant | with optim.warmup_steps"},
    "rollout.engine": {"colocate": "vllm", "server": "vllm_server"},
}
"""Setting here -> value of TRL, or of habit -> value here."""


_CHOICES = (
    *("algorithm.advantage.name", "algorithm.loss.name", "algorithm.kl.estimator", "algorithm.correction.name"),
    *("data.overlong", "model.dtype", "rollout.dtype", "rollout.engine", "optim.name", "trainer.strategy"),
)
"""Settings of which verl has other names of values."""


def _values() -> dict[str, dict[str, str]]:
    """Return the values of verl whose name here is another one, and the others."""
    values: dict[str, dict[str, str]] = {key: {} for key in _OTHERS}
    for _, row in counterparts():
        known = {here.partition(" | ")[0] for here in row.values.values()}
        renamed = {
            value: here for value, here in row.values.items() if here and value not in {*known, *ENGINES.names()}
        }
        if renamed and row.here in _CHOICES:
            values.setdefault(row.here, {}).update(renamed)
    return {key: {**of_verl, **_OTHERS.get(key, {})} for key, of_verl in values.items()}


VALUES = _values()
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
