"""ROLL's core settings of its RLVR pipeline, with ROLL's defaults; all others are not read."""

from __future__ import annotations

from hwgrpo.peer_tables.peer_names import PeerNames
from hwgrpo.peer_tables.peer_row import ignored, joint, refused, same, unread

_TRAIN, _INFER = "actor_train.", "actor_infer."
_ARGUMENTS = _TRAIN + "training_args."
_MODEL = _TRAIN + "model_args."
_STRATEGY = _TRAIN + "strategy_args.strategy_config"
_ENGINE = _INFER + "strategy_args.strategy_config"
_UPDATE = "trainer.prompts_per_update"
_ADVANTAGE = "algorithm.advantage.name, algorithm.advantage.std"
_KINDS = {"group": "group", "batch": "batch", "running": "", "None": "none"}
_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")

_MAPPED = (
    same("pretrain", "model.path", None, type="text"),
    joint(_TRAIN + "data_args.file_name", "data.train", None, type="text|list"),
    same(_TRAIN + "data_args.messages", "data.prompt_key", None, type="text"),
    joint("validation.data_args.file_name", "data.validation", None, type="text|list"),
    same("rollout_batch_size", "trainer.prompts_per_step", 128, "both count prompts"),
    joint("num_return_sequences_in_group", "rollout.n", 1),
    joint(_ARGUMENTS + "per_device_train_batch_size", _UPDATE, 8, "responses on a device"),
    joint(_ARGUMENTS + "gradient_accumulation_steps", _UPDATE, 1, "micro-batches of an update"),
    joint(_TRAIN + "device_mapping", _UPDATE, None, "hwgrpo launch --devices", type="text|list"),
    same("ppo_epochs", "trainer.epochs_per_batch", 1),
    joint("prompt_length", "data.max_prompt_tokens", 1024),
    joint("response_length", "rollout.max_response_tokens", None, type="int"),
    joint("sequence_length", "rollout.max_response_tokens", None, "prompt and response together there", type="int"),
    same("max_steps", "trainer.max_steps", 500),
    same("save_steps", "trainer.save_every", 50),
    same("eval_steps", "trainer.validate_every", 10),
    same("logging_steps", "observe.log_every", 1),
    joint("max_ckpt_to_keep", "trainer.keep_checkpoints", 0, "0 keeps all there"),
    same("output_dir", "trainer.output_dir", "./output"),
    same("seed", "trainer.seed", 42),
    joint("resume_from_checkpoint", "trainer.resume", False, type="bool|text"),
    joint("val_n_sample", "trainer.validation_n", 1, "and a greedy response"),
    joint(
        "adv_estimator",
        _ADVANTAGE,
        "gae",
        "with norm_mean_type and norm_std_type",
        values={**dict.fromkeys(("grpo", "reinforce"), "grpo"), "gae": "", "gigpo": "", "step_reinforce": ""}
        | {"agentic_reinforce": ""},
    ),
    joint("norm_mean_type", _ADVANTAGE, "None", "of reinforce", values=_KINDS),
    joint("norm_std_type", _ADVANTAGE, "None", "of reinforce", values=_KINDS),
    joint("whiten_advantages", _ADVANTAGE, False, "of reinforce: reinforce_plus_plus and its baseline"),
    same("advantage_clip", "algorithm.advantage.clip", None, type="number"),
    joint(
        "pg_variant",
        "algorithm.loss.name",
        "ppo",
        values={"ppo": "ppo_clip", "cispo": "cispo", "vanilla": "", "tis": "", "topr": "", "kimi15": ""},
    ),
    joint(
        _TRAIN + "worker_cls",
        "algorithm.loss.name",
        None,
        "ActorPGWorker needs pg_variant",
        type="text",
    ),
    joint(_TRAIN + "cispo_epsilon_low", "algorithm.loss.clip_low", 0.1, "of cispo"),
    joint(_TRAIN + "cispo_epsilon_high", "algorithm.loss.clip_high", 0.1, "of cispo"),
    joint("importance_sampling", "algorithm.loss.name", "token", values={"token": "ppo_clip", "seq": "gspo"}),
    joint("pg_clip", "algorithm.loss.clip_low, algorithm.loss.clip_high", 0.2, "both bounds"),
    joint("use_pg_clip_range", "algorithm.loss.clip_low, algorithm.loss.clip_high", False),
    joint("pg_clip_low", "algorithm.loss.clip_low", 0.2, "with use_pg_clip_range"),
    joint("pg_clip_high", "algorithm.loss.clip_high", 0.2, "with use_pg_clip_range"),
    joint("dual_clip_loss", "algorithm.loss.dual_clip", False, "true is 1 + 2 pg_clip"),
    joint(
        "loss_agg_mode",
        "algorithm.aggregation.name",
        "seq-mean-token-mean",
        values={**{mode: mode for mode in _MODES}, "seq-mean-token-sum-norm": ""},
    ),
    joint("use_kl_loss", "algorithm.kl.coef", False, "0 is false; the estimator is k3"),
    joint("kl_loss_coef", "algorithm.kl.coef", 0.0),
    joint("add_token_level_kl", "algorithm.kl.coef", False),
    joint("init_kl_coef", "algorithm.kl.coef", 0.2, "of add_token_level_kl"),
    same("entropy_loss_coef", "algorithm.entropy_coef", 0.0),
    same("max_len_mask", "algorithm.mask_truncated", False),
    joint("reward_clip", "reward.functions", None, type="number"),
    joint("rewards.*", "reward.functions", note="by worker_cls: rules of mathematics are the reward math"),
    joint("train_infer_correction.is_weight.enabled", "algorithm.correction.name", False),
    joint(
        "train_infer_correction.is_weight.weight_type",
        "algorithm.correction.name",
        "token",
        values={
            "token": "token_truncate",
            "geometric": "geometric_truncate",
            "sequence": "sequence_truncate",
            "segment": "",
        },
    ),
    joint("train_infer_correction.is_weight.upper_bound", "algorithm.correction.high", 1.2),
    same(_ARGUMENTS + "learning_rate", "optim.lr", 5e-5),
    same(_ARGUMENTS + "weight_decay", "optim.weight_decay", 0.0),
    joint(_ARGUMENTS + "warmup_steps", "optim.warmup_steps", 0, "without effect beside constant, except with Megatron"),
    joint(_ARGUMENTS + "warmup_ratio", "optim.warmup_ratio", 0.0, "where warmup_steps is 0"),
    same(_ARGUMENTS + "adam_epsilon", "optim.eps", None, type="number"),
    joint(_ARGUMENTS + "adam_beta1", "optim.betas", 0.9, "a list of both"),
    joint(_ARGUMENTS + "adam_beta2", "optim.betas", 0.999, "a list of both"),
    joint(
        _ARGUMENTS + "lr_scheduler_type",
        "optim.schedule",
        "linear",
        values={each: each for each in ("constant", "linear", "cosine")} | {"constant_with_warmup": "constant"},
    ),
    same("max_grad_norm", "optim.grad_clip", 1.0),
    same(_INFER + "generating_args.temperature", "rollout.temperature", 0.95),
    same(_INFER + "generating_args.top_p", "rollout.top_p", 0.7),
    joint(_INFER + "generating_args.top_k", "rollout.top_k", 50, "-1 is 0"),
    same(_INFER + "generating_args.stop_strings", "rollout.stop", None, type="list"),
    joint(
        _INFER + "strategy_args.strategy_name",
        "rollout.engine",
        "vllm",
        values={"vllm": "vllm", "sglang": "sglang_server"},
    ),
    joint(_INFER + "device_mapping", "rollout.engine", None, "of its own: vllm_server", type="text|list"),
    joint(_ENGINE + ".gpu_memory_utilization", "rollout.gpu_memory_utilization", None, type="number"),
    joint(_ENGINE + ".mem_fraction_static", "rollout.gpu_memory_utilization", None, type="number"),
    joint(_ENGINE + ".tensor_parallel_size", "rollout.tensor_parallel_size", 1),
    joint(_ENGINE + ".max_model_len", "rollout.max_model_len", None, type="int"),
    joint(
        _TRAIN + "strategy_args.strategy_name",
        "trainer.strategy",
        "megatron_train",
        "megatron_train is fsdp2",
        values={"megatron_train": "fsdp2", "fsdp2_train": "fsdp2", "deepspeed_train": "deepspeed"},
    ),
    joint(_STRATEGY, "trainer.deepspeed.stage", None, "the name of one of ROLL's configs of DeepSpeed", type="text"),
    joint(_STRATEGY + ".zero_optimization.stage", "trainer.deepspeed.stage", None, type="int"),
    joint(
        _STRATEGY + ".zero_optimization.offload_optimizer.device",
        "trainer.deepspeed.offload_optimizer",
        None,
        "cpu is true",
        type="text",
    ),
    joint(_STRATEGY + ".tensor_model_parallel_size", "trainer.tensor_parallel_size", 1),
    joint(_STRATEGY + ".context_parallel_size", "trainer.sequence_parallel_size", 1),
    joint(_MODEL + "ulysses_size", "trainer.sequence_parallel_size", 1),
    same(
        _MODEL + "disable_gradient_checkpointing",
        "model.gradient_checkpointing",
        None,
        "its opposite",
        type="bool",
        replaces={True: False, False: True},
    ),
    same(_MODEL + "dtype", "model.dtype", None, values={"bf16": "bfloat16", "fp32": "float32"}, type="text"),
    joint(_MODEL + "lora_rank", "model.lora.rank", 8, "with lora_target"),
    joint(_MODEL + "lora_alpha", "model.lora.alpha", None, "twice the rank without it", type="number"),
    joint(
        _MODEL + "lora_target",
        "model.lora.target_modules",
        None,
        "names with commas; without it no LoRA",
        type="text|list",
    ),
    joint(_MODEL + "lora_dropout", "model.lora.dropout", 0.0),
    joint(
        "track_with",
        "observe.loggers",
        "tensorboard",
        values={each: each for each in ("tensorboard", "wandb")}
        | {"swanlab": "swanlab", "trackio": "trackio", "stdout": "jsonl", "ml_tracker": "jsonl"},
    ),
    joint("exp_name", "observe.run_name", None, type="text"),
)

