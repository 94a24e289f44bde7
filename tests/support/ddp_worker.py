"""Run by torchrun: one update of a fixed batch, each rank on its share of the prompts; rank 0 saves what resulted.

torchrun --nproc-per-node 2 ddp_worker.py OUT.safetensors EXTRA_OVERRIDE...
"""

import dataclasses
import sys

import torch
from safetensors.torch import save_file
from tiny import ragged_batch, settings, tiny_qwen3

from hwgrpo.training.layouts import PADDED
from hwgrpo.training.optimizer import build_optimizer
from hwgrpo.training.policy import HeadOptions, PolicyModel
from hwgrpo.training.strategies.ddp import Ddp
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.training.update import PolicyUpdate
from hwgrpo.values import TrainBatch


def share(batch: TrainBatch, first: int, stop: int) -> TrainBatch:
    """Cut out the prompts [first, stop) with their sequences."""
    mine = (batch.prompt_index >= first) & (batch.prompt_index < stop)
    tokens = torch.repeat_interleave(mine, batch.lengths)
    lengths = batch.lengths[mine]
    start, end = int(batch.prompt_offsets[first]), int(batch.prompt_offsets[stop])
    return dataclasses.replace(
        batch,
        prompt_tokens=batch.prompt_tokens[start:end],
        prompt_offsets=batch.prompt_offsets[first : stop + 1] - start,
        prompt_index=batch.prompt_index[mine] - first,
        tokens=batch.tokens[tokens],
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        advantages=batch.advantages[mine],
        rollout_logprobs=batch.rollout_logprobs[tokens],
        old_logprobs=batch.old_logprobs[tokens],
        ref_logprobs=batch.ref_logprobs[tokens],
    )


def run_update(strategy: Strategy, overrides: list[str], bounds: list[int]) -> dict[str, torch.Tensor]:
    """Leave out the optimizer: return gradients, loss and metric sums of one update on this rank's prompts."""
    torch.set_num_threads(1)
    config = settings("algorithm.kl.coef=0.05", "algorithm.entropy_coef=0.01", *overrides)
    policy = PolicyModel(tiny_qwen3(), compute_dtype=torch.float32, options=HeadOptions())
    strategy.wrap(policy)
    update = PolicyUpdate(
        config, strategy, policy, build_optimizer(policy, config.optim), torch.device("cpu"), PADDED, total_updates=1
    )
    full = ragged_batch(old=True, ref=True, empty=True)
    batch = share(full, bounds[strategy.rank], bounds[strategy.rank + 1])
    loss, sums = update.accumulate_gradients(batch, range(len(batch)))
    result = {f"grad.{name}": p.grad for name, p in policy.model.named_parameters()}
    result |= {f"sum.{name}": torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}
    result["norm"] = strategy.clip_gradients(0.0)
    return {name: tensor.clone() for name, tensor in result.items()} | {"loss": torch.tensor(loss, dtype=torch.float64)}


if __name__ == "__main__":
    out, middle, *words = sys.argv[1:]
    ddp = Ddp(torch.device("cpu"), "gloo")
    values = run_update(ddp, words, [0, int(middle), 4])
    if ddp.rank == 0:
        # tied parameters share memory, which safetensors refuses
        save_file({name: tensor.contiguous() for name, tensor in values.items()}, out)
    ddp.close()
