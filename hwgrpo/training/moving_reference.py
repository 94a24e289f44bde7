"""A reference model that follows the policy: every few steps it is moved towards it (`algorithm.kl.sync_every`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hwgrpo.config.optional_settings import KlConfig
from hwgrpo.errors import CheckpointError
from hwgrpo.training.checkpoint import checkpoint_files
from hwgrpo.training.checkpoint.restore import Checkpoint
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.reference_model import Reference
from hwgrpo.training.strategies.strategy import Strategy, raise_on_all_ranks


@torch.no_grad()
def move_reference(reference: Reference | None, policy: PolicyModel, config: KlConfig, step: int) -> None:
    """Move the reference after a step towards the policy, where it is due.

    Source: the reference of Learn Your Reference Model (Gorbatovski et al. 2024), as TRL's sync_ref_model.

    Args:
        reference: the reference model, sharded as the policy is.
        policy: the policy after the step.
        config: `sync_every` and `sync_share`.
        step: the finished step.
    """
    if reference is None or not config.sync_every or step % config.sync_every:
        return
    pairs = zip(_shards(policy), _shards(reference.policy), strict=True)
    for (name, trained), (_, moved) in pairs:
        assert moved.dtype == trained.dtype, f"{name}: small moves are lost in {moved.dtype}"
        moved.lerp_(trained, config.sync_share) if config.sync_share < 1 else moved.copy_(trained)


def reference_files(
    reference: Reference | None, strategy: Strategy, config: KlConfig
) -> dict[str, dict[str, torch.Tensor]]:
    """Return this rank's checkpoint file with its share of a moved reference, as copies; one rank's if all have it."""
    if reference is None or not config.sync_every or (strategy.rank and not strategy.shards):
        return {}
    return {_file(strategy.rank): {name: shard.cpu().clone() for name, shard in _shards(reference.policy)}}


@torch.no_grad()
def restore_reference(
    reference: Reference | None, checkpoint: Checkpoint, strategy: Strategy, config: KlConfig
) -> None:
    """Restore a moved reference from a checkpoint; one of a run whose reference was fixed has none.

    Raises:
        CheckpointError: it was saved by another number of ranks, each with a shard, or cannot be read; on all ranks.
    """
    if reference is None or not config.sync_every:
        return
    saved = sorted(name for name in checkpoint.manifest["files"] if name.startswith("reference-"))
    if not saved:
        return

    def load() -> None:
        shards = strategy.world_size if strategy.shards else 1
        if len(saved) != shards:
            raise CheckpointError(
                f"algorithm.kl.sync_every={config.sync_every}: {checkpoint.folder} has the moved reference in "
                f"{len(saved)} parts, and this run needs {shards}; resume with the strategy and the number of ranks "
                "that saved it"
            )
        tensors = checkpoint_files.read_tensors(checkpoint.folder / _file(strategy.rank if strategy.shards else 0))
        for name, shard in _shards(reference.policy):
            shard.copy_(tensors[name])

    raise_on_all_ranks(strategy, load)


def _shards(policy: PolicyModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and this rank's elements of each parameter; a forward leaves some parameters gathered."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for name, parameter in policy.model.named_parameters():
        yield name, parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def _file(rank: int) -> str:
    return f"reference-rank{rank}.safetensors"
