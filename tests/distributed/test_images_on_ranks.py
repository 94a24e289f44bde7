"""Images on processes, of which one has prompts of text alone: gradients are those of one process with all prompts."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from hwgrpo.catalog import STRATEGIES
from hwgrpo.training.policy.layouts import BRANCHED, PACKED, PADDED, Layout
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.values import Prompt
from tests.distributed.strategy_worker import gradients
from tests.support.models.image_sequences import Sequences
from tests.support.models.tiny import settings
from tests.support.models.vision_families import VISION_FAMILIES, model_of
from tests.support.numbers.rounding import STEP, assert_gradients_close
from tests.support.processes.ranks import forked

FAMILY = "Qwen3-VL"
SHARES = {1: [(0, 1, 2)], 2: [(0, 1), (2,)]}
"""Prompts of each rank; prompt 2 is text."""


def update_on_rank(name: str, layout: Layout, file: Path) -> None:
    torch.set_num_threads(1)
    if name != "single":
        dist.init_process_group("gloo")
    config = settings("model.train_vision=all", f"trainer.strategy={name}", "trainer.tokens_per_micro_batch=48")
    strategy = STRATEGIES.load(name).make(torch.device("cpu"), "gloo")
    strategy.prepare(config)
    policy = PolicyModel(copy.deepcopy(model_of(FAMILY)), compute_dtype=torch.float32, options=HeadOptions())
    assert policy.images is not None
    ids, images = VISION_FAMILIES[FAMILY].prompt(99)
    policy.images.sample = Prompt("sample", "", tuple(ids), None, {}, images=images)
    strategy.wrap(policy, config)
    update = PolicyUpdate(config, strategy, policy, torch.device("cpu"), layout, total_updates=1)
    batch = Sequences(FAMILY, observes=False, prompts=SHARES[strategy.world_size][strategy.rank]).batch()
    loss, _ = update.accumulate_gradients(batch, range(len(batch)))
    found = gradients(strategy)
    if strategy.rank == 0:
        save_file({**{name: g.contiguous() for name, g in found.items()}, "loss": torch.tensor(loss).double()}, file)
    if name != "single":
        dist.destroy_process_group()


@pytest.mark.parametrize("layout", [PADDED, PACKED, BRANCHED], ids=lambda layout: layout.name)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_gradients_of_text_model_tower_and_projector_are_those_of_one_process(strategy, layout, tmp_path: Path):
    update_on_rank("single", layout, tmp_path / "one")
    assert forked(2, lambda rank: update_on_rank(strategy, layout, tmp_path / "two")) == [0, 0]
    one, two = load_file(tmp_path / "one"), load_file(tmp_path / "two")
    assert float(two.pop("loss") - one.pop("loss")) == pytest.approx(0, abs=1e-6)
    assert any("visual.merger" in name for name in one)
    assert_gradients_close(two, one, STEP)
