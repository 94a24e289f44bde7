"""Base of the strategies in which every rank holds the full policy."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

from hwgrpo.training.policy.policy_model import HeadOperand, PolicyModel
from hwgrpo.training.policy.rank0_weights import Rank0Weights
from hwgrpo.training.strategies.optimizer import Stepping, clip_by_norm
from hwgrpo.training.strategies.param_shard import (
    ParamShard,
    frozen_param_shards,
    full_param_shards,
    partition_shards,
    refresh_states,
)


class Replicated(Stepping):
    """The unsharded policy, with torch's AdamW over it; see `Strategy` for the methods."""

    shards = False
    rank: int
    world_size: int
    module: nn.Module
    policy: PolicyModel

    def set_policy(self, policy: PolicyModel) -> None:
        """Make `policy` the one in training, unwrapped."""
        self.policy = self.module = policy
        self._head_operand = HeadOperand()
        policy.set_passes(head_operand=self._head_operand, final_gradients=True)

    def wrap_reference(self, policy: PolicyModel, weights: Rank0Weights | None = None) -> None:
        pass

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        gradients = [self.gradient(parameter) for parameter in self.policy.parameters()]
        return clip_by_norm([gradient for gradient in gradients if gradient is not None], max_norm)

    def step(self, lr: float) -> None:
        self._head_operand.release()  # the step makes it stale, and needs memory of its own
        super().step(lr)

    def discard_gradients(self) -> None:
        self._head_operand.release()  # passes that ran out of memory are repeated
        super().discard_gradients()

    def param_shards(self) -> list[ParamShard]:
        return full_param_shards(self.policy.model, self.optimizer)

    def owned_shards(self) -> list[ParamShard]:
        mine = partition_shards(full_param_shards(self.policy.model), self.world_size)[self.rank]
        return full_param_shards(self.policy.model, self.optimizer, {shard.name for shard in mine}, read_only=True)

    def frozen_shards(self, policy: PolicyModel, names: Collection[str], *, owned: bool) -> list[ParamShard]:
        shards = frozen_param_shards(policy.model, names)
        return partition_shards(shards, self.world_size)[self.rank] if owned else shards

    def refresh_from_shards(self) -> None:
        self._head_operand.release()
        refresh_states(self.optimizer)

    def gather_full_parameters(self, trainable_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.policy.model.named_parameters():
            if parameter.requires_grad or not trainable_only:
                yield name, parameter.detach()
