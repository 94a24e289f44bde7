"""What devices send each other of a run's state, by the arithmetic of each way to cut it."""

from dataclasses import replace

import pytest
import torch
from hwgrpo_backends.peaks import NVIDIA

from hwgrpo.config.schema import DeepspeedConfig, TrainerConfig
from hwgrpo.planning.memory import Work
from hwgrpo.planning.model_shape import ModelShape, model_shape
from hwgrpo.planning.planned_sharding import planned_sharding, sharding_of, strategy_variants
from hwgrpo.planning.step_time import Rates, forward_work, passes, step_seconds
from hwgrpo.training.strategies.parameter_shapes import ParameterShape, ParameterUnit
from hwgrpo.training.strategies.sharding import Sharding
from tests.support.models.tiny import settings, tiny_qwen3

MICRO_BATCHES = 6
WORDS = (f"rollout.n={MICRO_BATCHES}", "trainer.prompts_per_step=8")
WORK = Work(dtype=torch.bfloat16, device_type="cuda", prompts=1, prompt_tokens=16, micro_batch_tokens=16)
"""Of eight devices: each response is a micro-batch."""
FP32, BF16 = 4, 2
MODEL = tiny_qwen3(vocab=64)
"""Its dimensions are multiples of eight: nothing is padded."""
MODEL_SHAPE = model_shape(settings(*WORDS).model, MODEL.config)
PARTS = {
    "single": 0,
    # gradients are scattered as sums, then gathered
    "ddp": 2 * FP32,
    # in each pass weights are gathered for the forward and for the backward, and gradients scattered
    **dict.fromkeys(("fsdp2", "fsdp2+offload", "zero3", "zero3+offload"), MICRO_BATCHES * (2 * BF16 + FP32)),
    # as ddp, and the new weights are gathered
    "zero1": 2 * FP32 + FP32,
    # gradients after every micro-batch, since only a part of them is kept
    "zero2": MICRO_BATCHES * 2 * FP32 + FP32,
}
"""Bytes for each parameter in an update, in rings of very many devices."""


def quantized(unit: ParameterUnit) -> ParameterUnit:
    """Return a unit whose products with frozen matrices read codes."""
    return replace(
        unit, parameters=tuple(replace(p, is_quantized=unit.is_layer and p.is_castable) for p in unit.parameters)
    )


def sent(strategy: str | Sharding, devices: int, *more: str, shape: ModelShape | None = None) -> float:
    """Return the bytes that a device sends in a step."""
    config = settings(*WORDS, *more)
    found = step_seconds(
        config,
        shape or model_shape(config.model, MODEL.config),
        None,
        WORK,
        planned_sharding(strategy, devices) if isinstance(strategy, str) else strategy,
        NVIDIA[0],
        Rates(link=1.0),
        devices=devices,
        samplers=0,
    )["exchange"]
    assert found is not None
    return found


def test_every_way_to_cut_a_run_has_its_figure():
    assert set(PARTS) == set(strategy_variants())


@pytest.mark.parametrize("strategy", PARTS)
def test_devices_send_each_part_as_often_as_a_ring_does(strategy: str):
    parameters = sum(p.numel() for p in MODEL.parameters())
    devices = 1 if strategy == "single" else 8
    assert sent(strategy, devices) == pytest.approx(PARTS[strategy] * parameters * (devices - 1) / devices)


def test_gradients_that_are_reduced_once_per_update_are_sent_as_those_of_replicas():
    trainer = TrainerConfig(strategy="deepspeed", deepspeed=DeepspeedConfig(sync_every="update"))
    assert sent(sharding_of(trainer, 8), 8) == sent("zero1", 8)


