"""Imports of the core settings of OpenRLHF, ROLL and NeMo-RL for tests."""

from __future__ import annotations

from hwgrpo.imports.core_imports import import_core
from hwgrpo.imports.import_result import Entry, Imported

BASES = {
    "openrlhf": (
        *("actor.model_name_or_path=Qwen/Qwen2.5-7B", "data.prompt_dataset=train.jsonl", "algo.kl.init_coef=0"),
        *("algo.advantage.estimator=group_norm", "rollout.n_samples_per_prompt=8", "train.batch_size=8192"),
    ),
    "roll": (
        *("pretrain=Qwen/Qwen3-8B", "actor_train.data_args.file_name=train.jsonl", "num_return_sequences_in_group=8"),
        *("adv_estimator=grpo", "response_length=1024", "actor_train.training_args.per_device_train_batch_size=2"),
        *("actor_train.training_args.gradient_accumulation_steps=64", "actor_train.device_mapping=list(range(0,8))"),
    ),
    "nemo-rl": ("data.train_data_path=train.jsonl", "grpo.use_leave_one_out_baseline=false"),
}
"""The settings without which an import is refused."""


def imported(system: str, *settings: str, base: tuple[str, ...] | None = None) -> Imported:
    """Import settings on top of those of `BASES`."""
    return import_core(system, None, [*(BASES[system] if base is None else base), *settings], {})[0]


def entry(result: Imported, key: str) -> Entry:
    """Return the only line of a given key."""
    [found] = [each for each in result.entries if each.key == key and each.group != "default"]
    return found
