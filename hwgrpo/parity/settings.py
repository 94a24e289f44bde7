"""The settings of the compared step, and those that may be chosen."""

from __future__ import annotations

from collections.abc import Sequence

from hwgrpo.errors import ConfigError

BASE = (
    *("data.train=task://sort", "reward.functions=[exact_match]", "data.max_prompt_tokens=16"),
    *("rollout.max_response_tokens=16", "rollout.n=3", "rollout.engine=local", "rollout.temperature=0.9"),
    *("trainer.prompts_per_step=2", "trainer.validate_every=0", "trainer.strategy=single"),
    *("algorithm.kl.coef=0.5", "algorithm.kl.estimator=k3", "algorithm.aggregation.name=token-mean"),
    *("optim.lr=2e-3", "optim.eps=1e-2", "optim.weight_decay=0.1"),
)
"""Settings of the step. AdamW's eps keeps it from turning the rounding of small gradients into full steps."""
OPEN = ("model.", "backend.", "kernels.", "trainer.deterministic", "trainer.threads", "trainer.seed", "plugins")
"""Settings that may differ from `BASE`: those that choose model, device and implementation."""
NOT_COMPARED = (
    ("model.lora.rank", "adapters"),
    ("model.quantize", "quantized weights"),
    ("model.router_loss_coef", "the router's loss"),
)


def check_settings(overrides: Sequence[str]) -> None:
    """Check that overrides choose what is compared, not the step.

    Raises:
        ConfigError: another setting, or a feature that is not compared.
    """
    for each in overrides:
        key, _, value = each.lstrip("+").partition("=")
        if not key.startswith(OPEN):
            raise ConfigError(
                f"{each}: parity compares one fixed step; leave it out, and choose model, device and implementation "
                "with model.*, backend.*, kernels.*, trainer.deterministic, trainer.seed and trainer.threads"
            )
        for name, what in NOT_COMPARED:
            if key == name and value not in ("0", "none", "0.0"):
                raise ConfigError(f"{each}: parity does not compare {what} yet; leave it out")