_OTHERS = (
    *ignored("GRPO has no critic", "critic.*", "reward_pretrain", "value_clip", "lambd", "critic_warmup"),
    *ignored("the reference model is sharded and scored as the policy is", "reference.*", "enable_reference"),
    *ignored(
        "there is no Ray: torchrun starts one process per device", "num_nodes", "num_gpus_per_node", "rpc_timeout"
    ),
    *ignored("prompts go to the engine as they come", "max_running_requests", "is_num_return_sequences_expand"),
    *ignored("prompts go to the engine as they come", "generate_opt_level", "max_additional_running_prompts"),
    *ignored("the tokenizer's chat template", "actor_train.data_args.template", "actor_infer.data_args.*"),
    *ignored("the tokenizer's chat template", "validation.data_args.template", "global_template"),
    *ignored("data is read by each rank itself", "actor_train.data_args.preprocessing_num_workers"),
    *ignored("scoring is cut by tokens", "actor_train.infer_batch_size", "actor_infer.infer_batch_size"),
    *ignored("model.attention selects it", "actor_train.model_args.flash_attn", "actor_infer.model_args.*"),
    *ignored("derived from the lengths", "actor_infer.generating_args.max_new_tokens"),
    *ignored("the group size", "actor_infer.generating_args.num_return_sequences"),
    *ignored("derived from other settings", "enable_old_logprobs_recompute", "force_disable_old_logprobs_recompute"),
    *ignored("adaptive KL is off", "kl_horizon"),
    *ignored("validations use all prompts at once", "val_batch_size"),
    *ignored("without effect while it is off", "difficulty_low_threshold", "difficulty_high_threshold"),
    *ignored("without effect while it is off", "error_max_len_threshold"),
    *ignored("trainer.output_dir has all of a run", "logging_dir", "checkpoint_config.*", "tracker_kwargs.*"),
    *ignored("passes over the data follow from max_steps", _ARGUMENTS + "num_train_epochs"),
    *refused("a group is compared without discount", "leaving it out", 1, keys=("gamma",)),
    *refused(
        "groups are not left out by their mean reward alone",
        "algorithm.filter_groups.mean_above, mean_below",
        False,
        keys=("difficulty_mask",),
    ),
    *refused(
        "samples are not weighed again",
        "algorithm.filter_groups, data.difficulty",
        False,
        keys=("difficulty_loss_weight", "length_loss_weight"),
    ),
    *refused(
        "rewards are not scaled or shaped",
        "the reward function, or the reward length",
        False,
        keys=("use_reward_scaling", "use_reward_norm", "whiten_rewards", "add_len_reward", "error_max_len_clip"),
    ),
    *refused("positive examples have no further loss", "leaving it out", 0, keys=("postive_loss_coef",)),
    *refused("the policy loss has one weight", "optim.lr", 1, keys=("rl_loss_coef",)),
    *refused("TOPR is not supported", "algorithm.loss.name", False, keys=("use_topr_loss",)),
    *refused("TOPR is not supported", "algorithm.loss.name", 0, keys=("use_topr_neg_loss_coef",)),
    *refused("an adapted KL of the loss", "algorithm.kl.target, with in_reward", None, keys=("target_kl",)),
    *refused(
        "steps are sampled by the policy they train",
        "rollout.max_staleness=1 with algorithm.correction",
        0,
        keys=("async_generation_ratio",),
    ),
    *refused(
        "tokens are left out by the gap of each",
        "algorithm.correction.reject",
        None,
        keys=("train_infer_correction.filters",),
    ),
    *refused(
        "there is no pipeline parallelism",
        "trainer.strategy=fsdp2, which shards all weights",
        1,
        keys=(_STRATEGY + ".pipeline_model_parallel_size",),
    ),
    *refused(
        "experts are not spread over ranks by expert",
        "trainer.strategy=fsdp2, which shards all weights",
        1,
        keys=(_STRATEGY + ".expert_model_parallel_size",),
    ),
    *refused("responses are sampled", "rollout.temperature", True, keys=("actor_infer.generating_args.do_sample",)),
    *refused(
        "tokens are not penalized for repetition",
        "leaving it out",
        1,
        keys=("actor_infer.generating_args.repetition_penalty",),
    ),
    *refused(
        "tokens are left out by two bounds", "leaving it out", False, keys=("actor_train.cispo_use_unified_mask",)
    ),
    *refused(
        "a response is sampled, not searched", "leaving it out", 1, keys=("actor_infer.generating_args.num_beams",)
    ),
    unread(),
)

ROWS = {row.key: row for row in (*_MAPPED, *_OTHERS)}

OLDER = {"actor_train.pg_variant": "pg_variant", "actor_train.model_args.model_name_or_path": "pretrain"}
"""Other places of the same settings."""

ROLL = PeerNames("ROLL", ROWS, OLDER, {})
