"""Images on processes of which one has text alone: gradients are those of one process with all sequences."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from hwgrpo.catalog import STRATEGIES
from hwgrpo.models.lora import apply_lora
from hwgrpo.ragged import offsets_of
from hwgrpo.training.policy.layouts import GROUPED
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.values import Prompt, TrainBatch, image_columns
from tests.distributed.strategy_worker import gradients
from tests.support.models.tiny import settings
from tests.support.models.vision_families import VISION_FAMILIES, model_of, text
from tests.support.numbers.rounding import assert_gradients_close
from tests.support.processes.ranks import forked

WAYS = {
    "all trained": ("model.train_vision=all",),
    "adapters": ("model.lora.rank=2", "model.lora.vision=all"),
}


def batch_of(family: str, share: slice) -> TrainBatch:
    """Return two responses to each of the prompts of a share: of two with images and two of text."""
    draw = torch.Generator().manual_seed(3)
    of = VISION_FAMILIES[family]
    made = [of.prompt(1), of.prompt(2, images=2), (text(draw, 4, 6), None), (text(draw, 4, 6), None)]
    prompts = [Prompt(str(i), "", tuple(ids), None, {}, images=images) for i, (ids, images) in enumerate(made)]
    responses = [[text(draw, 3, 6) for _ in range(2)] for _ in prompts][share]
    prompts = prompts[share]
    lists = [response for pair in responses for response in pair]
    tokens = torch.tensor([token for response in lists for token in response])
    return TrainBatch(
        prompt_tokens=torch.tensor([token for prompt in prompts for token in prompt.token_ids]),
        prompt_offsets=offsets_of(torch.tensor([len(prompt.token_ids) for prompt in prompts])),
        prompt_index=torch.arange(len(prompts)).repeat_interleave(2),
        tokens=tokens,
        offsets=offsets_of(torch.tensor([len(response) for response in lists])),
        advantages=1.0 - 0.5 * (torch.arange(len(lists)) % 2),
        logprobs=torch.zeros(len(tokens)),
        **image_columns(prompts),
    )


def save_gradients(family: str, way: str, name: str, share: slice, file: Path | None) -> None:
    """Compute the gradients of an update on this process's share; write them to a file."""
    config = settings(*WAYS[way], f"trainer.strategy={name}", "trainer.tokens_per_micro_batch=4096")
    strategy = STRATEGIES.load(name).make(torch.device("cpu"), "gloo")
    strategy.prepare(config)
    model = copy.deepcopy(model_of(family)).requires_grad_(True)
    if way == "adapters":
        torch.manual_seed(0)
        model = apply_lora(model, config.model.lora)
        with torch.no_grad():  # of factors that are 0 half of the gradients were 0
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=0.1)
    policy = PolicyModel(model, compute_dtype=torch.float32, options=HeadOptions())
    assert policy.images is not None
    ids, images = VISION_FAMILIES[family].prompt(99)
    policy.images.sample = Prompt("sample", "", tuple(ids), None, {}, images=images)
    strategy.wrap(policy, config)
    update = PolicyUpdate(config, strategy, policy, torch.device("cpu"), GROUPED, total_updates=1)
    batch = batch_of(family, share)
    update.accumulate_gradients(batch, range(len(batch)))
    found = gradients(strategy)
    if file is not None:
        save_file({key: gradient.contiguous() for key, gradient in found.items()}, file)


def on_rank(family: str, way: str, name: str, rank: int, file: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    save_gradients(family, way, name, slice(0, 2) if rank == 0 else slice(2, 4), file if rank == 0 else None)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("family", "way", "strategy"),
    [
        ("Qwen2-VL", "adapters", "fsdp2"),
        ("Qwen2-VL", "adapters", "ddp"),
        ("Qwen3-VL", "adapters", "fsdp2"),
        ("Qwen3-VL", "all trained", "fsdp2"),
    ],
)
def test_a_rank_of_text_alone_sums_its_gradients_with_one_that_has_images(
    family: str, way: str, strategy: str, tmp_path: Path
):
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    assert forked(2, lambda rank: on_rank(family, way, strategy, rank, two)) == [0, 0]
    save_gradients(family, way, "single", slice(0, 4), one)
    found, expected = load_file(two), load_file(one)
    assert any("visual" in name and gradient.any() for name, gradient in expected.items())
    assert_gradients_close(found, expected)
