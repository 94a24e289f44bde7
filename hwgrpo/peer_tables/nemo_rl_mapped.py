"""NeMo-RL's core settings, with the values of its `examples/configs/grpo_math_1B.yaml`; all others are not read."""

from __future__ import annotations

from hwgrpo.peer_tables.peer_names import PeerNames
from hwgrpo.peer_tables.peer_row import ignored, joint, refused, same, unread

_MICRO = "trainer.tokens_per_micro_batch"
_RATIO = "algorithm.correction.high"
_LORA = "policy.dtensor_cfg.lora_cfg."
_VLLM = "policy.generation.vllm_cfg."
_OPTIM = "policy.optimizer.kwargs."
_STRATEGY = "trainer.strategy"
_MEGATRON_OPTIM = "policy.megatron_cfg.optimizer."
_MEGATRON_SCHEDULE = "policy.megatron_cfg.scheduler."
_FUSED_ADAM = "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"
_PEFT = "policy.megatron_cfg.peft."
_LONGEST = "policy.max_total_sequence_length without it"

_MAPPED = (
    same("policy.model_name", "model.path", "Qwen/Qwen2.5-1.5B"),
    same("policy.tokenizer.name", "model.tokenizer", None, type="text"),
    joint("data.dataset_name", "data.train", None, "datasets that NeMo-RL itself prepares are refused", type="text"),
    joint("data.train_data_path", "data.train", None, type="text"),
    joint("data.val_data_path", "data.validation", None, type="text"),
    joint("data.train_split", "data.split", None, type="text"),
    joint("data.val_split", "data.validation_split", None, type="text"),
    same("data.input_key", "data.prompt_key", "input"),
    same("data.output_key", "data.ground_truth_key", "output"),
    joint("data.max_input_seq_length", "data.max_prompt_tokens", None, _LONGEST, type="int"),
    same("data.shuffle", "data.shuffle", True),
    same("grpo.num_prompts_per_step", "trainer.prompts_per_step", 32, "both count prompts"),
    joint("grpo.num_generations_per_prompt", "rollout.n", 16),
    joint("policy.train_global_batch_size", "trainer.prompts_per_update", 512, "it counts prompts, not responses"),
    joint("policy.train_micro_batch_size", _MICRO, 4, "it counts tokens, not sequences"),
    joint("policy.max_total_sequence_length", "rollout.max_response_tokens", 512, "prompt and response together there"),
    joint("policy.generation.max_new_tokens", "rollout.max_response_tokens", None, type="int"),
    same("grpo.max_num_epochs", "trainer.epochs", 1),
    joint("grpo.max_num_steps", "trainer.max_steps", 1_000_000, "0 is no limit here; the larger one of both wins"),
    same("grpo.seed", "trainer.seed", 42),
    same("grpo.val_period", "trainer.validate_every", 10),
    same("grpo.val_at_start", "trainer.validate_at_start", False),
    same("grpo.max_val_samples", "data.validation_max_rows", 256),
    joint(
        "grpo.adv_estimator.name",
        "algorithm.advantage.name",
        "grpo",
        values={"grpo": "grpo", "reinforce_plus_plus": "reinforce_plus_plus_baseline", "gdpo": "", "opd": ""},
    ),
    joint("grpo.adv_estimator.minus_baseline", "algorithm.advantage.name", True, "false is reinforce_plus_plus"),
    joint("grpo.normalize_rewards", "algorithm.advantage.std", True),
    joint(
        "grpo.use_leave_one_out_baseline",
        "algorithm.advantage.name",
        True,
        "rloo, without the normalization",
    ),
    same("grpo.overlong_filtering", "algorithm.mask_truncated", False),
    joint("grpo.use_dynamic_sampling", "algorithm.filter_groups.enable", False),
    joint("grpo.dynamic_sampling_max_gen_batches", "algorithm.filter_groups.max_rounds", 10),
    joint("loss_fn.ratio_clip_min", "algorithm.loss.clip_low", 0.2),
    joint("loss_fn.ratio_clip_max", "algorithm.loss.clip_high", 0.2),
    joint("loss_fn.ratio_clip_c", "algorithm.loss.dual_clip", None, type="number"),
    joint("loss_fn.sequence_level_importance_ratios", "algorithm.loss.name", False, "true is gspo"),
    joint("loss_fn.use_cispo", "algorithm.loss.name", False, "true is cispo"),
    joint(
        "loss_fn.token_level_loss", "algorithm.aggregation.name", True, "true is token-mean, false seq-mean-token-mean"
    ),
    joint("loss_fn.reference_policy_kl_penalty", "algorithm.kl.coef", 0.01),
    joint(
        "loss_fn.reference_policy_kl_type",
        "algorithm.kl.estimator",
        "k3",
        "their gradients have the score term since 0.7: that of k2",
        values={"k1": "k1+", "k2": "k2", "k3": "k3+"},
    ),
    joint("loss_fn.kl_input_clamp_value", "algorithm.kl.input_clamp", 20.0),
    joint("loss_fn.kl_output_clamp_value", "algorithm.kl.output_clamp", 10.0),
    joint("loss_fn.force_on_policy_ratio", "algorithm.loss.name", False, "the ratio is 1 with one update per step"),
    joint("loss_fn.use_importance_sampling_correction", "algorithm.correction.name", False),
    joint("loss_fn.truncated_importance_sampling_ratio", _RATIO, None, type="number"),
    joint("loss_fn.truncated_importance_sampling_ratio_min", "algorithm.correction.low", None, type="number"),
    joint(
        "loss_fn.truncated_importance_sampling_type",
        "algorithm.correction.name",
        "tis",
        values={"tis": "token_truncate", "icepop": "token_mask", "seq-mask-tis": ""},
    ),
    *(
        joint(_MEGATRON_OPTIM + key, here, default, "with megatron_cfg.enabled")
        for key, here, default in (
            ("lr", "optim.lr", 5e-6),
            ("weight_decay", "optim.weight_decay", 0.01),
            ("adam_beta1", "optim.betas", 0.9),
            ("adam_beta2", "optim.betas", 0.999),
            ("adam_eps", "optim.eps", 1e-8),
        )
    ),
    joint(
        _MEGATRON_OPTIM + "optimizer",
        "optim.name",
        "adam",
        "with megatron_cfg.enabled",
        values={"adam": "adamw", "sgd": ""},
    ),
    joint(
        _MEGATRON_SCHEDULE + "lr_decay_style",
        "optim.schedule",
        "constant",
        "with megatron_cfg.enabled",
        values={"constant": "constant", "linear": "", "cosine": ""},
    ),
    joint(_MEGATRON_SCHEDULE + "lr_warmup_iters", "optim.warmup_steps", 13, "steps there, with megatron_cfg.enabled"),
    same("policy.max_grad_norm", "optim.grad_clip", 1.0),
    joint(
        "policy.optimizer.name",
        "optim.name",
        "torch.optim.AdamW",
        values={"torch.optim.AdamW": "adamw", _FUSED_ADAM: "adamw"},
    ),
    same(_OPTIM + "lr", "optim.lr", 5e-6),
    same(_OPTIM + "weight_decay", "optim.weight_decay", 0.01),
    same(_OPTIM + "betas", "optim.betas", [0.9, 0.999]),
    same(_OPTIM + "eps", "optim.eps", 1e-8),
    joint(
        "policy.scheduler",
        "optim.schedule, optim.warmup_steps",
        None,
        "LinearLR, then ConstantLR; it counts steps",
        type="list",
    ),
    joint(
        "policy.precision",
        "model.dtype",
        "bfloat16",
        values={"bfloat16": "bfloat16", "float32": "float32", "float16": ""},
    ),
    same("policy.generation.temperature", "rollout.temperature", 1.0),
    same("policy.generation.top_p", "rollout.top_p", 1.0),
    same("policy.generation.top_k", "rollout.top_k", None, type="int"),
    same("policy.generation.stop_strings", "rollout.stop", None, type="list"),
    same("policy.generation.stop_token_ids", "rollout.stop_token_ids", None, type="list"),
    joint(
        "policy.generation.backend",
        "rollout.engine",
        "vllm",
        values={"vllm": "vllm", "sglang": "sglang_server", "megatron": "local", "trtllm": "", "dynamo": ""},
    ),
    joint("policy.generation.colocated.enabled", "rollout.engine", True, "vllm with it, vllm_server without it"),
    joint(_VLLM + "tensor_parallel_size", "rollout.tensor_parallel_size", 1),
    joint(_VLLM + "gpu_memory_utilization", "rollout.gpu_memory_utilization", 0.6),
    joint(_VLLM + "enforce_eager", "rollout.enforce_eager", False),
    joint("policy.dtensor_cfg.enabled", _STRATEGY, True, "it is fsdp2"),
    joint("policy.megatron_cfg.enabled", _STRATEGY, False, "it is trained by fsdp2"),
    joint("policy.dtensor_cfg.tensor_parallel_size", "trainer.tensor_parallel_size", 1),
    joint("policy.megatron_cfg.tensor_model_parallel_size", "trainer.tensor_parallel_size", 1),
    joint("policy.dtensor_cfg.context_parallel_size", "trainer.sequence_parallel_size", 1),
    joint("policy.megatron_cfg.context_parallel_size", "trainer.sequence_parallel_size", 1),
    joint("policy.dtensor_cfg.cpu_offload", "trainer.fsdp2.offload", False),
    joint("policy.dtensor_cfg.activation_checkpointing", "model.gradient_checkpointing", False),
    joint("policy.megatron_cfg.activation_checkpointing", "model.gradient_checkpointing", False),
    joint(_LORA + "enabled", "model.lora.rank", False, "rank 0 is false"),
    joint(_LORA + "dim", "model.lora.rank", 8),
    joint(_LORA + "alpha", "model.lora.alpha", 32.0),
    joint(_LORA + "dropout", "model.lora.dropout", 0.0),
    joint(_LORA + "target_modules", "model.lora.target_modules", None, "all linear layers without it", type="list"),
    joint(
        _LORA + "match_all_linear", "model.lora.target_modules", True, "all linear layers, whatever target_modules says"
    ),
    joint(_PEFT + "enabled", "model.lora.rank", False, "with megatron_cfg.enabled"),
    joint(_PEFT + "dim", "model.lora.rank", 8, "with megatron_cfg.enabled"),
    joint(_PEFT + "alpha", "model.lora.alpha", 32.0, "with megatron_cfg.enabled"),
    joint(_PEFT + "dropout", "model.lora.dropout", 0.0, "with megatron_cfg.enabled"),
    joint(_PEFT + "target_modules", "model.lora.target_modules", None, "Megatron's names are refused", type="list"),
    joint("checkpointing.enabled", "trainer.save_every", True),
    joint("checkpointing.save_period", "trainer.save_every", 10),
    joint("checkpointing.keep_top_k", "trainer.keep_checkpoints", 3, "the newest ones, not the best", type="int"),
    same("checkpointing.checkpoint_dir", "trainer.output_dir", "results/grpo"),
    *(joint(f"logger.{name}_enabled", "observe.loggers", False) for name in ("wandb", "tensorboard", "swanlab")),
    joint("logger.wandb.project", "observe.project", None, type="text"),
    joint("logger.wandb.name", "observe.run_name", None, type="text"),
    joint("env.*", "reward.functions", note="env.math is the reward math"),
    joint("cluster.gpus_per_node", "", 1, "hwgrpo launch --devices"),
    joint("cluster.num_nodes", "", 1, "hwgrpo launch --nodes"),
)

