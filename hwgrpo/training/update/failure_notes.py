"""Lines for the user on failed rewards and late groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hwgrpo.values import Rewards


def failure_notes(
    values: Mapping[str, float],
    dropped_groups: Sequence[Mapping[str, Any]],
    rewards: Rewards,
    step: int,
    reported: set[str],
) -> Iterator[str]:
    """Yield a note for each reward that failed in a step and on late groups, each kind of failure once per run.

    Args:
        values: the step's metrics.
        dropped_groups: `dropped_records` of all ranks.
        rewards: this rank's, for the first failure of each kind.
        step: the step.
        reported: metrics reported before; new ones are added.
    """
    for name, count in values.items():
        if name.startswith("reward_failures/") and count and name not in reported:
            reported.add(name)
            failure = name.removeprefix("reward_failures/")
            first = f" ({rewards.first_failures[failure]})" if failure in rewards.first_failures else ""
            yield f"reward {failure}: {count:.0f} samples in step {step}{first}; metrics count further ones"
    late, dropped = values.get("rollout/groups_late", 0), values.get("rollout/groups_dropped", 0)
    kind = "groups dropped" if dropped else "groups late"
    if late and kind not in reported:
        reported.add(kind)
        which = "".join(f" (prompt {group['uid']}: {group['dropped']})" for group in dropped_groups[:1])
        yield (
            f"step {step} waited for {late:.0f} groups of responses longer than rollout.group_timeout, and dropped "
            f"{dropped:.0f} of them{which}; metrics count further ones"
        )
