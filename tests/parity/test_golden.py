"""The fp64 step: nothing in it is rounded to less, and rounding is drawn as large as it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hwgrpo_kernels.ascend_tiles import LARGEST_BLOCK
from hwgrpo_kernels.tiles import TILES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hwgrpo.models.loading import image_sample, load_tokenizer
from hwgrpo.models.placeholders import placeholder_ids
from hwgrpo.models.vision import own_inputs
from hwgrpo.parity import golden
from hwgrpo.parity.families import FAMILIES, VISION_FAMILIES, save_family
from hwgrpo.parity.fixed_step import make_step
from hwgrpo.parity.golden import golden_step, load_golden_model, parameters_by_part, rounding_of
from hwgrpo.parity.rounded_operations import Precision, Rounded, in_fp64
from hwgrpo.parity.settings import load_settings

BELOW = (torch.float32, torch.bfloat16, torch.float16)


class _Dtypes(TorchDispatchMode):
    """Records operations with results of less than fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.below: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        dtypes = {leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        if dtypes & {*BELOW} and not func.is_view:
            self.below.append(str(func))
        return result


def family(name: str, folder: Path) -> tuple[Any, Any]:
    """Return a random model of a family in fp64, and the settings of a step."""
    save_family(name, folder)
    config = load_settings([f"model.path={folder}"])
    return load_golden_model(config.model), config


@pytest.mark.parametrize("name", [*FAMILIES, *VISION_FAMILIES])
def test_no_operation_of_the_model_has_a_result_below_fp64(name: str, tmp_path: Path):
    model, config = family(name, tmp_path)
    ids, images = torch.arange(8)[None], None
    if name in VISION_FAMILIES:
        sample = image_sample(config.model, model.config, load_tokenizer(config.model))
        assert sample is not None
        ids, images = torch.tensor([sample.token_ids]), sample.images
    with _Dtypes() as dtypes, in_fp64(), own_inputs(model, ids, images) as options:
        model(input_ids=ids, use_cache=False, **options).logits.sum().backward()
    assert dtypes.below == []


def test_half_of_the_prompts_show_images_of_their_own_and_their_tokens_are_in_no_response(tmp_path: Path):
    model, config = family("qwen2_vl", tmp_path)
    sample = image_sample(config.model, model.config, load_tokenizer(config.model))
    banned = placeholder_ids(model.config)
    step = make_step(len(model.get_input_embeddings().weight), 0, sample, banned)
    digests = [images and images.digest for images in step.images]
    assert [each is not None for each in digests] == [True, False] * 4
    assert len({*digests}) == 5
    assert not torch.isin(step.tokens, torch.tensor(banned)).any()
    for prompt, images in zip(step.prompts, step.images, strict=True):
        assert sum(token in banned for token in prompt) == (0 if images is None else 4)
        if images is not None:
            assert images.axes.tolist() == own_positions(model, prompt, images)


def own_positions(model: Any, prompt: tuple[int, ...], images: Any) -> list[list[int]]:
    ids = torch.tensor([prompt])
    found, _ = model.model.get_rope_index(
        ids, (ids == images.token_id).int(), image_grid_thw=images.inputs["image_grid_thw"]
    )
    return found[:, 0].T.tolist()


def test_without_the_mode_norms_and_softmax_of_the_same_model_are_fp32(tmp_path: Path):
    """What the test above would find."""
    model, _ = family("qwen3_moe", tmp_path)
    with _Dtypes() as dtypes:
        model(input_ids=torch.arange(8)[None], use_cache=False)
    assert len(dtypes.below) > 4


def test_it_is_the_step_of_one_sequence_at_a_time(tmp_path: Path):
    model, config = family("gemma3_text", tmp_path)
    step = make_step(len(model.get_input_embeddings().weight), seed=0)
    stages, _ = golden_step(model, step, config)
    expected = []
    with torch.no_grad(), in_fp64():
        for index, (start, end) in zip(step.prompt_index.tolist(), step.offsets.unfold(0, 2, 1).tolist(), strict=True):
            prompt = step.prompts[index]
            ids = torch.cat([torch.tensor(prompt), step.tokens[start:end]])
            logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
            log_p = (logits / config.rollout.temperature).log_softmax(-1)
            expected.append(log_p.gather(1, step.tokens[start:end, None])[:, 0])
    torch.testing.assert_close(stages["log-probs"], torch.cat(expected), rtol=1e-12, atol=1e-12)


def test_one_family_has_rows_of_several_blocks_and_is_sure_of_tokens(tmp_path: Path):
    model, config = family("granite", tmp_path)
    vocabulary = len(model.get_input_embeddings().weight)
    tiles = [tile for of in TILES.values() for each in (of.row_stats, of.row_grad) for tile in each.values()]
    for block in {tile.block for tile in tiles} | {LARGEST_BLOCK}:
        assert vocabulary > 2 * block
        assert vocabulary % block
    stages, _ = golden_step(model, make_step(vocabulary, seed=0), config)
    probability = stages["log-probs"].exp()
    assert probability.max() > 0.99
    assert probability.min() < 1e-10


def test_the_step_clips_ratios_on_both_sides_and_no_ratio_is_near_a_bound():
    for seed in range(5):
        step = make_step(128, seed)
        ratio = (-step.old_gaps).exp()
        advantage = torch.cat([part - part.mean() for part in step.rewards.split(3)]).repeat_interleave(
            step.offsets.diff()
        )
        assert ((ratio > 1.28) & (advantage > 0)).any()
        assert ((ratio < 0.8) & (advantage < 0)).any()
        nearest = torch.stack([(ratio.log() - torch.tensor(bound).log()).abs() for bound in (0.8, 1.2, 1.28)]).min()
        assert nearest > 0.05


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 2**-23), (torch.bfloat16, 2**-7)])
def test_an_operations_result_is_changed_by_at_most_one_rounding_of_each_summand(dtype, largest):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(16, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    with Rounded(Precision(dtype), seed=0):
        product, copied = a @ b, a.clone()
    change = (product / (a @ b) - 1).abs().max()
    assert largest / 4 < change <= 4 * largest  # 16 summands of fp32 round 16 times, as a random walk: 4 of eps / 2
    assert torch.equal(copied, a)


def test_backward_passes_are_rounded_too():
    x = torch.ones(4, dtype=torch.float64, requires_grad=True)
    y = x * 3
    with Rounded(Precision(torch.bfloat16, rounds_results=True), seed=0):
        (gradient,) = torch.autograd.grad((y * y).sum(), x)
    assert 0 < (gradient - 18).abs().max() < 18 * 5 * 2**-8


def test_tied_embeddings_get_their_last_gradient_after_the_layers(tmp_path: Path):
    tied, _ = family("qwen2", tmp_path / "tied")
    untied, _ = family("qwen3_moe", tmp_path / "untied")
    assert parameters_by_part(tied)["embeddings"] == ["model.embed_tokens.weight"]
    assert parameters_by_part(tied)["head"] == ["model.norm.weight"]
    parts = parameters_by_part(untied)
    assert parts["head"] == ["model.norm.weight", "lm_head.weight"]
    assert [*parts] == ["head", "layer 2", "layer 1", "embeddings"]


def test_rounding_of_a_part_that_amplifies_is_larger(tmp_path: Path):
    model, config = family("qwen2", tmp_path)
    step = make_step(len(model.get_input_embeddings().weight), seed=0)

    def moved(dtype: torch.dtype) -> dict[str, float]:
        draws = rounding_of(model, step, config, Precision(dtype), *golden_step(model, step, config))
        return {name: max(values) for name, values in draws.items()}

    fp32, bf16 = moved(torch.float32), moved(torch.bfloat16)
    assert fp32["embeddings"] == 0
    assert 1e3 < bf16["log-probs"] / fp32["log-probs"] < 1e6  # eps of bf16 is 2^16 of fp32's
    assert bf16["advantages"] == fp32["advantages"]


def test_a_parameter_that_the_loss_does_not_reach_is_not_decayed(tmp_path: Path):
    model, config = family("qwen2", tmp_path)
    model.unused = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    _, gradients = golden_step(model, make_step(len(model.get_input_embeddings().weight), seed=0), config)
    assert gradients["unused"] is None
    assert golden.gradient_norm(gradients) > 0