@pytest.mark.parametrize("strategy", PARTS)
def test_one_device_sends_nothing(strategy: str):
    assert sent(strategy, 1) == 0


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp2"])
def test_adapters_alone_are_exchanged_and_frozen_weights_gathered(strategy: str):
    whole = model_shape(settings(*WORDS).model, MODEL.config)
    adapters = ParameterUnit((ParameterShape("adapter", (8, whole.parameters // 64), is_adapter=True),))
    part = replace(whole, units=(*whole.units, adapters))
    gathered = MICRO_BATCHES * 2 * BF16 * whole.parameters * 7 / 8 if strategy == "fsdp2" else 0
    of_adapters = gathered / 8  # which are gathered, too
    expected = (sent(strategy, 8) - gathered) / 8 + gathered + of_adapters
    assert sent(strategy, 8, shape=part) == pytest.approx(expected)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_each_pass_over_a_batch_exchanges_anew(strategy: str):
    assert sent(strategy, 8, "trainer.epochs_per_batch=2") == pytest.approx(2 * sent(strategy, 8))


@pytest.mark.parametrize(("strategy", "gathered"), [("ddp", 0), ("fsdp2", 7 * FP32), ("zero3", 7 * FP32)])
@pytest.mark.parametrize("samplers", [0, 4])
def test_new_weights_are_gathered_in_fp32_with_padding_and_sent_on_to_devices_that_sample(strategy, gathered, samplers):
    """Seven rows of 5 over eight devices: rows go to one device each, and elements evenly."""
    config = settings(*WORDS)
    shape = replace(model_shape(config.model, MODEL.config), units=(ParameterUnit((ParameterShape("w", (7, 5)),)),))
    chip, rates = replace(NVIDIA[0], bandwidth=1e30), Rates(link=1.0)
    sharding = planned_sharding(strategy, 8)
    sync = step_seconds(config, shape, None, WORK, sharding, chip, rates, devices=8, samplers=samplers)["sync"]
    assert sync == pytest.approx(gathered * 5 + (BF16 * 35 if samplers else 0))


QUANTIZED = replace(MODEL_SHAPE, units=tuple(quantized(unit) for unit in MODEL_SHAPE.units))


def seconds(shape: ModelShape, *more: str, **rates: float) -> dict[str, float]:
    """Return the seconds of a step of one device with a bandwidth of a byte per second and free products."""
    config = settings(*WORDS, *more)
    chip = replace(NVIDIA[0], bandwidth=1.0, flops={"bfloat16": 1e30})
    frozen = forward_work(config.model, MODEL.config)
    work, sharding = replace(WORK, prompts=8), planned_sharding("single", 1)
    stages = step_seconds(config, shape, frozen, work, sharding, chip, Rates(mbu=1.0, **rates), devices=1, samplers=0)
    return {stage: value for stage, value in stages.items() if value is not None}


@pytest.mark.parametrize(("name", "bytes_"), [("adamw", 8), ("adamw_8bit", 2)])
def test_optimizer_states_in_host_memory_cross_its_link_twice_per_update(name, bytes_):
    words = (f"optim.name={name}", "trainer.prompts_per_update=4", "trainer.epochs_per_batch=3")
    here, there = (
        seconds(MODEL_SHAPE, *words, f"trainer.offload={way}", host_link=2.0)["optimizer"]
        for way in ("none", "optimizer")
    )
    assert there - here == pytest.approx(2 * 3 * 2 * bytes_ * MODEL_SHAPE.trainable / 2.0)


def test_gradients_in_host_memory_cross_its_link_in_each_pass():
    states, both = (
        seconds(MODEL_SHAPE, f"trainer.offload={way}", host_link=2.0)["optimizer"] for way in ("optimizer", "gradients")
    )
    assert both - states == pytest.approx((8 * 8 * MICRO_BATCHES + 4) * MODEL_SHAPE.trainable / 2.0)


@pytest.mark.parametrize("epochs", [1, 3])
def test_an_exact_kl_moves_the_references_forward_into_each_pass_of_the_update(epochs):
    words = ("algorithm.kl.coef=0.1", f"trainer.epochs_per_batch={epochs}")
    config, exact = settings(*WORDS, *words), settings(*WORDS, *words, "algorithm.kl.estimator=exact")
    frozen = forward_work(config.model, MODEL.config)
    assert frozen is not None
    apart, within = (passes(each, MODEL_SHAPE, frozen, WORK, rescored=False) for each in (config, exact))
    assert within.scoring == 0
    assert within.update - apart.update == pytest.approx(epochs * apart.scoring)


@pytest.mark.parametrize("words", [(), ("trainer.prompts_per_update=4",)], ids=["one update", "two updates"])
def test_probabilities_for_the_estimator_take_one_scoring_pass(words):
    """The pass is also that of old log-probs, where the update needs them."""
    shape = QUANTIZED
    usual, scored, penalized = (
        seconds(shape, *words, *more)["scoring"]
        for more in (
            (),
            ("algorithm.advantage.name=optimal_token_baseline",),
            ("algorithm.kl.coef=0.1", "algorithm.kl.in_reward=true", "algorithm.kl.estimator=k1"),
        )
    )
    assert scored == pytest.approx(penalized / 2)  # which scores by the reference, too
    assert usual == (scored if words else 0)


def test_greedy_responses_are_a_second_generation():
    """Weights are read once for each token of a response; both generations are bound by that."""
    words, free = ("rollout.max_response_tokens=16",), ("algorithm.loss.name=gpg",)
    usual, remax = (seconds(MODEL_SHAPE, *words, *more) for more in (free, ("algorithm.advantage.name=remax", *free)))
    single = seconds(MODEL_SHAPE, *words, *free, "rollout.n=1", "algorithm.advantage.singleton=raw")
    assert remax["decode"] == pytest.approx(usual["decode"] + single["decode"])
    assert remax["prefill"] == pytest.approx(2 * usual["prefill"])


@pytest.mark.parametrize(("checkpointing", "count_of_passes"), [("false", 2), ("true", 3)])
def test_each_pass_of_each_micro_batch_dequantizes_the_matrices(checkpointing, count_of_passes):
    """Four bits are read and two bytes written for each weight; a response is a micro-batch."""
    words = (f"model.gradient_checkpointing={checkpointing}", "algorithm.kl.coef=0.1")
    count = sum(unit.copies * p.count for unit in QUANTIZED.units for p in unit.parameters if p.is_quantized)
    plain = seconds(MODEL_SHAPE, *words)
    codes = seconds(QUANTIZED, *words, "model.quantize=nf4", "model.lora.rank=8")
    once = 8 * MICRO_BATCHES * count * (0.5 + BF16)
    assert codes["update"] - plain["update"] == pytest.approx(count_of_passes * once, rel=1e-6)
    assert codes["scoring"] - plain["scoring"] == pytest.approx(once, rel=1e-6)


@pytest.mark.parametrize(("experts", "share"), [(0, 0.4), (1, 0.3)])
def test_products_of_mixtures_of_experts_run_at_a_smaller_share_of_the_peak(experts, share):
    shape = replace(MODEL_SHAPE, expert_parameters=experts)
    assert Rates().matrix_share(shape) == share
    assert Rates(mfu=0.5).matrix_share(shape) == 0.5
    config, chip = settings(*WORDS), replace(NVIDIA[0], bandwidth=1.0, flops={"bfloat16": 1e12})
    frozen = forward_work(config.model, MODEL.config)
    assert frozen is not None
    stages = step_seconds(
        config, shape, frozen, WORK, planned_sharding("single", 1), chip, Rates(), devices=1, samplers=0
    )
    work = passes(config, shape, frozen, WORK, rescored=False)
    assert stages["update"] == pytest.approx(work.update / (share * 1e12))


def test_an_engine_of_two_devices_decodes_the_sequences_of_both_with_half_of_the_weights_on_each():
    """All sequences run at once: as long for the cache as on one device, half as long for the weights."""
    config, chip = settings(*WORDS, "rollout.engine=vllm"), replace(NVIDIA[0], bandwidth=1.0, flops={"bfloat16": 1e30})
    frozen = forward_work(config.model, MODEL.config)
    work = replace(WORK, samples=False, beside=True)

    def decode(size: int) -> float:
        each = replace(config, rollout=replace(config.rollout, tensor_parallel_size=size, max_sequences=10**6))
        seconds = step_seconds(
            each, MODEL_SHAPE, frozen, work, planned_sharding("ddp", 2), chip, Rates(mbu=1.0), devices=2, samplers=0
        )["decode"]
        assert seconds is not None
        return seconds

    weights = BF16 * MODEL_SHAPE.parameters * config.rollout.max_response_tokens
    assert decode(1) - decode(2) == pytest.approx(weights / 2)
