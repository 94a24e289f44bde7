"""What encoding images needs: memory and FLOPs of a plan against tensors, and against what a run encodes."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import transformers
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.peaks import NVIDIA

from hwgrpo.config.schema import LoraConfig, ModelConfig
from hwgrpo.models.vision import MOST_REMEMBERED, ImageEncoder, freeze_vision
from hwgrpo.planning.memory import UNSHARDED, Work, encodings, estimate, prompts_at_once
from hwgrpo.planning.model_shape import model_shape
from hwgrpo.planning.planner import Planner
from hwgrpo.planning.step_time import Rates, forward_work, image_flops, step_seconds
from hwgrpo.planning.tower_shape import TowerShape, tower_shape
from hwgrpo.support.jsonlines import read_lines
from tests.support.models.tiny import settings
from tests.support.models.vision_families import VISION_FAMILIES, frozen, with_sound
from tests.support.runs import runs

WIDE = {"hidden_size": 64, "embed_dim": 64, "intermediate_size": 96}
WORK = Work(torch.float32, "cpu", prompts=4, prompt_tokens=16, micro_batch_tokens=64, images=(4, 2))
H100 = next(chip for chip in NVIDIA if chip.title == "H100 SXM")
FEATURES = "features of images, at most"


def config_of(family: str, layers: int) -> transformers.PreTrainedConfig:
    """Return a family's tiny configuration with a tower that is wider than its prompts are long."""
    config = VISION_FAMILIES[family].config()
    tower = config.vision_config
    for name, value in {**WIDE, "depth": layers, "num_hidden_layers": layers}.items():
        if hasattr(tower, name) and (family, name) != ("Qwen2-VL", "hidden_size"):  # there that of the text
            setattr(tower, name, value)
    if getattr(tower, "head_dim", None):
        tower.head_dim = 32
    if hasattr(tower, "fullatt_block_indexes"):
        tower.fullatt_block_indexes = [*range(layers)]
    if hasattr(config, "vision_feature_layer"):
        config.vision_feature_layer = -1
    return config


def prompt_of(family: str):
    """Return the images of the prompt of a family that has the most tokens: nothing of it is padding."""
    prompts = (VISION_FAMILIES[family].prompt(seed)[1] for seed in range(1, 20))
    return max(prompts, key=lambda images: sum(images.tokens))


def kept_for_backward(family: str, layers: int, dtype: torch.dtype, *, recomputed: bool) -> int:
    """Return the bytes that encoding an image keeps for the backward pass."""
    model = transformers.AutoModelForImageTextToText.from_config(config_of(family, layers), dtype=torch.float32).train()
    if recomputed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    weights = {tuple(each.weight.shape) for each in model.modules() if isinstance(each, torch.nn.Linear)}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        # weights, and what autocast made of them, are counted elsewhere
        if tuple(tensor.shape) not in weights and tuple(tensor.shape)[::-1] not in weights:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    cast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), cast:
        made = ImageEncoder(model)._encode(prompt_of(family), torch.device("cpu"))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert made.images[0].requires_grad
    return sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in parameters)


def wide_tower(family: str, layers: int) -> TowerShape:
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config_of(family, layers))
    freeze_vision(model, "all")
    return tower_shape(model)


@pytest.mark.parametrize(
    ("family", "within"),
    [
        ("Qwen2-VL", 0.08),  # under autocast the states between Qwen's layers have 16 bits, and count as fp32
        ("Qwen2.5-VL", 0.09),
        ("Qwen3-VL", 0.12),
        ("GLM-4.1V", 0.02),
        ("Gemma 3", 0.02),
        ("Gemma 4", 0.04),
        ("InternVL", 0.06),
        ("Mistral 3", 0.03),
        ("SmolVLM", 0.04),
        ("LLaVA", 0.02),
    ],
)
def test_a_trained_towers_activations_are_those_that_autograd_keeps(family, within):
    """Of two depths the difference: what a model keeps beside its layers cancels out."""
    images, shapes = prompt_of(family).tokens, [wide_tower(family, layers) for layers in (2, 4)]
    for dtype in (torch.float32, torch.bfloat16):
        kept = [kept_for_backward(family, layers, dtype, recomputed=False) for layers in (2, 4)]
        estimated = [shape.activation_bytes(images, dtype, recomputed=False) for shape in shapes]
        assert (kept[1] - kept[0]) / (estimated[1] - estimated[0]) == pytest.approx(1, abs=within), dtype
    kept = [kept_for_backward(family, layers, torch.float32, recomputed=True) for layers in (2, 4)]
    estimated = [shape.activation_bytes(images, torch.float32, recomputed=True) for shape in shapes]
    assert kept[1] - kept[0] == estimated[1] - estimated[0] == 2 * 4 * 64 * shapes[0].patches_in(images)


