"""What settings of verl and TRL are called here, for whoever types one out of habit.

Right of each name stands the setting or value here; behind ` | ` what differs. A name that means something else here
is left out, and so is one without a counterpart.
"""

from __future__ import annotations

from collections.abc import Mapping

from hwgrpo.catalog import ENGINES
from hwgrpo.config.document import entries
from hwgrpo.migrate.tables.peer_names import PeerNames
from hwgrpo.migrate.tables.trl_names import TRL as TRL_NAMES
from hwgrpo.migrate.tables.verl_names import VERL as VERL_NAMES


def _names_here(names: PeerNames) -> dict[str, str]:
    """Return key -> setting here, behind ` | ` what differs."""
    return {key: f"{row.here} | {row.note}" if row.note else row.here for key, row in names.counterparts()}


VERL = {key: here for key, here in _names_here(VERL_NAMES).items() if key != here.partition(" | ")[0]}
"""Keys of `verl.trainer.main_ppo`, from the tables of the importer."""

TRL = _names_here(TRL_NAMES)
"""Fields of TRL's `GRPOConfig`, its base, and the options of its scripts, from the tables of the importer."""

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

HABITS = {
    **dict.fromkeys(
        ("algorithm.name", "algorithm.method", "algorithm.type", "algorithm.algorithm", "method"),
        "algorithm.preset | a published method by its name",
    ),
    **dict.fromkeys(("model.name", "model.id", "model.model"), "model.path | a folder or a hub name"),
    **dict.fromkeys(("data.path", "data.file", "data.files", "data.dataset", "data.name"), "data.train"),
    **dict.fromkeys(("trainer.batch_size", "data.batch_size"), "trainer.prompts_per_step | counted in prompts"),
    **dict.fromkeys(("rollout.num_samples", "rollout.group_size", "algorithm.group_size"), "rollout.n"),
    **dict.fromkeys(("rollout.max_tokens", "rollout.max_length"), "rollout.max_response_tokens"),
    **dict.fromkeys(("reward.name", "reward.function", "reward.type"), "reward.functions | a list of names"),
}
"""Key of habit, of no peer -> setting here."""

_CHOICES = (
    *("algorithm.advantage.name", "algorithm.loss.name", "algorithm.kl.estimator", "algorithm.correction.name"),
    *("data.overlong", "model.dtype", "rollout.dtype", "rollout.engine", "optim.name", "trainer.strategy"),
)
"""Settings of which verl has other names of values."""


def _values() -> dict[str, dict[str, str]]:
    """Return the values of verl whose name here is another one, and the others."""
    values: dict[str, dict[str, str]] = {key: {} for key in _OTHERS}
    for _, row in VERL_NAMES.counterparts():
        known = {here.partition(" | ")[0] for here in row.values.values()}
        renamed = {
            value: here for value, here in row.values.items() if here and value not in {*known, *ENGINES.names()}
        }
        if renamed and row.here in _CHOICES:
            values.setdefault(row.here, {}).update(renamed)
    return {key: {**of_verl, **_OTHERS.get(key, {})} for key, of_verl in values.items()}


VALUES = _values()
"""Setting here -> value of verl or TRL -> value here."""


_LAST_NAMES = {entry.key.rpartition(".")[2] for entry in entries()}


def name_here(key: str) -> str | None:
    """Return the name here of a setting of verl or TRL, or None for another name."""
    key = key.lstrip("+")
    return _sentence(VERL.get(key) or TRL.get(key) or HABITS.get(key))


def last_name_here(key: str) -> str | None:
    """Return the same for a key of which only the last name is verl's or TRL's.

    A name that settings here end with, too, such as `name`, says nothing by itself.
    """
    last = key.rpartition(".")[2]
    if last in _LAST_NAMES:
        return None
    found = TRL.get(last) or next((here for name, here in VERL.items() if name.rpartition(".")[2] == last), None)
    return _sentence(found)


def value_here(key: str, value: object) -> str | None:
    """Return the value here for a value of verl or TRL, or None for another one."""
    values = VALUES.get(key, {})
    return _sentence(values.get(str(value)) or values.get(str(value).lower()))


def _sentence(entry: str | None) -> str | None:
    if entry is None:
        return None
    here, _, note = entry.partition(" | ")
    return f"that is {here.replace(', ', ' and ')} here{f' ({note})' if note else ''}"
