"""A reference model that follows the policy: every few steps it is moved towards it (`algorithm.kl.sync_every`).

A checkpoint has it as the policy: each rank writes its own shards, flattened and under the parameter's name, and the
first element of each, into `reference-rankR.safetensors`, loadable by any other sharding.
"""

from __future__ import annotations

import math

import torch
from safetensors import safe_open
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hwgrpo.config import Config
from hwgrpo.config.derived import prompts_per_update
from hwgrpo.config.schema import KlConfig
from hwgrpo.training.checkpoint import checkpoint_files, shard_files
from hwgrpo.training.checkpoint.restore import Checkpoint
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.reference_model import Reference
from hwgrpo.training.strategies.strategy import Strategy, raise_on_all_ranks

_START = ".start"
"""Ends the name of a shard's first element."""


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
    of_policy, of_reference = _local_parameters(policy), _local_parameters(reference.policy)
    for name, name_in_reference in reference.moved.items():
        trained, moved = of_policy[name], of_reference[name_in_reference]
        assert moved.dtype == trained.dtype, f"{name}: small moves are lost in {moved.dtype}"
        moved.lerp_(trained, config.sync_share) if config.sync_share < 1 else moved.copy_(trained)


def reference_note(config: Config) -> str | None:
    """Return a line where the reference is the policy itself in every update, so that the KL is 0."""
    kl, t = config.algorithm.kl, config.trainer
    if not kl.coef or (kl.sync_every, kl.sync_share) != (1, 1.0):
        return None
    if t.epochs_per_batch > 1 or prompts_per_update(config) != t.prompts_per_step:
        return None
    return (
        f"warning: algorithm.kl.coef={kl.coef:g} has no effect: with algorithm.kl.sync_every=1, sync_share=1 and one "
        "update per step the reference is the policy itself, and their KL is 0; use a larger sync_every, a sync_share "
        "below 1, several updates per step (trainer.prompts_per_update, trainer.epochs_per_batch), or kl.coef=0"
    )


def reference_files(
    reference: Reference | None, strategy: Strategy, config: KlConfig
) -> dict[str, dict[str, torch.Tensor]]:
    """Return this rank's checkpoint file with its shards of a moved reference, as copies."""
    if reference is None or not config.sync_every:
        return {}
    tensors: dict[str, torch.Tensor] = {}
    for shard in strategy.frozen_shards(reference.policy, set(reference.moved.values()), owned=True):
        if shard.count:
            tensors[shard.name] = shard.values["parameter"].to("cpu", copy=True)
            tensors[f"{shard.name}{_START}"] = torch.tensor(shard.start)
    return {_file(strategy.rank): tensors} if tensors else {}


def restore_reference(
    reference: Reference | None, checkpoint: Checkpoint, strategy: Strategy, config: KlConfig
) -> list[str]:
    """Restore a moved reference from a checkpoint; one of a run whose reference was fixed has none.

    Returns:
        A note if this run does not use it.

    Raises:
        CheckpointError: it cannot be read any more; on all ranks.
    """
    saved = [rank for rank in range(checkpoint.manifest["world_size"]) if _file(rank) in checkpoint.manifest["files"]]
    if reference is None or not saved:
        return []
    if not config.sync_every:
        return [
            f"the moved reference of {checkpoint.folder} is left out: with algorithm.kl.sync_every=0 it is the model "
            "of the start"
        ]
    shards = strategy.frozen_shards(reference.policy, set(reference.moved.values()), owned=False)

    def load() -> None:
        table: shard_files.Table = {shard.name: {"pieces": [], "states": []} for shard in shards}
        for rank in saved:
            path = checkpoint.folder / _file(rank)
            with checkpoint_files.reading(path), safe_open(path, framework="pt") as file:
                for name in table.keys() & file.keys():
                    start, count = int(file.get_tensor(f"{name}{_START}")), file.get_slice(name).get_shape()[0]
                    table[name]["pieces"].append([rank, start, count])
        for shard in shards:
            saved_elements = sum(count for *_, count in table[shard.name]["pieces"])
            assert saved_elements == math.prod(shard.shape), f"{shard.name}: its saved shards are not all of it"
        shard_files.read(checkpoint.folder, table, shards, _file)

    raise_on_all_ranks(strategy, load)
    strategy.refresh_from_shards()
    return []


def _local_parameters(policy: PolicyModel) -> dict[str, torch.Tensor]:
    """Return name -> this rank's elements of each parameter; a forward leaves some parameters gathered."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {
        name: parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
        for name, parameter in policy.model.named_parameters()
    }


def _file(rank: int) -> str:
    return f"reference-rank{rank}.safetensors"