def test_a_frozen_tower_keeps_nothing_and_a_projector_what_it_reads_and_makes():
    model = frozen("SmolVLM")
    images, one = prompt_of("SmolVLM").tokens, torch.float32
    assert tower_shape(model).activation_bytes(images, one, recomputed=False) == 0
    freeze_vision(model, "projector")
    assert tower_shape(model).activation_bytes(images, one, recomputed=False) == 4 * sum(images) * (64 + 32)


@pytest.mark.parametrize("family", ["Qwen2-VL", "Qwen3-VL", "Gemma 3", "InternVL", "SmolVLM", "Mistral 3"])
def test_pixels_and_features_have_the_bytes_of_their_tensors(family):
    model, images = frozen(family), VISION_FAMILIES[family].prompt(1)[1]
    shape = tower_shape(model)
    pixels = images.inputs["pixel_values"]
    of_classes = 1 if family != "InternVL" else 16 / 17  # a position of the class has no pixels
    assert shape.pixel_bytes(images.tokens, 4) * of_classes == pixels.nbytes
    features = ImageEncoder(model)._encode(images, torch.device("cpu"))
    assert shape.feature_bytes(images.tokens, 4) == features.nbytes


def shape_of(*words: str):
    """Return the settings of a run of the tiny Qwen2-VL, and its shape."""
    config = settings(*words)
    return config, model_shape(config.model, VISION_FAMILIES["Qwen2-VL"].config())


