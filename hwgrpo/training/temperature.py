"""The temperature of the policy's log-probs in a step, where it changes over the run."""

from __future__ import annotations

from dataclasses import replace

from hwgrpo.config.derived import temperature_at
from hwgrpo.training.run_parts import Run


def set_temperature(run: Run, step: int) -> dict[str, float]:
    """Give policy and reference model the temperature at which a step's responses were sampled; return its metric."""
    if run.config.rollout.final_temperature is None:
        return {}
    temperature = temperature_at(run.config, step, run.total_steps)
    for policy in (run.update.policy, *([run.reference.policy] if run.reference else [])):
        policy.options = replace(policy.options, temperature=temperature)
    return {"rollout/temperature": temperature}
