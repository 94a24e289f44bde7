"""What strategies share in which every rank holds the whole policy."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.rank0_weights import Rank0Weights
from hwgrpo.training.strategies.param_shard import Piece, shared_out, whole_pieces
from hwgrpo.training.strategies.stepping import Stepping
from hwgrpo.training.strategies.strategy import clip_by_norm


class Replicated(Stepping):
    """The policy in one piece, with torch's AdamW over it; see `Strategy` for the methods."""

    shards = False
    rank: int
    world_size: int
    module: nn.Module
    policy: PolicyModel

    def wrap_reference(self, policy: PolicyModel, weights: Rank0Weights | None = None) -> None:
        pass

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        return clip_by_norm(list(self.policy.parameters()), max_norm)

    def pieces(self) -> list[Piece]:
        return whole_pieces(self.policy.model, self.optimizer)

    def owned_pieces(self) -> list[Piece]:
        return shared_out(self.pieces(), self.world_size)[self.rank]

    def pieces_written(self) -> None:
        pass

    def whole(self, trainable_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.policy.model.named_parameters():
            if parameter.requires_grad or not trainable_only:
                yield name, parameter.detach()
