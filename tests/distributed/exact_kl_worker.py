"""One update with the KL over the full vocabulary, by one process and by ranks.

torchrun --nproc-per-node 2 exact_kl_worker.py OUT '{"fsdp2": ["fsdp2", "trainer.strategy=fsdp2"], ...}' '["copy", ...]'

writes the results of rank 0 to OUT/WAY CASE.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from hwgrpo.catalog import STRATEGIES
from hwgrpo.cli.process_exit import ended_as_rank
from hwgrpo.training.strategies.single import Single
from hwgrpo.training.strategies.strategy import Strategy
from tests.distributed.strategy_worker import gradients, share
from tests.support.models.exact_kl import LORA, exact_update
from tests.support.models.steps import CPU
from tests.support.models.tiny import ragged_batch, tiny_qwen3

SMALL = (
    *("trainer.tokens_per_micro_batch=32", "data.max_prompt_tokens=8", "rollout.max_response_tokens=8"),
    *("optim.eps=1e-2", "algorithm.entropy_coef=0.01"),
)
CASES = {
    "copy": (),
    "untied": (),
    "adapters": LORA,
    "existing adapters": (),
    "bf16": ("model.dtype=bfloat16",),
}
CUTS = {1: [0, 4], 2: [0, 1, 4]}
"""Where each number of ranks cuts the prompts: one rank has more micro-batches than the other."""


def run_case(strategy: Strategy, case: str, more: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """Return `grad.*`, `loss` and `sum.*` of an update of this rank's prompts, and after a step those of `again.*`."""
    torch.set_num_threads(1)
    words = (*SMALL, *CASES[case], *more)
    with TemporaryDirectory() as folder:
        if case == "existing adapters":
            exact_update(Single(CPU, "gloo"), tiny_qwen3, LORA).policy.model.save_pretrained(folder)
            words = (*words, f"model.lora.adapter={folder}")
        update = exact_update(strategy, lambda: tiny_qwen3(tied=case != "untied"), words)
    cut = CUTS[strategy.world_size]
    batch = share(ragged_batch(old=True, ref=True, empty=True), cut[strategy.rank], cut[strategy.rank + 1])
    assert update.with_ref_logprobs(batch, update.reference) is batch
    result = {}
    for name in ("", "again."):
        loss, sums = update.accumulate_gradients(batch, range(len(batch)))
        result |= {f"{name}{key}": value for key, value in gradients(strategy).items()}
        result |= {f"{name}sum.{key}": torch.tensor(value, dtype=torch.float64) for key, value in sums.items()}
        result[f"{name}loss"] = torch.tensor(loss, dtype=torch.float64)
        strategy.step(5e-4)
    return result


def main() -> None:
    out, ways, cases = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    dist.init_process_group("gloo")
    for way, (name, *words) in ways.items():
        for case in cases:
            strategy = STRATEGIES.load(name).make(CPU, "gloo")
            values = run_case(strategy, case, words)
            if strategy.rank == 0:
                save_file({key: value.contiguous() for key, value in values.items()}, out / f"{way} {case}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with ended_as_rank():
        main()
