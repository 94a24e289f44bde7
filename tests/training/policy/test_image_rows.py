"""Rows with images: every layout gives what plain transformers computes of each sequence alone."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch

from hwgrpo.errors import ConfigError
from hwgrpo.training.policy import layout_check
from hwgrpo.training.policy.layouts import BRANCHED, GROUPED, GROUPED_MASKED, PACKED, PADDED, Layout
from hwgrpo.training.policy.micro_batch import MicroBatch, build_micro_batch
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.values import Prompt, PromptImages, TrainBatch
from tests.support.models.image_sequences import Sequences
from tests.support.models.vision_families import (
    VISION_FAMILIES,
    exact_copy,
    model_of,
)

LAYOUTS = {
    "padded": PADDED,
    "grouped_masked": GROUPED_MASKED,
    "grouped": GROUPED,
    "branched": BRANCHED,
    "packed": PACKED,
}
FAMILIES = ("Qwen2-VL", "Qwen3-VL", "Gemma 3", "InternVL")
"""One of each kind of positions and image: three axes; layers with features of their own; images that attend both ways;
tiles of a fixed size."""
REFUSED = {("Gemma 3", "grouped_masked"), ("Gemma 3", "grouped"), ("Gemma 3", "branched"), ("Gemma 3", "packed")}
"""Layouts that the startup check refuses: a mask over the row leaves out that images attend both ways."""


def policy_of(family: str) -> PolicyModel:
    """Return the policy of a copy of a family's model, with a prompt for startup checks."""
    policy = PolicyModel(copy.deepcopy(model_of(family)), compute_dtype=torch.float32, options=HeadOptions())
    assert policy.images is not None
    ids, images = VISION_FAMILIES[family].prompt(99)
    policy.images.sample = Prompt("sample", "", tuple(ids), None, {}, images=images)
    return policy.eval()


@cache
def expected(family: str, observes: bool) -> torch.Tensor:
    with torch.no_grad():
        return Sequences(family, observes=observes).reference(model_of(family))


def rows_of(batch: TrainBatch, layout: Layout) -> MicroBatch:
    return build_micro_batch(batch, layout.rows(batch, range(len(batch)), 10**4, 32), {}, layout)


def logprobs(policy: PolicyModel, batch: TrainBatch, layout: Layout) -> torch.Tensor:
    """Return [R] log-probs of the tokens that carry loss, 0 elsewhere."""
    micro = rows_of(batch, layout)
    values = torch.zeros(len(batch.tokens))
    with torch.no_grad():
        values[micro.token_index] = policy(micro).logprob
    return values


def difference(values: torch.Tensor, batch: TrainBatch, family: str, observes: bool) -> float:
    kept = slice(None) if batch.loss_mask is None else batch.loss_mask
    return float((values - expected(family, observes))[kept].abs().max())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layout_gives_the_models_own_logprobs_or_is_refused_by_the_startup_check(family: str, layout: str):
    policy, chosen = policy_of(family), LAYOUTS[layout]
    layout_check.check_images(policy)
    policy.eval()
    states = layout_check.compute_unsharded_states(policy)
    reason = layout_check.reason_against_layout(policy, replace(chosen, dense_up_to=0), states)
    assert (reason is not None) == ((family, layout) in REFUSED), reason
    if reason is None:
        for observes in (False, True):
            batch = Sequences(family, observes=observes).batch()
            assert difference(logprobs(policy, batch, chosen), batch, family, observes) < 2e-5


@pytest.mark.parametrize("layout", ["padded", "grouped_masked", "branched", "packed"])
@pytest.mark.parametrize("family", ["Qwen2-VL", "Qwen3-VL"])
def test_gradients_of_tower_projector_and_text_are_those_of_each_sequence_alone(family: str, layout: str):
    sequences, policy = Sequences(family, observes=True), policy_of(family)
    batch, exact = sequences.batch(), exact_copy(model_of(family))
    weights = torch.linspace(-1.0, 1.0, len(batch.tokens))
    assert batch.loss_mask is not None
    (sequences.reference(exact) * weights)[batch.loss_mask].sum().backward()

    micro = rows_of(batch, LAYOUTS[layout])
    micro = replace(micro, signals={"weight": weights[micro.token_index]})
    assert policy.images is not None
    policy(micro, lambda stats, rows: (stats.logprob * rows["weight"], {})).loss.backward()
    assert policy.images.encoded == 4  # two prompts with images, and two that were observed
    pairs = list(zip(policy.base.named_parameters(), exact.parameters(), strict=True))
    largest = max(float(own.grad.norm()) for _, own in pairs if own.grad is not None)
    for (name, parameter), own in pairs:
        if own.grad is None:
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            assert float((parameter.grad - own.grad).norm()) < 1e-5 * largest, name