_OTHERS = (
    *ignored(
        "scoring, sampling and validation are cut by tokens",
        *(
            "policy.logprob_batch_size",
            "policy.generation_batch_size",
            "grpo.val_batch_size",
            "policy.logprob_chunk_size",
        ),
    ),
    *ignored("micro-batches are always cut by tokens", "policy.dynamic_batching.*", "policy.sequence_packing.*"),
    *ignored("nothing is padded where it need not be", "policy.make_sequence_length_divisible_by"),
    *ignored("torch's own choice", _OPTIM + "foreach", _OPTIM + "fused"),
    *ignored("the dtype of the policy", _VLLM + "precision"),
    *ignored("derived from the lengths", _VLLM + "max_model_len"),
    *ignored("prompts go to the engine as they come", _VLLM + "async_engine"),
    *ignored("a round of sampling has up to trainer.prompts_per_step prompts", "grpo.batch_multiplier"),
    *ignored("Megatron's own; trainer.strategy=fsdp2 trains the same gradient", "policy.megatron_cfg.*"),
    *ignored("checkpoints have all that an exact resume needs", "checkpointing.model_save_format"),
    *ignored("the newest checkpoints are kept", "checkpointing.metric_name", "checkpointing.higher_is_better"),
    *ignored("without effect while it is off", "grpo.reward_shaping.*", "grpo.reward_scaling.*", "grpo.async_grpo.*"),
    *refused(
        "steps are sampled by the policy they train",
        "rollout.max_staleness=1 with algorithm.correction",
        False,
        keys=("grpo.async_grpo.enabled",),
    ),
    *refused("responses have one turn", "leaving it out", 1, keys=("grpo.max_rollout_turns",)),
    *refused(
        "rewards are not scaled or shaped",
        "the reward function, or the reward length",
        False,
        keys=("grpo.reward_shaping.enabled", "grpo.reward_scaling.enabled"),
    ),
    *refused(
        "advantages are limited by one bound",
        "algorithm.advantage.clip",
        None,
        keys=("grpo.advantage_clip_low", "grpo.advantage_clip_high"),
    ),
    *refused(
        "the ratio is always that of policy and old policy",
        "trainer.prompts_per_update=null, where it is 1",
        False,
        keys=("loss_fn.disable_ppo_ratio",),
    ),
    *refused(
        "the KL is taken as the policy samples",
        "leaving it out",
        False,
        keys=("loss_fn.use_on_policy_kl_approximation",),
    ),
    *refused("the KL is in the loss there", "algorithm.kl.in_reward", False, keys=("loss_fn.use_kl_in_reward",)),
    *refused(
        "positive examples have no further loss",
        "leaving it out",
        0,
        None,
        keys=("loss_fn.positive_example_nll_weight",),
    ),
    *refused(
        "rows are not left out by their largest error",
        "algorithm.correction.reject",
        None,
        keys=("grpo.seq_logprob_error_threshold",),
    ),
    *refused(
        "several data sets are one list", "data.train=[FILE, FILE] here", None, keys=("data.train", "data.validation")
    ),
    *refused("text around prompts is not added", "prompts as messages", None, keys=("data.prompt_file",)),
    *refused("a system prompt is text here", "data.system_prompt", None, keys=("data.system_prompt_file",)),
    *refused(
        "there is no pipeline parallelism, and experts are not spread by expert",
        "trainer.strategy=fsdp2, which shards all weights",
        1,
        keys=(
            *("policy.megatron_cfg.pipeline_model_parallel_size", "policy.megatron_cfg.expert_model_parallel_size"),
            *(_VLLM + "pipeline_parallel_size", _VLLM + "expert_parallel_size"),
        ),
    ),
    unread(),
)

