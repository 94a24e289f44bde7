"""verl's settings that have a counterpart, with verl's defaults (`verl.trainer.main_ppo`, January and August 2026).

A choice whose value here is "" is legal in verl and refused here.
"""

from __future__ import annotations

from hwgrpo.peer_tables.peer_row import joint, same, section

REWARD = "reward.functions"
_CLIP = "algorithm.loss.clip_low, algorithm.loss.clip_high"
_TYPES_OF_KL = {
    **dict.fromkeys(("kl", "k1"), "k1"),
    **dict.fromkeys(("kl+", "k1+"), "k1+"),
    **dict.fromkeys(("mse", "k2"), "k2"),
    **dict.fromkeys(("mse+", "k2+"), "k2 | its gradient is that of k2 already"),
    **dict.fromkeys(("low_var_kl", "k3"), "k3"),
    **dict.fromkeys(("low_var_kl+", "k3+"), "k3+"),
    "abs": "abs",
    **dict.fromkeys(("full", "abs+"), ""),
}
_STATES = "trainer.offload"
_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")

_ACTOR = section(
    "actor_rollout_ref.actor.",
    joint(
        "strategy",
        "trainer.strategy",
        note="fsdp is fsdp2; its default is left to auto, which gives the same numbers",
        values={
            **dict.fromkeys(("fsdp", "fsdp2", "fsdp_turbo"), "fsdp2"),
            **dict.fromkeys(("megatron", "mindspeed", "veomni", "torchtitan", "automodel"), "fsdp2"),
        },
        type="text",
    ),
    joint("ppo_mini_batch_size", "trainer.prompts_per_update", 256, "both count prompts"),
    joint(
        "ppo_micro_batch_size_per_gpu",
        "trainer.tokens_per_micro_batch",
        None,
        "it counts tokens, not sequences",
        type="int",
    ),
    joint(
        "ppo_micro_batch_size",
        "trainer.tokens_per_micro_batch",
        None,
        "it counts tokens on a device, not sequences",
        type="int",
    ),
    joint("ppo_max_token_len_per_gpu", "trainer.tokens_per_micro_batch", 16384, "with use_dynamic_bsz"),
    joint("use_dynamic_bsz", "trainer.tokens_per_micro_batch", False, "micro-batches are always cut by tokens"),
    same("ppo_epochs", "trainer.epochs_per_batch", 1),
    joint("clip_ratio", _CLIP, 0.2, "both bounds, where clip_ratio_low and clip_ratio_high are null"),
    joint("clip_ratio_low", "algorithm.loss.clip_low", 0.2),
    joint("clip_ratio_high", "algorithm.loss.clip_high", 0.2),
    joint("clip_ratio_c", "algorithm.loss.dual_clip, algorithm.loss.kwargs", 3.0, "of dppo_tv and dppo_kl the cap"),
    same("tau_pos", "algorithm.loss.tau_pos", 1.0),
    same("tau_neg", "algorithm.loss.tau_neg", 1.05),
    joint(
        "policy_loss.loss_mode",
        "algorithm.loss.name",
        "vanilla",
        values={
            "vanilla": "ppo_clip",
            "geo_mean": "gmpo",
            "bypass_mode": "",
            **{
                name: name
                for name in ("gspo", "sapo", "gpg", "clip_cov", "kl_cov", "cispo", "dppo_tv", "dppo_kl", "dro")
            },
        },
    ),
    joint("policy_loss.clip_cov_ratio", "algorithm.loss.kwargs", 0.0002),
    joint("policy_loss.clip_cov_lb", "algorithm.loss.kwargs", 1.0),
    joint("policy_loss.clip_cov_ub", "algorithm.loss.kwargs", 5.0),
    joint("policy_loss.kl_cov_ratio", "algorithm.loss.kwargs", 0.0002),
    joint("policy_loss.ppo_kl_coef", "algorithm.loss.kwargs", 0.1),
    joint("policy_loss.dro_beta", "algorithm.loss.kwargs", None, type="number"),
    joint("loss_agg_mode", "algorithm.aggregation.name", "token-mean", values={mode: mode for mode in _MODES}),
    joint("loss_scale_factor", "algorithm.aggregation.norm_length", None, type="number"),
    same("entropy_coeff", "algorithm.entropy_coef", 0.0),
    joint("use_kl_loss", "algorithm.kl.coef", False, "0 is off"),
    joint("kl_loss_coef", "algorithm.kl.coef", 0.001),
    joint("kl_loss_type", "algorithm.kl.estimator", "low_var_kl", "low_var_kl is k3", values=_TYPES_OF_KL),
    joint("grad_clip", "optim.grad_clip", 1.0),
    same(
        "optim.optimizer",
        "optim.name",
        "AdamW",
        values={**dict.fromkeys(("AdamW", "adamw", "adam"), "adamw"), "AdamW8bit": "adamw_8bit", "Muon": "muon"},
    ),
    same("optim.lr", "optim.lr", 1e-6),
    same("optim.betas", "optim.betas", [0.9, 0.999]),
    same("optim.weight_decay", "optim.weight_decay", 0.01, "norms and biases are exempt here"),
    joint("optim.lr_warmup_steps", "optim.warmup_steps", -1, "it counts updates, verl's counts steps"),
    joint(
        "optim.lr_warmup_steps_ratio", "optim.warmup_steps", 0.0, "it counts updates, verl's is a share of the steps"
    ),
    same(
        "optim.lr_scheduler_type",
        "optim.schedule",
        "constant",
        values={name: name for name in ("constant", "cosine")},
    ),
    joint("optim.min_lr_ratio", "optim.min_lr_ratio", 0.0),
    joint("optim.min_lr", "optim.min_lr_ratio", 0.0, "it is a share of optim.lr"),
    joint("optim.clip_grad", "optim.grad_clip", 1.0),
    joint("optim.override_optimizer_config.optimizer_cpu_offload", _STATES, False, "true is optimizer"),
    joint(
        "fsdp_config.param_offload", "trainer.fsdp2.offload", False, "weights here stay on the device between stages"
    ),
    joint("fsdp_config.optimizer_offload", _STATES, False, "true is optimizer"),
    joint("fsdp_config.offload_policy", "trainer.fsdp2.offload", False),
    same("fsdp_config.reshard_after_forward", "trainer.fsdp2.reshard_after_forward", True),
    joint("fsdp_config.ulysses_sequence_parallel_size", "trainer.sequence_parallel_size", 1),
    same("fsdp_config.full_determinism", "trainer.deterministic", False),
    same(
        "fsdp_config.dtype",
        "model.dtype",
        note="its default is left to auto, which is bfloat16 on accelerators",
        values={
            **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
            **dict.fromkeys(("float32", "fp32", "float"), "float32"),
        },
        type="text",
    ),
    joint("ulysses_sequence_parallel_size", "trainer.sequence_parallel_size", 1),
    joint("megatron.tensor_model_parallel_size", "trainer.tensor_parallel_size", 1),
    joint("megatron.context_parallel_size", "trainer.sequence_parallel_size", 1),
    joint("megatron.optimizer_offload", _STATES, False, "true is optimizer"),
    joint("megatron.param_offload", "trainer.fsdp2.offload", False, "weights here stay on the device between stages"),
    joint("engine.tp", "trainer.tensor_parallel_size", 1),
    joint("engine.cp", "trainer.sequence_parallel_size", 1),
    joint("engine.optimizer_offload", _STATES, False, "true is optimizer"),
    joint("engine.param_offload", "trainer.fsdp2.offload", False, "weights here stay on the device between stages"),
    joint("veomni.ulysses_parallel_size", "trainer.sequence_parallel_size", 1),
    joint("veomni.optimizer_offload", _STATES, False, "true is optimizer"),
    joint("veomni.param_offload", "trainer.fsdp2.offload", False, "weights here stay on the device between stages"),
    joint("lora.enable", "model.lora.rank", None, "0 is off", type="bool"),
)

