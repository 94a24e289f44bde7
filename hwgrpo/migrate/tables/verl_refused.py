"""verl's settings without a counterpart: refused with the nearest thing here, unless they have a neutral value."""

from __future__ import annotations

from hwgrpo.migrate.tables.peer_row import refused, section

_MEDIA = "videos and sound are not supported"
_IMAGES = "text and images (docs/vision.md)"
_PIPELINE = "there is no pipeline parallelism"
_EXPERTS = "experts are not spread over ranks by expert"
_SHARD = "trainer.strategy=fsdp2, which shards all weights"
_ROUTER = "router losses and biases of Megatron have no counterpart"
_TURN = "rollout.workflow=FILE.py:COROUTINE (docs/extend.md)"
_OWN_DATA = "own classes for data are not supported"
_FILES = "files with the rows; hwgrpo data convert writes them"
_REPLAY = "routing replay is not supported"
_DRIFT = "rollout.dtype, algorithm.correction, which correct for the gap"
DROPOUT = (
    *(f"{each}dropout" for each in ("", "attention_", "attn_", "hidden_", "activation_", "embedding_", "residual_")),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
)
"""Names of dropout rates in the configs of models."""
_HUB = "a folder of the model with its own config"

REFUSED = (
    *section(
        "data.",
        refused(_MEDIA, _IMAGES, None, keys=("video_key", "audio_key")),
        refused(_OWN_DATA, _FILES, None, keys=("custom_cls.path", "custom_cls.name", "datagen.path", "datagen.name")),
        refused(
            "the order of prompts is shuffled or the file's",
            "data.difficulty",
            None,
            keys=("sampler.class_path", "sampler.class_name"),
        ),
        refused("the tokenizer is the model's", "model.tokenizer", None, keys=("tokenizer",)),
    ),
    *section(
        "actor_rollout_ref.model.",
        refused("the config is the model's", _HUB, None, keys=("hf_config_path",)),
        refused("adapters are low-rank products", "model.lora.dora", "lora", None, keys=("lora.type",)),
        refused("a template is a file here", "model.chat_template", None, keys=("custom_chat_template",)),
        refused("modules are imported as plugins", "plugins", None, keys=("external_lib",)),
        refused("the config of a model is not changed", _HUB, {}, None, keys=("override_config", "override_config.*")),
        refused(
            "models load without dropout",
            "0.0",
            0.0,
            None,
            keys=tuple(f"override_config.{each}" for each in DROPOUT),
        ),
        refused(
            "layers are named, not left out",
            "model.lora.target_modules, with re:PATTERN",
            None,
            [],
            keys=("lora.exclude_modules",),
        ),
        refused(
            "multi-token prediction is not trained or used",
            "leaving it out",
            False,
            None,
            keys=("mtp.enable", "mtp.enable_train", "mtp.enable_rollout"),
        ),
    ),
    *section(
        "actor_rollout_ref.actor.",
        refused(
            _REPLAY,
            _DRIFT,
            "disabled",
            None,
            keys=("router_replay.mode", "megatron.router_replay.mode", "veomni.router_replay.mode"),
        ),
        refused(
            "weights are trained in full precision",
            "model.quantize, with adapters",
            False,
            keys=("qat.enable", "fsdp_config.qat.enable"),
        ),
        refused(
            _PIPELINE,
            _SHARD,
            1,
            None,
            keys=(
                "megatron.pipeline_model_parallel_size",
                "megatron.virtual_pipeline_model_parallel_size",
                "engine.pp",
                "engine.vpp",
            ),
        ),
        refused(
            _EXPERTS,
            _SHARD,
            1,
            None,
            keys=(
                "megatron.expert_model_parallel_size",
                "megatron.expert_tensor_parallel_size",
                "veomni.expert_parallel_size",
                "engine.ep",
                "engine.etp",
            ),
        ),
        refused(
            _ROUTER,
            "model.router_loss_coef, the load-balancing loss of transformers",
            0,
            None,
            keys=tuple(
                f"megatron.override_transformer_config.{name}"
                for name in (
                    "moe_aux_loss_coeff",
                    "moe_z_loss_coeff",
                    "moe_router_bias_update_rate",
                    "dsa_indexer_loss_coeff",
                )
            ),
        ),
        refused(
            _ROUTER,
            "leaving it out",
            False,
            None,
            keys=("megatron.override_transformer_config.moe_router_enable_expert_bias",),
        ),
        refused("the schedule has a name", "optim.schedule", "constant", None, keys=("optim.lr_decay_style",)),
        refused("the warm-up begins at 0", "optim.warmup_steps", 0, None, keys=("optim.lr_warmup_init",)),
        refused("a cosine schedule ends at its minimum", "optim.min_lr_ratio", 0.5, keys=("optim.num_cycles",)),
        refused(
            "arguments of an optimizer are optim's",
            "optim.schedule",
            None,
            keys=("optim.override_optimizer_config", "optim.override_optimizer_config.*"),
        ),
    ),
    *section(
        "actor_rollout_ref.rollout.",
        refused("greedy responses of a group are all alike", "rollout.temperature", True, keys=("do_sample",)),
        refused(
            "a response ends with its end-of-sequence token", "rollout.stop_token_ids", False, keys=("ignore_eos",)
        ),
        refused(
            "agent loops of your own are not converted",
            _TURN,
            None,
            keys=("agent.agent_loop_config_path", "agent.custom_async_server.path", "agent.custom_async_server.name"),
        ),
        refused(
            "interactions of verl are not converted",
            "rollout.agent.environments=[FILE.py:CLASS] (docs/agents.md)",
            None,
            keys=("multi_turn.interaction_config_path",),
        ),
        refused("a rollout is not repeated", "rollout.n", None, keys=("multi_turn.num_repeat_rollouts",)),
        refused(
            "a copy of the engine is sharded by tensors alone",
            "rollout.tensor_parallel_size, rollout.engine_kwargs",
            1,
            None,
            keys=(
                "data_parallel_size",
                "pipeline_model_parallel_size",
                "expert_parallel_size",
                "moe_tensor_parallel_size",
            ),
        ),
        refused(
            "sampling with quantized weights is the engine's own",
            "rollout.engine_kwargs.quantization, algorithm.correction",
            None,
            keys=("quantization",),
        ),
        refused(_REPLAY, _DRIFT, False, keys=("enable_rollout_routing_replay",)),
        refused("all responses of a step are used", "algorithm.filter_groups", 0, keys=("over_sample_rate",)),
        refused("stored responses are not replayed", "leaving it out", False, keys=("skip_rollout",)),
    ),
    *section(
        "algorithm.",
        refused("a group is compared without discount", "leaving it out", 1.0, keys=("gamma",)),
        refused("samples are not weighed again", "algorithm.filter_groups", False, keys=("use_pf_ppo",)),
        refused(
            "gdpo compares the entries of reward.functions",
            "reward.functions with a weight each",
            None,
            keys=("gdpo_reward_keys", "gdpo_reward_weights"),
        ),
        refused(
            "groups are sampled one round at a time",
            "leaving it out",
            1,
            None,
            keys=("filter_groups.max_inflight_gen_batches",),
        ),
    ),
    *section(
        "reward.",
        refused(
            "a reward model is an entry of reward.functions",
            "reward.functions=[{name: reward_model, kwargs: {path: ...}}]",
            False,
            keys=("reward_model.enable",),
        ),
        refused("programs are scored in a sandbox of this host", "the reward code", None, keys=("sandbox_fusion.url",)),
        refused("own managers are not supported", "reward.functions", None, keys=("reward_manager.module.path",)),
        refused(
            "arguments of a manager have no counterpart",
            "the kwargs of an entry in reward.functions",
            None,
            keys=("reward_kwargs.*",),
        ),
    ),
    *section(
        "trainer.",
        refused(
            "GRPO has no critic whose warm-up the policy would wait for",
            "optim.warmup_steps",
            0,
            keys=("critic_warmup",),
        ),
        refused("validation alone is a command", "hwgrpo eval", False, keys=("val_only",)),
        refused("checkpoints are files of this host", "trainer.output_dir", None, keys=("default_hdfs_dir",)),
        refused(
            "checkpoints cannot call a class of your own", "leaving it out", None, keys=("checkpoint_callback_class",)
        ),
        refused(
            "verl's asynchronous trainers have no equal here",
            "rollout.max_staleness=1 with algorithm.correction",
            "sync",
            keys=("v1.trainer_mode",),
        ),
    ),
    *refused(
        "rollout engine and trainer are started together",
        "rollout.server.url",
        True,
        keys=("actor_rollout_ref.hybrid_engine",),
    ),
    *refused("GRPO has no critic", "leaving it out", False, None, keys=("critic.enable",)),
    *refused(
        "distillation is not supported", "hwgrpo sft", False, keys=("distillation.enabled", "distillation.enable")
    ),
    *refused(
        "stored responses are not replayed",
        "leaving it out",
        False,
        keys=("skip.rollout.enable", "skip.async_rollout.enable", "skip.rollout_tq.enable"),
    ),
)

WRITTEN_BY_HYDRA = {"data.video_key": "videos", "data.audio_key": "audios"}
"""verl's own defaults of refused settings, which a resolved file has in any run."""
