"""Metrics of trajectories: turns, calls and failures, by tool and by environment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any


def agent_metrics(outcomes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of a step's trajectories, of all ranks.

    Args:
        outcomes: of the trajectories (`hwgrpo.agents.episode.OUTCOME`); {} for a response without one.

    Returns:
        `agent/turns/{mean,max}`, `agent/failures` (share of trajectories whose environment failed), `agent/stop/<why>`
        (shares), `tools/call_frequency` (calls per trajectory), `tools/failure_frequency` (failed calls per call; both
        TRL's names), `tools/<tool>/{calls,seconds}` (sum, and mean per call), `tools/failed/<kind>` (calls), and with
        several environments `agent/<environment>/reward/mean`. Empty without outcomes.
    """
    trajectories = [outcome for outcome in outcomes if outcome]
    if not trajectories:
        return {}
    turns = [len(each["turn_rewards"]) for each in trajectories]
    calls, seconds, failed = (_summed(trajectories, key) for key in ("calls", "seconds", "failed_calls"))
    total = sum(calls.values())
    metrics = {
        "agent/turns/mean": sum(turns) / len(turns),
        "agent/turns/max": float(max(turns)),
        "agent/failures": sum(bool(each["failure"]) for each in trajectories) / len(trajectories),
        "tools/call_frequency": total / len(trajectories),
        "tools/failure_frequency": sum(failed.values()) / total if total else 0.0,
    }
    for stop in sorted({each["stop"] for each in trajectories}):
        metrics[f"agent/stop/{stop}"] = sum(each["stop"] == stop for each in trajectories) / len(trajectories)
    for tool, count in sorted(calls.items()):
        metrics |= {f"tools/{tool}/calls": count, f"tools/{tool}/seconds": seconds[tool] / count}
    metrics |= {f"tools/failed/{kind}": count for kind, count in sorted(failed.items())}
    rewards = defaultdict(list)
    for each in trajectories:
        rewards[each["environment"]].append(each["reward"])
    if len(rewards) > 1:
        metrics |= {f"agent/{name}/reward/mean": sum(own) / len(own) for name, own in sorted(rewards.items())}
    return metrics


def _summed(outcomes: Sequence[Mapping[str, Any]], key: str) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for outcome in outcomes:
        for name, value in outcome[key].items():
            sums[name] += value
    return sums