_ROLLOUT = section(
    "actor_rollout_ref.rollout.",
    joint(
        "name",
        "rollout.engine",
        None,
        "vllm is auto: vLLM where it is installed, in the trainer's process or in a server, else the local engine",
        values={"vllm": "auto", "sglang": "sglang_server", "hf": "local", "trtllm": ""},
        type="text",
    ),
    joint("n", "rollout.n", 1),
    same("temperature", "rollout.temperature", 1.0),
    same("top_p", "rollout.top_p", 1.0, "log-probs of the local engine are of the kept tokens, verl's of all"),
    same("top_k", "rollout.top_k", -1, "0 is off, not -1; log-probs as with top_p", replaces={-1: 0}),
    joint("response_length", "rollout.max_response_tokens", None, type="int"),
    joint("prompt_length", "data.max_prompt_tokens", None, type="int"),
    same(
        "dtype",
        "rollout.dtype",
        note="its default is left to auto, the compute dtype",
        values={
            **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
            **dict.fromkeys(("float32", "fp32", "float"), "float32"),
        },
        type="text",
    ),
    same("gpu_memory_utilization", "rollout.gpu_memory_utilization", type="number"),
    same("tensor_model_parallel_size", "rollout.tensor_parallel_size", type="int"),
    same(
        "free_cache_engine",
        "rollout.sleep_mode",
        note="auto is true on the training devices, never is false",
        replaces={True: "auto", False: "never"},
        type="bool",
    ),
    joint("max_model_len", "rollout.max_model_len", None, type="int"),
    same("max_num_seqs", "rollout.max_sequences", type="int"),
    same("enforce_eager", "rollout.enforce_eager", type="bool"),
    joint("max_num_batched_tokens", "rollout.engine_kwargs", type="int", note="an argument of vLLM"),
    joint("enable_chunked_prefill", "rollout.engine_kwargs", type="bool", note="an argument of vLLM"),
    joint("enable_prefix_caching", "rollout.engine_kwargs", type="bool", note="an argument of vLLM"),
    joint("engine_kwargs.vllm", "rollout.engine_kwargs", type="mapping", note="vLLM's alone"),
    joint("engine_kwargs.sglang", "rollout.engine_kwargs", type="mapping", note="SGLang's alone"),
    joint("engine_kwargs.vllm.*", "rollout.engine_kwargs", note="vLLM's alone"),
    joint("engine_kwargs.sglang.*", "rollout.engine_kwargs", note="SGLang's alone"),
    joint("val_kwargs.n", "trainer.validation_n", 1),
    joint("val_kwargs.do_sample", "trainer.validation_n", False, "the temperature decides, as in verl"),
    joint("val_kwargs.temperature", "trainer.validation_sampling.temperature, trainer.validation_n", 0.0),
    joint("val_kwargs.top_p", "trainer.validation_sampling.top_p", 1.0),
    joint("val_kwargs.top_k", "trainer.validation_sampling.top_k", -1),
)

