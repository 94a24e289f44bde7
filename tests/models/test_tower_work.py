"""FLOPs of encoding images by formula against what torch counts while a tower computes."""

import copy
import math

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from hwgrpo.config.schema import LoraConfig
from hwgrpo.models.lora import apply_lora
from hwgrpo.models.tower_work import Patches, patches_of, tower_work
from hwgrpo.models.vision import ImageEncoder, freeze_vision, vision_parameters
from hwgrpo.values import PromptImages
from tests.support.models.tiny import tiny_qwen3
from tests.support.models.vision_families import IMAGE, VISION_FAMILIES, model_of, with_sound

CPU = torch.device("cpu")
PADDED = ("Gemma 4", "Gemma 4, images both ways", "LFM2-VL")
"""Families whose processors pad images to the largest: the work of padding does not count."""


def eager(name):
    """Return a copy of a family's model whose attention is made of products."""
    model = copy.deepcopy(model_of(name))
    model.set_attn_implementation("eager")
    if name == "LLaVA":
        model.config.vision_feature_layer = -1  # else its last layer has no gradient, which the formula counts
    return model


def work_of(model, *, backward):
    work = tower_work(model, backward=backward)
    assert work is not None
    return work


def counted(model, images):
    """Return the FLOPs that torch counts of encoding images, and of their gradients where something is trained."""
    encoder = ImageEncoder(model)
    with FlopCounterMode(display=False) as counter:
        made = encoder._encode(images, CPU)
        if encoder.trains:
            every = (*made.images, *(each for layer in made.deepstack for each in layer))
            torch.stack([each.sum() for each in every]).sum().backward()
    return counter.get_total_flops()


def prompt_of(name):
    """Return the tokens and the images of a prompt with one image, which is not padded."""
    for seed in range(1, 20):
        ids, images = VISION_FAMILIES[name].prompt(seed)
        if name not in PADDED or ids.count(IMAGE) == 6:
            return ids.count(IMAGE), images
    raise AssertionError("no such image")


def differs(name, model, trained, tokens):
    """Return by how many FLOPs torch may count more or less than the formula, as a range, and why."""
    if name == "Gemma 3" and trained == "projector":
        weight = model.model.multi_modal_projector.mm_input_projection_weight
        return 2 * weight.numel() * tokens, 2 * weight.numel() * tokens  # its norm is trained, and named after it
    if name.startswith("Gemma 4"):  # it averages patches by a product, as no other family does
        pooled = 2 * tokens * (4 * tokens) * 16 * (2 if trained == "all" else 1)
        return pooled, pooled
    if name in ("InternVL", "LLaVA"):  # the position of the class is no patch, and LLaVA's makes no token
        of_pixels = sum(p.numel() for _, n, p in vision_parameters(model) if "patch_embed" in n and p.ndim > 1)
        return -4 * of_pixels * math.ceil(tokens / 4), 0
    if name == "LLaVA-OneVision":  # the tokens that end rows, 4 of 52, have no patch
        return -4 / 52 * work_of(model, backward=trained != "none").of([tokens]), 0
    return 0, 0


@pytest.mark.parametrize("trained", ["none", "projector", "all"])
@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_encoding_an_image_needs_what_torch_counts(name, trained):
    model = eager(name)
    freeze_vision(model, trained)
    tokens, images = prompt_of(name)
    more = counted(model, images) - work_of(model, backward=trained != "none").of([tokens])
    least, most = differs(name, model, trained, tokens)
    assert least <= more <= most


@pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen2.5-VL"])
def test_patches_attend_to_their_own_image_or_window(name):
    """Of Qwen2.5-VL one layer has windows of 4 x 4 patches, and one has none."""
    sizes = [(4, 8), (8, 8)]
    pixels = torch.randn(sum(height * width for height, width in sizes), 3 * 2 * 4 * 4)
    images = PromptImages(
        {"pixel_values": pixels, "image_grid_thw": torch.tensor([(1, *size) for size in sizes])}, "", 0
    )
    model = eager(name).requires_grad_(False)
    work = work_of(model, backward=False)
    assert counted(model, images) == work.of([8, 16])
    per_pair = 4 * 16  # two products, of queries that are 16 wide
    windowed = {"Qwen2-VL": ((None, 2 * per_pair),), "Qwen2.5-VL": ((16, per_pair), (None, per_pair))}[name]
    assert work.per_pair == windowed
    assert work.of([24]) > work.of([8, 16])


@pytest.mark.parametrize("part", ["projector", "all"])
def test_adapters_of_the_tower_need_what_torch_counts(part):
    model = eager("Qwen2-VL")
    adapted = apply_lora(model, LoraConfig(rank=2, vision=part))
    tokens, images = prompt_of("Qwen2-VL")
    assert counted(adapted, images) == work_of(adapted, backward=True).of([tokens])


def test_a_tower_of_sound_encodes_no_image_and_a_text_model_has_none():
    config = with_sound()
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    assert work_of(model, backward=True) == tower_work(model_of("Gemma 4"), backward=True)
    assert tower_work(tiny_qwen3(), backward=False) is None


def test_published_towers_divide_images_as_their_papers_say():
    sizes = {
        kind: patches_of(getattr(transformers, f"{kind}Config")())
        for kind in ("Gemma3", "InternVL", "Llava", "Qwen2_5_VL")
    }
    assert sizes["Qwen2_5_VL"] == Patches(4.0, None, 14**2, 3 * 2 * 14**2)
    assert sizes["Llava"] == Patches(577 / 576, 577, 14**2, 3 * 14**2)  # 336 pixels, and the class
    assert sizes["InternVL"] == Patches(1025 / 256, 1025, 14**2, 3 * 14**2)  # 448 pixels, and the class
