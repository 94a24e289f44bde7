"""Other names of verl's settings -> the names of the tables: older ones, and ones that only tutorials use."""

from __future__ import annotations

from hwgrpo.migrate.tables.peer_names import PeerNames
from hwgrpo.migrate.tables.verl_ignored import IGNORED
from hwgrpo.migrate.tables.verl_mapped import MAPPED
from hwgrpo.migrate.tables.verl_refused import REFUSED

ROWS = {row.key: row for row in (*MAPPED, *REFUSED, *IGNORED)}
"""Every row by its key; `a.b.*` is that of all keys below `a.b` without one of their own."""
_FSDP = "actor_rollout_ref.actor.fsdp_config.gradient_checkpointing"
_CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"

OLDER = {
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "custom_reward_function.*": "reward.custom_reward_function.*",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_kwargs.*": "reward.reward_kwargs.*",
    "reward_model.sandbox_fusion.*": "reward.sandbox_fusion.*",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.launch_reward_fn_async": "reward.launch_reward_fn_async",
    "reward_model.use_reward_loop": "reward.use_reward_loop",
    "reward_model.reward_loop_source": "reward.reward_manager.source",
    "reward_model.reward_loop_module_path": "reward.reward_manager.module.path",
    "reward_model.reward_loop_class_name": "reward.reward_manager.module.name",
    "reward_model.overlong_buffer.*": "reward.reward_kwargs.overlong_buffer_cfg.*",
    "reward_manager.*": "reward.reward_manager.*",
    "reward_model.*": "reward.reward_model.*",
    "sandbox_fusion.*": "reward.sandbox_fusion.*",
}
"""Names of earlier versions."""

TUTORIALS = {
    "actor_rollout.ref.rollout.n": "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.actor.lora.r": "actor_rollout_ref.model.lora_rank",
    "actor_rollout_ref.actor.lora.rank": "actor_rollout_ref.model.lora_rank",
    "actor_rollout_ref.actor.lora.alpha": "actor_rollout_ref.model.lora_alpha",
    "actor_rollout_ref.actor.lora.target_modules": "actor_rollout_ref.model.target_modules",
    "actor.lora.enable": "actor_rollout_ref.actor.lora.enable",
    "actor.lora.r": "actor_rollout_ref.model.lora_rank",
    "actor.lora.alpha": "actor_rollout_ref.model.lora_alpha",
    "actor.lora.target_modules": "actor_rollout_ref.model.target_modules",
    _FSDP: _CHECKPOINTING,
    "actor.fsdp_config.gradient_checkpointing": _CHECKPOINTING,
}
"""Names that no version of verl has; it would refuse them."""

VERL = PeerNames("verl", ROWS, OLDER, TUTORIALS)
current_name, row_of, counterparts = VERL.current_name, VERL.row_of, VERL.counterparts