_MODEL = section(
    "actor_rollout_ref.model.",
    same("path", "model.path", "~/models/deepseek-llm-7b-chat"),
    same("tokenizer_path", "model.tokenizer", None, type="text"),
    joint("trust_remote_code", "model.trust_remote_code", False),
    same("enable_gradient_checkpointing", "model.gradient_checkpointing", True),
    joint("lora_rank", "model.lora.rank", 0),
    joint("lora_alpha", "model.lora.alpha", 16),
    joint("target_modules", "model.lora.target_modules", "all-linear", type="text|list"),
    same("lora_adapter_path", "model.lora.adapter", None, type="text"),
    joint("lora.rank", "model.lora.rank", 0),
    joint("lora.alpha", "model.lora.alpha", 32),
    joint("lora.dropout", "model.lora.dropout", 0.0),
    joint("lora.target_modules", "model.lora.target_modules", None, type="text|list"),
    same(
        "override_config.attn_implementation",
        "model.attention",
        type="text",
        values={"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash_attention_2"},
    ),
)

_DATA = section(
    "data.",
    joint("train_files", "data.train", "~/data/rlhf/gsm8k/train.parquet", type="text|list"),
    joint("val_files", "data.validation", None, type="text|list"),
    joint("train_batch_size", "trainer.prompts_per_step", 1024),
    joint(
        "gen_batch_size",
        "algorithm.filter_groups.max_rounds",
        None,
        "prompts of a round of sampling; here a round has up to trainer.prompts_per_step",
        type="int",
    ),
    joint("max_prompt_length", "data.max_prompt_tokens", 512),
    joint("max_response_length", "rollout.max_response_tokens", 512),
    joint("filter_overlong_prompts", "data.overlong", False, "true is filter"),
    joint(
        "truncation",
        "data.overlong",
        "error",
        values={"error": "error", "left": "truncate_left", "right": "truncate_right", "middle": ""},
    ),
    same("prompt_key", "data.prompt_key", "prompt"),
    same("reward_fn_key", "data.source_key", "data_source"),
    same(
        "train_max_samples",
        "data.max_rows",
        -1,
        "0 uses all; the first rows, which verl draws with data.shuffle",
        replaces={-1: 0},
    ),
    same("val_max_samples", "data.validation_max_rows", -1, "0 uses all; the first rows, too", replaces={-1: 0}),
    joint("apply_chat_template_kwargs.*", "data.chat_template_kwargs"),
    joint("apply_chat_template_kwargs", "data.chat_template_kwargs", type="mapping"),
    joint("trust_remote_code", "model.trust_remote_code", False),
    same("shuffle", "data.shuffle", True),
    same("seed", "trainer.seed", type="int"),
)

