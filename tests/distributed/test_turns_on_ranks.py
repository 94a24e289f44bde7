"""Trajectories of several turns on processes: the gradient of each strategy is that of the formula."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from hwgrpo.catalog import STRATEGIES
from hwgrpo.training.policy.layouts import GROUPED, PACKED, PADDED, Layout
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.training.update.policy_update import PolicyUpdate
from tests.distributed.strategy_worker import gradients
from tests.support.models.tiny import settings, tiny_qwen3
from tests.support.models.trajectories import forked as forked_rows
from tests.support.models.trajectories import gradient_by_formula, share_of, train_batch, trajectories
from tests.support.numbers.rounding import STEP, assert_gradients_close
from tests.support.processes.ranks import forked

CUTS = {2: [0, 1, 4], 4: [0, 0, 1, 2, 4]}
"""Where each number of ranks cuts the prompts: of four ranks one has none."""
LAYOUTS = {layout.name: layout for layout in (PADDED, PACKED, GROUPED)}


def config_of(strategy: str, size: int):
    words = (
        "algorithm.advantage.name=gigpo",
        "algorithm.kl.coef=0.05",
        "algorithm.aggregation.name=seq-mean-token-mean",
    )
    sizes = ("rollout.max_response_tokens=32", "trainer.tokens_per_micro_batch=64")
    shared = (f"trainer.sequence_parallel_size={size}",) if size > 1 else ()
    return settings(*words, *sizes, f"trainer.strategy={strategy}", *shared)


def played(rows: bool):
    """Return prompts and trajectories; with `rows` some have several."""
    prompts, completions = trajectories()
    return prompts, forked_rows(prompts, completions) if rows else completions


def update_on_rank(strategy_name: str, layout: Layout, size: int, rows: bool, file: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = config_of(strategy_name, size)
    strategy = STRATEGIES.load(strategy_name).make(torch.device("cpu"), "gloo")
    strategy.prepare(config)
    policy = PolicyModel(tiny_qwen3(), compute_dtype=torch.float32, options=HeadOptions())
    strategy.wrap(policy, config)
    update = PolicyUpdate(config, strategy, policy, torch.device("cpu"), layout, total_updates=1)
    cuts = CUTS[strategy.world_size]
    mine = share_of(*played(rows), cuts[strategy.rank], cuts[strategy.rank + 1])
    batch = train_batch(*mine, config, strategy)
    loss, _ = update.accumulate_gradients(batch, range(len(batch)))
    found = gradients(strategy)
    if strategy.rank == 0:
        save_file({**{name: g.contiguous() for name, g in found.items()}, "loss": torch.tensor(loss).double()}, file)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("strategy", "ranks", "layout", "size", "rows"),
    [
        ("ddp", 2, "grouped", 1, True),
        ("fsdp2", 2, "packed", 1, False),
        ("ddp", 2, "padded", 2, True),
        ("ddp", 4, "packed", 1, False),
        ("fsdp2", 4, "grouped", 2, True),
    ],
)
def test_ranks_update_on_turns_as_the_formula_says(
    strategy: str, ranks: int, layout: str, size: int, rows: bool, tmp_path: Path
):
    file = tmp_path / "gradients.safetensors"
    assert forked(ranks, lambda rank: update_on_rank(strategy, LAYOUTS[layout], size, rows, file)) == [0] * ranks
    found = load_file(file)
    expected, theirs = gradient_by_formula(tiny_qwen3(), config_of(strategy, size), *played(rows))
    assert float(found.pop("loss")) == pytest.approx(expected, rel=STEP, abs=STEP)
    assert_gradients_close({name.removeprefix("grad."): g for name, g in found.items()}, theirs)