def test_a_frozen_tower_encodes_the_images_of_a_prompt_once_in_all_passes():
    policy, batch = policy_of("Qwen2-VL"), Sequences("Qwen2-VL", observes=False).batch()
    policy.base.model.visual.requires_grad_(False)
    assert policy.images is not None
    for layout in (PADDED, PACKED, BRANCHED):
        logprobs(policy, batch, layout)
    pixels = sum(each.nbytes for each in batch.images if each is not None)
    assert (policy.images.encoded, policy.images.moved_bytes) == (2, pixels)


def mutants() -> dict[str, TrainBatch]:
    """Return batches with a mistake of which only images can tell."""
    batch = Sequences("Qwen2-VL", observes=True).batch()
    assert batch.prompt_axes is not None
    assert batch.shifts is not None
    shifted = batch.prompt_axes.clone()
    shifted[: int(batch.prompt_offsets[1])] += torch.tensor([0, 0, 1])
    first, second, third = batch.images
    (one,), (other,) = batch.seen[1], batch.seen[6]
    seen = [*batch.seen]
    seen[1], seen[6] = (replace_pixels(one, other),), (replace_pixels(other, one),)
    return {
        "positions of one row": replace(batch, prompt_axes=shifted),
        "images of two prompts": replace(batch, images=(replace_pixels(first, second), second, third)),
        "images of two responses": replace(batch, seen=tuple(seen)),
        "positions after an observed image": replace(batch, shifts=torch.zeros_like(batch.shifts)),
    }


def replace_pixels(images: PromptImages | None, other: PromptImages | None) -> PromptImages:
    """Return images with pixels of others, as many as they have."""
    assert images is not None
    assert other is not None
    pixels = other.inputs["pixel_values"]
    own = images.inputs["pixel_values"]
    changed = {**images.inputs, "pixel_values": pixels.repeat(-(-len(own) // len(pixels)), 1)[: len(own)]}
    return replace(images, inputs=changed, digest=f"{images.digest} with {other.digest}")


@pytest.mark.parametrize("mutant", mutants())
def test_a_mistake_in_positions_or_images_shows(mutant: str):
    batch = mutants()[mutant]
    for layout in (PADDED, BRANCHED):
        assert difference(logprobs(policy_of("Qwen2-VL"), batch, layout), batch, "Qwen2-VL", True) > 1e-2


def test_responses_that_begin_alike_share_no_tokens_of_images():
    sequences = Sequences("Qwen2-VL", observes=False)
    sequences.observe(1, *VISION_FAMILIES["Qwen2-VL"].prompt(21))
    ids, other = VISION_FAMILIES["Qwen2-VL"].prompt(21)
    sequences.responses[0], sequences.masks[0] = (
        sequences.responses[1][: -len(ids) - 3],
        sequences.masks[1][: -len(ids) - 3],
    )
    sequences.shifts[0] = sequences.shifts[1][: -len(ids) - 3]
    sequences.observe(0, ids, replace_pixels(other, VISION_FAMILIES["Qwen2-VL"].prompt(22)[1]))
    batch = sequences.batch()
    with torch.no_grad():
        own = sequences.reference(model_of("Qwen2-VL"))
    policy = policy_of("Qwen2-VL")
    for layout in (GROUPED, GROUPED_MASKED, BRANCHED):
        assert float((logprobs(policy, batch, layout) - own)[batch.loss_mask].abs().max()) < 2e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_without_sequences_trains_no_token_where_responses_observe_images(layout: str):
    batch = Sequences("Qwen2-VL", observes=True).batch()
    micro = build_micro_batch(batch, [], {}, LAYOUTS[layout])
    assert (micro.token_index.numel(), micro.images) == (0, ())


def test_a_model_that_bounds_its_logits_is_refused():
    model = copy.deepcopy(model_of("Gemma 4"))
    model.config.get_text_config().final_logit_softcapping = 5.0
    with pytest.raises(ConfigError, match="bounds its logits"):
        PolicyModel(model, compute_dtype=torch.float32, options=HeadOptions())