@pytest.mark.parametrize("shares", [True, False])
def test_a_prompt_is_encoded_once_in_each_micro_batch_that_has_its_responses(shares):
    for n, budget, prompts in product((2, 3, 4, 5), (20, 31, 62, 100, 200, 10_000), (1, 2, 5)):
        config = settings(f"rollout.n={n}", f"trainer.prompts_per_step={prompts}")
        work = replace(WORK, prompts=prompts, micro_batch_tokens=budget, shares_prompt=shares)
        responses = min(n, max(1, (budget - 16) // 15)) if shares else 1  # to a prompt in a row
        of_prompt = -(-n // responses)
        at_once = max(1, budget // (16 + 15 * responses))
        pairs = {(row // at_once, row // of_prompt) for row in range(prompts * of_prompt)}
        assert encodings(config, work) == len(pairs), (n, budget, prompts)
        most = max(sum(micro == each for micro, _ in pairs) for each in range(at_once))
        assert prompts_at_once(config, work) <= most <= prompts_at_once(config, work) + 1


def test_what_is_frozen_encodes_once_per_prompt_and_what_is_trained_in_each_pass():
    config, shape = shape_of("rollout.n=8")
    tower = shape.tower
    once, both = tower.forward.of(WORK.images), tower.both.of(WORK.images)
    assert both == once

    def flops(*words: str, rescored: bool = False, copied: bool = False) -> float:
        config, shape = shape_of("rollout.n=8", *words)
        return image_flops(config, shape.tower, WORK, rescored=rescored, copied=copied)

    assert flops() == 4 * once, "per prompt, not per response"
    assert flops(copied=True, rescored=True) == 2 * 4 * once
    assert flops("algorithm.kl.coef=0.1") == 2 * 4 * once, "the reference has a tower of its own"
    trained = "model.train_vision=all"
    both = shape_of(trained)[1].tower.both.of(WORK.images)
    assert both > 2.5 * once
    passed = encodings(config, WORK)
    assert passed == 16, "two of the eight responses to each of four prompts in a micro-batch"
    assert flops(trained) == 4 * once + passed * both
    assert flops(trained, copied=True) == 4 * once + passed * both, "each has its own pass already"
    assert flops(trained, rescored=True) == 4 * once + passed * (both + once)
    assert flops(trained, "trainer.epochs_per_batch=2") == 4 * once + 2 * passed * both
    assert flops(trained, "model.gradient_checkpointing=true") == 4 * once + passed * (both + once)
    assert image_flops(config, tower, replace(WORK, images=()), rescored=False, copied=False) is None
    assert image_flops(config, None, WORK, rescored=False, copied=False) is None


@pytest.mark.parametrize("trained", ["none", "all"])
def test_a_step_encodes_as_often_as_it_is_planned(trained, tmp_path):
    words = (
        "model.path=builtin://tiny?task=squares&steps=0",
        "data.train=task://squares",
        "data.max_prompt_tokens=64",
        "data.max_rows=8",
        "reward.functions=[length]",
        "rollout.max_response_tokens=8",
        "trainer.validate_every=0",
        "trainer.validate_at_start=false",
        "trainer.max_steps=1",
        "algorithm.entropy_coef=0.01",  # else groups of equal rewards are left out
        f"model.train_vision={trained}",
    )
    assert runs.run(tmp_path / "run", *words) == "completed"
    [line] = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "perf/images_encoded" in line]
    planner = Planner(runs.small(tmp_path / "other", *words), image_tokens=16)
    work = planner.work(BACKEND, 1, separate=False)
    tower = replace(planner.shape.tower, both=planner.shape.tower.forward)  # each call counts once
    found = image_flops(planner.config, tower, work, rescored=False, copied=False)
    assert found / tower.forward.of(work.images) == line["perf/images_encoded"]


def memory(*words: str, work: Work = WORK):
    config, shape = shape_of(*words)
    return estimate(config, shape, work)


def test_features_are_remembered_as_far_as_the_data_or_the_limit_go():
    one = 6 * 32 * 4  # of a prompt
    assert memory().always[FEATURES] == MOST_REMEMBERED + one
    assert memory(work=replace(WORK, known_prompts=10)).always[FEATURES] == 10 * one
    assert memory(work=replace(WORK, known_prompts=10**8)).always[FEATURES] == MOST_REMEMBERED + one
    assert memory("algorithm.kl.coef=0.1", work=replace(WORK, known_prompts=10)).always[FEATURES] == 2 * 10 * one
    assert FEATURES not in memory("model.train_vision=all").always
    bf16 = replace(WORK, dtype=torch.bfloat16, known_prompts=10)
    assert memory("model.train_vision=all", work=bf16).always[FEATURES] == 10 * one // 2, "the sampler's copy is frozen"


def test_where_another_engine_samples_the_update_encodes_and_the_engine_for_itself():
    name, (config, shape) = "a layer of the tower on a prompt's images", shape_of()
    beside = replace(WORK, samples=False, beside=True)
    assert name not in memory().update
    assert memory(work=beside).update[name] == memory().rollout[name]
    once, twice = (
        step_seconds(config, shape, None, work, UNSHARDED, H100, Rates(), devices=1, samplers=0)["images"]
        for work in (WORK, beside)
    )
    assert once
    assert twice == pytest.approx(2 * once)


def test_a_trained_tower_has_activations_of_a_micro_batchs_prompts_and_text_has_none():
    [(name, size)] = [each for each in memory("model.train_vision=all").update.items() if "patches" in each[0]]
    shape = shape_of("model.train_vision=all")[1].tower
    assert name == "activations of 24 patches of images, about"
    assert size == shape.activation_bytes((4, 2), torch.float32, recomputed=False)
    wide = memory("model.train_vision=all", "rollout.n=4", work=replace(WORK, micro_batch_tokens=10_000))
    assert wide.update["activations of 96 patches of images, about"] == 4 * size
    plain = memory("model.train_vision=all", work=replace(WORK, images=()))
    for part in (plain.always, plain.rollout, plain.update, plain.host):
        assert not any("image" in name for name in part)
    device = memory(work=replace(WORK, device_type="cuda"))  # hw: any accelerator
    assert device.host["pixels of a step's prompts"] == 4 * 24 * 3 * 2 * 16 * 4


def test_a_plan_assumes_the_largest_image_that_the_settings_allow():
    def images(*words: str, **options) -> tuple[int, ...]:
        words = ("model.path=builtin://tiny?task=squares&steps=0", "rollout.engine=local", *words)
        return Planner(settings(*words), **options).work(BACKEND, 1, separate=False).images

    assert images("data.max_prompt_tokens=48") == (48,)
    assert images("data.max_prompt_tokens=48", "data.images.max_pixels=640") == (10,)  # of 8 x 8 pixels
    assert images(image_tokens=7) == (7,)
    assert images(image_tokens=0) == ()
    assert images("rollout.engine=vllm_server", "rollout.server.url=http://a", image_tokens=7) == (7,)


def test_a_tower_of_sound_is_held_and_neither_trained_nor_read():
    config = ModelConfig(path="unused", train_vision="all")
    plain, sound = (model_shape(config, each) for each in (VISION_FAMILIES["Gemma 4"].config(), with_sound()))
    more = sound.parameters - plain.parameters
    assert (plain.other_parameters, sound.other_parameters) == (0, more)
    assert more > 0
    assert sound.vision_parameters == plain.vision_parameters
    assert sound.trainable == plain.trainable == plain.parameters
    assert forward_work(config, with_sound()) == forward_work(config, VISION_FAMILIES["Gemma 4"].config())
    run, work = settings(), replace(WORK, dtype=torch.bfloat16)
    devices = {"devices": 1, "samplers": 0}
    seconds = [
        step_seconds(run, shape, forward_work(config, with_sound()), work, UNSHARDED, H100, Rates(), **devices)
        for shape in (plain, sound)
    ]
    assert seconds[0]["decode"] == seconds[1]["decode"] > 0
    adapted = replace(config, train_vision="none", lora=LoraConfig(rank=2, vision="all"))
    images = VISION_FAMILIES["Gemma 4"].config()
    assert model_shape(adapted, with_sound()).trainable == model_shape(adapted, images).trainable
