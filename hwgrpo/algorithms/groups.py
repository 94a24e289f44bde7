"""Statistics of rewards over groups of sequences, in fp64; groups may be ragged and in any order."""

from __future__ import annotations

from typing import Literal

import torch

from hwgrpo.config.schema import AdvantageConfig
from hwgrpo.errors import DataError


class Groups:
    """Rewards of S sequences in G groups.

    Args:
        rewards_S: [S] rewards; meaningless where not valid.
        group_S: [S] int64: index of each sequence's prompt.
        valid_S: [S] bool.
        singleton: advantage of a group with one valid sequence: 0 (`zero`), its reward without a baseline
            (`raw`), or an error (`error`).

    Raises:
        DataError: half-precision or non-finite rewards, or a group of one under `error`.
    """

    def __init__(
        self,
        rewards_S: torch.Tensor,
        group_S: torch.Tensor,
        valid_S: torch.Tensor,
        singleton: str = "zero",
    ) -> None:
        assert rewards_S.dim() == 1, "rewards are one per sequence"
        assert rewards_S.shape == group_S.shape == valid_S.shape, "group and validity are one per sequence"
        if rewards_S.dtype in (torch.float16, torch.bfloat16):
            raise DataError(
                f"rewards are {rewards_S.dtype}: rounding has made different rewards equal already; hand them in as "
                "float64 (or float32)"
            )
        broken = valid_S & ~torch.isfinite(rewards_S)
        if bool(broken.any()):
            at = int(broken.nonzero()[0])
            raise DataError(
                f"reward {rewards_S[at].item()} of sequence {at}: an advantage needs finite rewards; mark the sequence "
                "invalid or let the reward's failure policy replace it"
            )

        prompts_G, self.index_S = torch.unique(group_S, return_inverse=True)
        self._groups = prompts_G.numel()
        self.valid_S = valid_S
        self.reward_S = torch.where(valid_S, rewards_S.double(), 0.0)
        """[S] fp64; 0 where not valid."""
        self.size_G = self.sum_G(valid_S.double())
        """[G] fp64: valid sequences per group."""
        self.max_G = self.extreme_G("amax", valid_S)
        self.signal_G = self.max_G > self.extreme_G("amin", valid_S)
        """[G] bool: whether the valid rewards of the group differ; exact, where a standard deviation is not."""

        single_G = self.size_G == 1
        if singleton == "error" and bool(single_G.any()):
            raise DataError(
                f"prompt {int(prompts_G[single_G][0])} has one valid sequence, so its group has no baseline; raise "
                "rollout.n, or set the advantage's singleton policy to 'zero' or 'raw'"
            )
        self.raw_G = single_G if singleton == "raw" else torch.zeros_like(single_G)
        """[G] bool: groups of one whose reward passes without a baseline."""

    def sum_G(self, values_S: torch.Tensor) -> torch.Tensor:
        """Return [G] the sums of fp64 values over groups; [G, T] of values [S, T]."""
        return values_S.new_zeros(self._groups, *values_S.shape[1:]).index_add(0, self.index_S, values_S)

    def extreme_G(self, reduce: Literal["amax", "amin"], among_S: torch.Tensor) -> torch.Tensor:
        """Return [G] the largest or smallest reward among the sequences marked; infinite where none is."""
        start = float("-inf") if reduce == "amax" else float("inf")
        rewards_S = torch.where(among_S, self.reward_S, start)
        return rewards_S.new_full((self._groups,), start).scatter_reduce(0, self.index_S, rewards_S, reduce)

    def deviation_S(self, baseline_G: torch.Tensor) -> torch.Tensor:
        """Return [S] reward minus the baseline of the group; raw groups of one have none. 0 where not valid."""
        baseline_G = torch.where(self.raw_G, 0.0, baseline_G)
        return torch.where(self.valid_S, self.reward_S - baseline_G[self.index_S], 0.0)

    def from_mean_S(self) -> torch.Tensor:
        """Return [S] reward minus the mean of the group."""
        return self.deviation_S(self.sum_G(self.reward_S) / self.size_G.clamp(min=1))

    def std_G(self, correction: int) -> torch.Tensor:
        """Return [G] the standard deviations; 1 for raw groups of one."""
        variance_G = self.sum_G(self.from_mean_S().square()) / (self.size_G - correction).clamp(min=1)
        return torch.where(self.raw_G, 1.0, variance_G.sqrt())

    def batch_std(self, correction: int) -> torch.Tensor:
        """Return the standard deviation of all valid rewards, a scalar."""
        count = self.valid_S.sum()
        deviation_S = torch.where(self.valid_S, self.reward_S - self.reward_S.sum() / count.clamp(min=1), 0.0)
        return (deviation_S.square().sum() / (count - correction).clamp(min=1)).sqrt()

    def scale(self, config: AdvantageConfig) -> torch.Tensor | float:
        """Return the divisor of deviations that `config.std` selects: [S], or a scalar."""
        if config.std == "none":
            return 1.0
        if config.std == "batch":
            return self.batch_std(config.std_correction) + config.eps
        return self.std_G(config.std_correction)[self.index_S] + config.eps

    @property
    def has_signal_S(self) -> torch.Tensor:
        """[S] bool: whether a sequence is valid and its group has a signal, or is a raw one of one."""
        return self.valid_S & (self.signal_G | self.raw_G)[self.index_S]

    def zero_without_signal(self, advantages_S: torch.Tensor) -> torch.Tensor:
        """Return the advantages as fp32, exactly 0 where a group has no signal or a sequence is not valid."""
        return torch.where(self.has_signal_S, advantages_S, 0.0).float()


def group_statistics(
    rewards_S: torch.Tensor, group_S: torch.Tensor, valid_S: torch.Tensor
) -> tuple[int, int, torch.Tensor]:
    """Count the groups without a gradient, whose valid rewards are all equal (groups of one included).

    Args:
        rewards_S: [S] rewards; meaningless where not valid.
        group_S: [S] int64: index of each sequence's prompt.
        valid_S: [S] bool.

    Returns:
        (groups without a gradient, groups with at least one valid sequence, standard deviations): the ratio of the
        counts' sums over ranks is TRL's `frac_reward_zero_std`. The deviations are unbiased, fp64, of the groups with
        two or more valid sequences.
    """
    groups = Groups(rewards_S, group_S, valid_S)
    filled_G = groups.size_G > 0
    return (
        int((filled_G & ~groups.signal_G).sum()),
        int(filled_G.sum()),
        groups.std_G(1)[groups.size_G > 1],
    )