_ALGORITHM = section(
    "algorithm.",
    joint(
        "adv_estimator",
        "algorithm.advantage.name",
        "gae",
        values={
            **dict.fromkeys(("gae", "tir_optimal_token_baseline"), ""),
            **dict.fromkeys(("grpo", "grpo_vectorized"), "grpo"),
            **dict.fromkeys(("rloo", "rloo_vectorized"), "rloo"),
            **{name: name for name in ("opo", "gpg", "grpo_passk", "reinforce_plus_plus", "remax", "gdpo")},
            **{name: name for name in ("reinforce_plus_plus_baseline", "optimal_token_baseline")},
        },
    ),
    joint("norm_adv_by_std_in_grpo", "algorithm.advantage.std", True, "true is group, false is none"),
    joint("use_kl_in_reward", "algorithm.kl.in_reward", False),
    joint("kl_penalty", "algorithm.kl.estimator", "kl", "low_var_kl is k3", values=_TYPES_OF_KL),
    joint(
        "kl_ctrl.type",
        "algorithm.kl.target",
        "fixed",
        "null is fixed",
        values={"fixed": "null", "adaptive": "target_kl"},
    ),
    joint("kl_ctrl.kl_coef", "algorithm.kl.coef", 0.001),
    joint("kl_ctrl.target_kl", "algorithm.kl.target", 0.1),
    joint("kl_ctrl.horizon", "algorithm.kl.horizon", 10000),
    joint(
        "rollout_correction.rollout_is",
        "algorithm.correction.name",
        None,
        "token is token_truncate",
        values={"token": "token_truncate", "sequence": "sequence_truncate"},
        type="text",
    ),
    joint("rollout_correction.rollout_is_threshold", "algorithm.correction.high", 2.0, type="number|text"),
    joint("rollout_correction.rollout_is_batch_normalize", "algorithm.correction.normalize", False),
    joint("rollout_correction.rollout_rs", "algorithm.correction.reject", None, type="text"),
    joint("rollout_correction.rollout_rs_threshold", "algorithm.correction.reject", None, type="number|text"),
    joint("rollout_correction.bypass_mode", "algorithm.old_logprobs", False, "true is rollout"),
    joint(
        "rollout_correction.loss_type",
        "algorithm.loss.name",
        "ppo_clip",
        "with bypass_mode",
        values={"ppo_clip": "ppo_clip", "reinforce": ""},
    ),
    joint("filter_groups.enable", "algorithm.filter_groups.enable", False),
    joint("filter_groups.metric", "algorithm.filter_groups.metric", None, type="text"),
    joint(
        "filter_groups.max_num_gen_batches",
        "algorithm.filter_groups.max_rounds",
        0,
        "times gen_batch_size / train_batch_size",
    ),
)