ROWS = {row.key: row for row in (*_MAPPED, *_OTHERS)}

OLDER = {
    "grpo.adv_estimator.normalize_rewards": "grpo.normalize_rewards",
    "grpo.adv_estimator.use_leave_one_out_baseline": "grpo.use_leave_one_out_baseline",
    "data.train.data_path": "data.train_data_path",
    "data.validation.data_path": "data.val_data_path",
    "data.train.input_key": "data.input_key",
    "data.train.output_key": "data.output_key",
    "data.train.split": "data.train_split",
    "data.validation.split": "data.val_split",
    "data.train.dataset_name": "data.dataset_name",
    "data.default.dataset_name": "data.dataset_name",
    "data.default.input_key": "data.input_key",
    "data.default.output_key": "data.output_key",
    "data.default.prompt_file": "data.prompt_file",
    "data.default.system_prompt_file": "data.system_prompt_file",
    "data.train.prompt_file": "data.prompt_file",
    "data.train.system_prompt_file": "data.system_prompt_file",
    "grpo.use_kl_in_reward": "loss_fn.use_kl_in_reward",
}
"""Names of other versions."""

OVERRIDES = (("data.train.", "data.default."), ("grpo.adv_estimator.", "grpo."))

NEMO_RL = PeerNames("NeMo-RL", ROWS, OLDER, {}, overrides=OVERRIDES)
