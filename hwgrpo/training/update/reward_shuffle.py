"""Shuffled rewards: a control run, in which nothing can be learned (`reward.shuffle`)."""

from __future__ import annotations

from dataclasses import replace

import torch

from hwgrpo.values import Rewards


def shuffle_rewards(rewards: Rewards, seed: int, step: int, rank: int) -> Rewards:
    """Permute the rewards of the valid samples: a control run keeps their mean and loses their signal.

    The permutation is a function of its arguments, so a resumed control run repeats it.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_009 + rank)
    indices = rewards.valid.nonzero()[:, 0]
    order = torch.arange(len(rewards.total))
    order[indices] = indices[torch.randperm(len(indices), generator=generator)]
    parts = {name: values[order] for name, values in rewards.per_function.items()}
    return replace(rewards, total=rewards.total[order], per_function=parts)