_REST = (
    *section(
        "reward.",
        joint("custom_reward_function.path", REWARD, None, "e.g. [path/to/file.py:function]", type="text"),
        joint("custom_reward_function.name", REWARD, "compute_score", "e.g. [path/to/file.py:function]"),
        joint("custom_reward_function.reward_kwargs.*", REWARD, note="the function's kwargs"),
        joint(
            "reward_manager.name",
            REWARD,
            "naive",
            "dapo adds the reward length, others score alike",
            values={
                **dict.fromkeys(("naive", "prime", "batch"), "sum"),
                "dapo": "length",
                **dict.fromkeys(("gdpo", "limited", "rate_limited", "remote"), ""),
            },
        ),
        joint("reward_kwargs.overlong_buffer_cfg.enable", REWARD, False, "the reward length"),
        joint("reward_kwargs.overlong_buffer_cfg.len", REWARD, 0, "the reward length, its buffer"),
        joint("reward_kwargs.overlong_buffer_cfg.penalty_factor", REWARD, 0.0, "the reward length, its factor"),
        joint("reward_kwargs.overlong_buffer_cfg.log", REWARD, False, "rewards/length/mean is always logged"),
        joint("reward_kwargs.max_resp_len", REWARD, None, "the reward length, its max_response_tokens", type="int"),
    ),
    *section(
        "trainer.",
        same("total_epochs", "trainer.epochs", 30),
        same("total_training_steps", "trainer.max_steps", type="int", note="verl stops at the earlier of both"),
        same("save_freq", "trainer.save_every", -1, "0 saves at the end only; verl's -1 never", replaces={-1: 0}),
        same("test_freq", "trainer.validate_every", -1, "0 is at the start and the end", replaces={-1: 0}),
        same("val_before_train", "trainer.validate_at_start", True),
        same("max_actor_ckpt_to_keep", "trainer.keep_checkpoints", type="int"),
        joint("default_local_dir", "trainer.output_dir", None, type="text"),
        joint(
            "resume_mode",
            "trainer.resume",
            "auto",
            "disable is never",
            values={"auto": "auto", "disable": "never", "resume_path": "resume_from_path"},
        ),
        joint("resume_from_path", "trainer.resume", None, type="text"),
        joint("logger", "observe.loggers", note="the console is observe.progress", type="text|list"),
        joint("project_name", "trainer.output_dir, observe.project", "verl_examples", type="text|int"),
        joint("experiment_name", "trainer.output_dir, observe.run_name", "gsm8k", type="text|int"),
        joint(
            "device",
            "backend.name",
            "cuda",  # hw: verl's value
            "cuda is auto",
            values={"cuda": "auto", "npu": "npu", "cpu": "cpu"},  # hw: verl's values
        ),
        joint("use_v1", "", True, "which of verl's trainers is imported, where they differ"),
        joint("n_gpus_per_node", "", 8, "hwgrpo launch --devices"),
        joint("nnodes", "", 1, "hwgrpo launch --nodes"),
    ),
    joint("model_engine", "trainer.strategy", note="sharding is by fsdp2", type="text"),
)

MAPPED = (*_DATA, *_MODEL, *_ACTOR, *_ROLLOUT, *_ALGORITHM, *_REST)
