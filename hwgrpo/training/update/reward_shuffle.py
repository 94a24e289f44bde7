"""Shuffled rewards: a control run, in which nothing can be learned (`reward.shuffle`)."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch

from hwgrpo.values import Rewards


def shuffle_rewards(rewards: Rewards, seed: int, step: int, rank: int) -> Rewards:
    """Permute the rewards of the valid samples: a control run keeps their mean and loses their signal.

    The permutation is a function of its arguments, so a resumed control run repeats it.
    """
    return _permute(rewards, (seed * 1_000_003 + step) * 1_009 + rank)


def shuffle_group(rewards: Rewards, seed: int, uid: str) -> Rewards:
    """Permute the rewards of a group's valid samples, the same way on any number of ranks and after a resume.

    Args:
        rewards: of the samples of one prompt.
        seed: the run's seed.
        uid: the prompt's uid.
    """
    return _permute(rewards, int.from_bytes(hashlib.sha256(f"{seed} {uid}".encode()).digest()[:7]))


def _permute(rewards: Rewards, seed: int) -> Rewards:
    generator = torch.Generator().manual_seed(seed)
    indices = rewards.valid.nonzero()[:, 0]
    order = torch.arange(len(rewards.total))
    order[indices] = indices[torch.randperm(len(indices), generator=generator)]
    parts = {name: values[order] for name, values in rewards.per_function.items()}
    return replace(rewards, total=rewards.total[order], per_function=parts)
