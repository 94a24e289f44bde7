"""What a strategy does for the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from hwgrpo.config import Config
from hwgrpo.errors import CheckpointError, ConfigError, DataError, RewardError, RunError
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.rank0_weights import Rank0Weights
from hwgrpo.training.policy.sequence_group import SequenceGroup
from hwgrpo.training.strategies.param_shard import Piece

T = TypeVar("T")


class Strategy(Protocol):
    """Wraps the policy, averages gradients over ranks, updates it, and moves small values between ranks.

    The loss that reaches `backward` is `sum / N_global * world_size`; a strategy averages gradients over ranks, so that
    what results is the gradient of the global mean, whatever the number of ranks.
    """

    rank: int
    world_size: int
    shards: bool
    """Whether a rank holds only a part of the policy's weights, so that its forward alone finds them whole."""
    meets_in_passes: bool
    """Whether ranks wait for each other within a forward or backward pass, so that none can repeat one by itself."""
    sequence_group: SequenceGroup
    """The ranks that go through the same micro-batches, a part of the tokens each; known once it is prepared."""
    module: nn.Module
    """The wrapped policy; call it as `module(micro_batch, loss_fn)`."""
    optimizer: torch.optim.Optimizer
    record: Mapping[str, Any]
    """What it settled beyond the run's settings, once it has wrapped the policy; written to the run's folder."""

    def prepare(self, config: Config) -> None:
        """Take the settings, before anything is loaded, and check that what they ask for is there.

        Raises:
            ConfigError: it is not.
        """
        ...

    def wrap(self, policy: PolicyModel, config: Config, weights: Rank0Weights | None = None) -> None:
        """Take the policy, wrap it, and make its optimizer.

        Args:
            policy: on its device and whole, where there are no `weights`.
            config: the run's settings.
            weights: where the strategy shards: what the policy is filled with, part by part.
        """
        ...

    def wrap_reference(self, policy: PolicyModel, weights: Rank0Weights | None = None) -> None:
        """Keep a frozen copy of the policy as the policy itself is kept; it is called as it is."""
        ...

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Return a context for one forward and backward pass of an update; `last` tells its last one."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Add a loss's gradient to the policy's."""
        ...

    def reduce_gradients(self) -> None:
        """Average over ranks what all passes of an update have left, as far as the passes have not done so."""
        ...

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale gradients to at most `max_norm` (0: leave them) and return their norm before it, over all ranks."""
        ...

    def step(self, lr: float) -> None:
        """Update the policy with its gradients at a learning rate, and drop them."""
        ...

    def discard_gradients(self) -> None:
        """Drop the gradients without an update."""
        ...

    def pieces(self) -> list[Piece]:
        """Return what this rank holds of the trainable parameters and of the optimizer's state."""
        ...

    def owned_pieces(self) -> list[Piece]:
        """Return this rank's share of all pieces: over all ranks every element is in exactly one of them."""
        ...

    def pieces_written(self) -> None:
        """Take notice that somebody wrote into the pieces: what is derived from them is made anew."""
        ...

    def whole(self, trainable_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter of the policy's model whole, by name, on this rank's device.

        Every rank runs through it to the end. A tensor is good until the next is asked for.

        Args:
            trainable_only: leave out frozen ones, which are as they were before `wrap`.
        """
        ...

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over ranks of a few numbers, in fp64."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's small Python value in rank order."""
        ...

    def barrier(self) -> None:
        """Wait for all ranks."""
        ...

    def close(self) -> None:
        """Leave the process group, if one was joined."""
        ...


def clip_by_norm(parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale the gradients of `parameters` to at most `max_norm` in all (0: leave them); return the norm before it."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(list(parameters), max_norm, norm)
    return norm


def clip_shards_by_norm(
    shards: Sequence[torch.Tensor],
    max_norm: float,
    sum_over_ranks: Callable[[Sequence[float]], list[float]],
    copies: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Scale gradients to at most `max_norm` in all (0: leave them); return the norm before it, over all ranks.

    Args:
        shards: this rank's part of the gradients; each element is in those of one rank only.
        max_norm: of the whole gradient.
        sum_over_ranks: adds a few numbers up over the ranks.
        copies: of what is in another rank's shards.
    """
    squared = torch.nn.utils.get_total_norm(shards).double().square()
    norm = torch.tensor(sum_over_ranks([float(squared)])[0], dtype=torch.float64).sqrt().float()
    if max_norm > 0:
        for shard in (*shards, *copies):
            shard.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0).to(shard.device))
    return norm


def together(strategy: Strategy, work: Callable[[], T]) -> T:
    """Do this rank's part of a stage; when it fails on one rank, fail on all of them with that rank's message.

    Otherwise the others would wait in their next collective and bury the message under their own errors.
    """
    result, error = None, None
    try:
        result = work()
    except (ConfigError, RewardError, DataError, CheckpointError, RunError) as failure:
        error = failure
    failures = [f for f in strategy.gather_objects(str(error) if error else None) if f is not None]
    if failures:
        raise RunError(failures[0]) if error is None else error
    return result  # type: ignore[return-value]
