"""The settings of the compared step, and those that may be chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hwgrpo.config import Config, load_config
from hwgrpo.config.load import to_tree
from hwgrpo.errors import ConfigError

MODEL = "builtin://tiny?task=sort&steps=20"
"""Trained for a few steps: its norms are not ones, and it does not amplify rounding as a sharp distribution does."""
BASE = (
    *("data.train=task://sort", "reward.functions=[exact_match]", "data.max_prompt_tokens=16"),
    *("rollout.max_response_tokens=16", "rollout.n=3", "rollout.engine=local", "rollout.temperature=0.9"),
    *("trainer.prompts_per_step=8", "trainer.validate_every=0", "trainer.strategy=auto"),
    *("trainer.tokens_per_micro_batch=32",),
    *("algorithm.kl.coef=0.5", "algorithm.kl.estimator=k3", "algorithm.aggregation.name=token-mean"),
    *("optim.lr=0.1", "optim.eps=1e-2", "optim.weight_decay=0.1", "optim.grad_clip=0.5"),
)
"""Settings of the step. AdamW's eps keeps it from turning the rounding of small gradients into full steps; its rate is
so large that weights from before the update show in bf16, too."""
OPEN = (
    *("model.", "backend.", "kernels.", "plugins", "trainer.deterministic", "trainer.threads", "trainer.seed"),
    *("trainer.strategy", "trainer.fsdp2.sync_every", "trainer.deepspeed.", "algorithm.entropy_coef"),
)
"""Settings that may differ from `BASE`: those that choose model, device and implementation, and the bonus of the
entropy, without which kernels compute no gradient of it."""


def load_settings(overrides: Sequence[str], *, families: bool = False) -> Config:
    """Return the settings of the step with overrides, which may choose what is compared, not the step.

    Args:
        overrides: `key=value`.
        families: the models are those of `families.py`.

    Raises:
        ConfigError: another setting.
    """
    for each in overrides:
        if "=" not in each:
            raise ConfigError(f"{each!r} is no key=value; to compare a model, write model.path={each}")
        if families and each.startswith("model.path="):
            raise ConfigError(f"{each} with --families: leave one of them out")
    fixed = dict(_leaves(to_tree(load_config(None, [f"model.path={MODEL}", *BASE]))))
    config = load_config(None, [f"model.path={MODEL}", *BASE, *overrides])
    for key, value in _leaves(to_tree(config)):
        if value != fixed.get(key) and not key.startswith(OPEN):
            raise ConfigError(
                f"{key}={value}: parity compares one fixed step; leave it out, and choose model, device and "
                f"implementation with {', '.join(each + '*' if each.endswith('.') else each for each in OPEN)}"
            )
    return config


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
