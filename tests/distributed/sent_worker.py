"""Run by torchrun: what a rank sends of its state in an update, counted where strategies call torch.distributed.

torchrun --nproc-per-node 2 sent_worker.py FILE '{"WAY": ["STRATEGY", "OVERRIDE", ...], ...}'

Rank 0 writes FILE, JSON: for each way a list of [micro-batches, bytes], of an update with one micro-batch and of one
with several. A ring sends (ranks - 1) / ranks of these bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hwgrpo.catalog import STRATEGIES
from hwgrpo.cli.process_exit import ended_as_rank
from hwgrpo.training.policy.layouts import PADDED
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.training.update.policy_update import PolicyUpdate
from tests.distributed.strategy_worker import share
from tests.support.models.tiny import ragged_batch, settings, tiny_llama

BUDGETS = (4096, 32)
"""Tokens of a micro-batch: all of a rank's sequences, and a few of them."""
SMALL = 64
"""Bytes of counts and norms, which are no state."""
sent = 0.0


def counted(name: str, factor: float, tensor: Callable[..., torch.Tensor]) -> None:
    """Count the bytes of a collective's tensor, that often."""
    plain = getattr(dist, name)

    def call(*arguments: Any, **options: Any) -> Any:
        global sent
        size = tensor(*arguments, **options).nbytes
        sent += factor * size if size > SMALL else 0.0
        return plain(*arguments, **options)

    setattr(dist, name, call)


def count_all() -> None:
    """Have the collectives counted that move state, an all-reduce as a reduce-scatter and an all-gather."""
    counted("all_reduce", 2.0, lambda tensor, *_, **__: tensor)
    for name in ("all_gather_into_tensor", "all_gather_single"):  # the same, by torch 2.13's names and before
        if hasattr(dist, name):
            counted(name, 1.0, lambda output_tensor, *_, **__: output_tensor)
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        if hasattr(dist, name):
            counted(name, 1.0, lambda output, input, *_, **__: input)


def measured(name: str, words: list[str]) -> list[tuple[int, float]]:
    """Return micro-batches and bytes of the second and the third update: DeepSpeed makes itself ready in the first."""
    global sent
    found = []
    strategy = STRATEGIES.load(name).make(torch.device("cpu"), "gloo")
    config = settings("algorithm.kl.coef=0.05", "model.dtype=float32", *words)
    policy = PolicyModel(tiny_llama(), compute_dtype=torch.float32, options=HeadOptions())
    strategy.prepare(config)
    strategy.wrap(policy, config)
    batch = share(ragged_batch(old=True, ref=True), 2 * strategy.rank, 2 * strategy.rank + 2)
    passes: list[None] = []
    strategy.module.register_forward_pre_hook(lambda *_: passes.append(None))
    for budget in (BUDGETS[0], *BUDGETS):
        config.trainer.tokens_per_micro_batch = budget
        update = PolicyUpdate(config, strategy, policy, torch.device("cpu"), PADDED, total_updates=3)
        sent = 0.0
        passes.clear()
        update.accumulate_gradients(batch, range(len(batch)))
        strategy.step(0.01)
        found.append((len(passes), sent))
    return found[1:]


def main() -> None:
    count_all()
    dist.init_process_group("gloo")
    found = {way: measured(name, words) for way, (name, *words) in json.loads(sys.argv[2]).items()}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    with ended_as_rank():
        main()
