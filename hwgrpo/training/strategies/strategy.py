"""The interface of a strategy to the trainer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from hwgrpo.config import Config
from hwgrpo.errors import CheckpointError, ConfigError, DataError, RewardError, RunError
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.rank0_weights import Rank0Weights
from hwgrpo.training.policy.sequence_shard import SequenceGroup
from hwgrpo.training.strategies.param_shard import ParamShard

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks of a run, which exchange small values."""

    rank: int
    world_size: int

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's small Python value in rank order. All ranks call it together."""
        ...


class Strategy(Ranks, Protocol):
    """Wraps the policy, averages gradients over ranks, updates it, and exchanges small values between ranks.

    The loss passed to `backward` is `sum / N_global * world_size`. A strategy averages gradients over ranks, which
    yields the gradient of the global mean for any number of ranks.
    """

    shards: bool
    """Whether the policy's weights are sharded, so that only its forward has the full ones."""
    has_collectives_in_passes: bool
    """Whether a forward or backward pass has collectives, so that no rank can repeat one alone."""
    sequence_group: SequenceGroup
    """Ranks that compute the same micro-batches, each some of the tokens; set by `prepare`."""
    module: nn.Module
    """The wrapped policy; call it as `module(micro_batch, loss_fn)`."""
    optimizer: torch.optim.Optimizer
    record: Mapping[str, Any]
    """Values derived from the settings by `wrap`, e.g. DeepSpeed's config; written to the run's folder."""

    def prepare(self, config: Config) -> None:
        """Apply the settings before anything is loaded, and check the requirements.

        Raises:
            ConfigError: a requirement is not met.
        """
        ...

    def wrap(self, policy: PolicyModel, config: Config, weights: Rank0Weights | None = None) -> None:
        """Wrap the policy and make its optimizer.

        Args:
            policy: on its device with full weights, or on the meta device if there are `weights`.
            config: the run's settings.
            weights: for a strategy that shards: the weights, materialized unit by unit.
        """
        ...

    def wrap_reference(self, policy: PolicyModel, weights: Rank0Weights | None = None) -> None:
        """Shard a frozen copy of the policy as the policy is sharded; callers call the copy directly."""
        ...

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Return a context for one forward and backward pass of an update; `last` marks its last pass."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Add a loss's gradient to the policy's."""
        ...

    def reduce_gradients(self) -> None:
        """Average the gradients of an update over ranks, as far as its passes have not done so."""
        ...

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Clip gradients to `max_norm` (0: do not clip); return their norm over all ranks before clipping."""
        ...

    def step(self, lr: float) -> None:
        """Update the policy with its gradients at a learning rate, then discard them."""
        ...

    def discard_gradients(self) -> None:
        """Discard the gradients without an update."""
        ...

    def param_shards(self) -> list[ParamShard]:
        """Return this rank's shards of the trainable parameters and optimizer states."""
        ...

    def owned_shards(self) -> list[ParamShard]:
        """Return the shards that this rank saves: over all ranks, every element is in exactly one."""
        ...

    def frozen_shards(self, policy: PolicyModel, names: Collection[str], *, owned: bool) -> list[ParamShard]:
        """Return shards of frozen parameters of a policy that is sharded as the own one; `owned` as `owned_shards`."""
        ...

    def refresh_from_shards(self) -> None:
        """Recompute everything derived from the shards, after a caller wrote into them."""
        ...

    def gather_full_parameters(self, trainable_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the full value of each parameter of the policy's model, on this rank's device.

        A collective: every rank iterates to the end. A tensor is valid until the next is yielded.

        Args:
            trainable_only: skip frozen parameters, which have the same values as before `wrap`.
        """
        ...

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums of a few numbers over ranks, in fp64."""
        ...

    def for_thread(self, stopped: Callable[[], None]) -> Ranks:
        """Return the ranks for one other thread of each process. All ranks call it together.

        Args:
            stopped: called while the thread waits for the others; it raises where the thread is to end.
        """
        ...

    def barrier(self) -> None:
        """Wait for all ranks."""
        ...

    def close(self) -> None:
        """Leave the process group if one was joined."""
        ...


def raise_on_all_ranks(strategy: Ranks, work: Callable[[], T]) -> T:
    """Run this rank's part of a stage; if it fails on one rank, raise that rank's message on all of them.

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
