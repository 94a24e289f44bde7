"""Run by torchrun: one update of a fixed batch under strategies, each rank on its share of the prompts.

torchrun --nproc-per-node 2 strategy_worker.py OUT '{"WAY": ["STRATEGY", "OVERRIDE", ...], ...}'

OUT/WAY/CASE.safetensors, written by rank 0, is what resulted of each of CASES: see `run_update`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from hwgrpo.catalog import STRATEGIES
from hwgrpo.cli.process_exit import ended_as_rank
from hwgrpo.planning.planned_sharding import sharding_of
from hwgrpo.training.policy.layouts import PADDED
from hwgrpo.training.policy.micro_batch import build_micro_batch
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.training.policy.sequence_shard import shard_micro_batch
from hwgrpo.training.strategies.deepspeed import Deepspeed
from hwgrpo.training.strategies.fsdp2 import Fsdp2
from hwgrpo.training.strategies.optimizer import Stepping
from hwgrpo.training.strategies.sharding import Sharding
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.training.update.train_batch import loss_signals, with_weights
from hwgrpo.values import TrainBatch
from tests.support.models.tiny import ragged_batch, settings, tiny_qwen3

PROMPTS = 4
CASES: dict[str, tuple[dict[int, list[int]], list[str]]] = {
    "even shares": (
        {1: [0, 4], 2: [0, 2, 4], 4: [0, 1, 2, 3, 4]},
        ["algorithm.aggregation.name=prompt-mean"],
    ),
    "ragged shares, unequal micro-batch counts": (
        {1: [0, 4], 2: [0, 1, 4], 4: [0, 0, 1, 2, 4]},
        ["trainer.tokens_per_micro_batch=32", "algorithm.aggregation.name=seq-mean-token-mean"],
    ),
    "one rank has everything": ({1: [0, 4], 2: [0, 4, 4], 4: [0, 4, 4, 4, 4]}, []),
}
"""Where each number of ranks cuts the prompts, and overrides."""


def share(batch: TrainBatch, first: int, stop: int) -> TrainBatch:
    """Select the prompts [first, stop) with their sequences."""
    mine = (batch.prompt_index >= first) & (batch.prompt_index < stop)
    part = batch.select(mine)
    start, end = int(batch.prompt_offsets[first]), int(batch.prompt_offsets[stop])
    return dataclasses.replace(
        part,
        prompt_tokens=batch.prompt_tokens[start:end],
        prompt_offsets=batch.prompt_offsets[first : stop + 1] - start,
        prompt_index=part.prompt_index - first,
    )


def run_update(strategy: Strategy, case: str, more: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """Return what one update of this rank's prompts gives.

    `grad.*` and the `norm` of the gradient, `loss` and `sum.*` of the metrics; the `clipped_norm` of the gradient once
    it was clipped; and after the step the log-probs [R] of the whole batch, `scored`, the `weight.*` themselves, and
    what the shards of all ranks hold. Then `again.*`, the gradients of the same update at the new weights, after those
    of others were discarded; and the log-probs once all weights were halved in the shards.
    """
    torch.set_num_threads(1)
    bounds, words = CASES[case]
    cut = bounds[strategy.world_size]
    config = settings("algorithm.kl.coef=0.05", "algorithm.entropy_coef=0.01", "optim.eps=1e-2", *words, *more)
    dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
    policy = PolicyModel(tiny_qwen3(), compute_dtype=dtype, options=HeadOptions())
    strategy.prepare(config)
    strategy.wrap(policy, config)
    update = PolicyUpdate(config, strategy, policy, torch.device("cpu"), PADDED, total_updates=1)
    full = ragged_batch(old=True, ref=True, empty=True)
    batch = share(full, cut[strategy.rank], cut[strategy.rank + 1])
    loss, sums = update.accumulate_gradients(batch, range(len(batch)))
    result = gradients(strategy)
    result |= {f"sum.{name}": torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}
    result["loss"] = torch.tensor(loss, dtype=torch.float64)
    result["norm"] = torch.as_tensor(strategy.clip_gradients(0.0)).clone()
    strategy.clip_gradients(0.1 * float(result["norm"]))
    result["clipped_norm"] = torch.as_tensor(strategy.clip_gradients(0.0)).clone()
    strategy.step(0.05)
    if isinstance(strategy, Stepping):
        assert all(p.grad is None for p in policy.parameters()), "plans of these strategies do not keep them"
    result["squares"] = torch.zeros(len(full.tokens))
    result["scored"] = update.score(full, square_sums=result["squares"])
    result |= {f"weight.{name}": weight.clone() for name, weight in strategy.gather_full_parameters()}
    result |= joined_shards(strategy)
    update.accumulate_gradients(batch, range(len(batch) // 2))
    strategy.discard_gradients()
    full = with_weights(full, range(len(full)), torch.ones(len(full)))
    signals = loss_signals(full, rollout=False)
    if strategy.rank == 0 or strategy.has_collectives_in_passes:  # else a rank repeats its passes alone
        with strategy.accumulate(last=False):  # as an update that was broken off leaves it
            group = strategy.sequence_group
            micro = shard_micro_batch(
                build_micro_batch(full, [[0]], signals, PADDED, multiple=group.size), group, full_sequences=False
            )
            strategy.backward(strategy.module(micro, update.loss_fn, 0.0).loss)
        if isinstance(strategy, Deepspeed) and not strategy.shards and strategy.world_size > 1:
            assert_held_as_planned(strategy, sharding_of(config.trainer, strategy.world_size))
    strategy.discard_gradients()
    update.accumulate_gradients(batch, range(len(batch)))
    result |= {f"again.{name}": gradient for name, gradient in gradients(strategy).items()}
    strategy.discard_gradients()
    for shard in strategy.param_shards():
        shard.values["parameter"].mul_(0.5)
    strategy.refresh_from_shards()
    result["scored halved"] = update.score(full)
    return result


def assert_held_as_planned(strategy: Strategy, sharding: Sharding) -> None:
    """Check that after a pass the rank has unreduced gradients if and only if they are planned."""
    held = [p.grad is not None for p in strategy.policy.parameters()]
    assert held == [sharding.gradients == 1 or sharding.syncs_once] * len(held), sharding


def joined_shards(strategy: Strategy) -> dict[str, torch.Tensor]:
    """Return what the shards of all ranks hold, put together: `shard.KEY.NAME` [elements], and `step.NAME`."""
    mine = [
        (p.name, p.shape, p.start, {key: value.clone() for key, value in p.values.items()}, float(p.step or 0))
        for p in strategy.owned_shards()
        if p.count
    ]
    whole: dict[str, torch.Tensor] = {}
    for name, shape, start, values, step in (shard for rank in strategy.gather_objects(mine) for shard in rank):
        for key, value in values.items():
            target = whole.setdefault(f"shard.{key}.{name}", torch.full((math.prod(shape),), torch.nan))
            assert target[start : start + len(value)].isnan().all(), f"{name}: in two shards"
            target[start : start + len(value)] = value
        whole[f"step.{name}"] = torch.tensor(step)
    return whole


def gradients(strategy: Strategy, *, all_used: bool = True) -> dict[str, torch.Tensor]:
    """Return the full gradients of an update, averaged over ranks, for any strategy.

    Args:
        strategy: after the update's passes.
        all_used: whether each parameter must have one; else those that no rank uses are left out.
    """
    found = {}
    for name, parameter in strategy.policy.model.named_parameters():
        if not parameter.requires_grad:
            continue
        if isinstance(strategy, Deepspeed):
            from deepspeed.utils import safe_get_full_grad

            gradient = safe_get_full_grad(parameter)
        else:
            assert isinstance(strategy, Stepping)
            gradient = strategy.gradient(parameter)
        assert gradient is not None or not all_used, name
        if gradient is None:
            continue
        if isinstance(strategy, Fsdp2):
            sharded = torch.empty_like(parameter.detach())
            assert isinstance(sharded, DTensor)
            sharded.to_local().copy_(gradient)
            gradient = strategy._tensor.gather_full(name, sharded.full_tensor())
        found[f"grad.{name}"] = gradient.clone()
    return found


def main() -> None:
    out, ways = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    for way, (name, *more) in ways.items():
        for case in CASES:
            strategy = STRATEGIES.load(name).make(torch.device("cpu"), "gloo")
            values = run_update(strategy, case, more)
            if strategy.rank == 0:
                (out / way).mkdir(exist_ok=True)
                # tied parameters share memory, which safetensors refuses
                save_file({key: value.contiguous() for key, value in values.items()}, out / way / f"{case}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    with ended_as_rank():
        main()
