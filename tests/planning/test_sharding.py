"""How strategies cut the state of a run: bytes per parameter, what is whole for a moment, what lies in host memory."""

from dataclasses import replace

import pytest
import torch
from hwgrpo_backends import registry

from hwgrpo.config import Config, load_config
from hwgrpo.errors import ConfigError
from hwgrpo.planning.dry_run import planned_work
from hwgrpo.planning.memory import SENT, Memory, Work, estimate, micro_batches
from hwgrpo.planning.model_shape import ModelShape
from hwgrpo.planning.planned_sharding import planned_sharding, sharding_of, strategy_variants
from hwgrpo.training.policy.layouts import PADDED
from hwgrpo.training.strategies.parameter_shapes import ParameterShape, ParameterUnit
from hwgrpo.training.strategies.sharding import Sharding

SHAPE = ModelShape(
    architecture="Shape",
    units=(
        ParameterUnit((ParameterShape("weight", (4096, 20), tensor_dim=0),), copies=10),
        ParameterUnit((ParameterShape("embeddings", (2048, 100)),), is_layer=False),
    ),
    hidden=64,
    layers=10,
    vocab=1000,
    heads=4,
    kv_heads=2,
    head_dim=16,
    value_dim=16,
    intermediate=128,
    norms=2,
    head_norms=False,
)
LARGE_REST = ParameterUnit((ParameterShape("embeddings", (2048, 10_000)),), is_layer=False)
LAYER, REST = (unit.count for unit in SHAPE.units)
WORK = Work(dtype=torch.bfloat16, device_type="meta", prompts=4, prompt_tokens=16, micro_batch_tokens=64, samples=False)


def planned(*overrides: str) -> Config:
    words = ("model.path=unused", "data.train=task://sort", "reward.functions=[exact_match]", *overrides)
    return load_config(None, words)


def held(strategy: str, devices: int, **work: object) -> Memory:
    given = {**vars(WORK), **work}
    return estimate(planned("trainer.prompts_per_step=64"), SHAPE, Work(**given), planned_sharding(strategy, devices))


def per_parameter(memory: Memory) -> float:
    state = {**memory.always, **memory.update, **memory.step, **memory.host}
    kinds = ("parameters (", "gradients (", "optimizer states (AdamW)", "masters")
    return sum(size for name, size in state.items() if name.startswith(kinds)) / SHAPE.parameters


@pytest.mark.parametrize(
    ("strategy", "devices", "bytes_"),
    [
        ("single", 1, 16),
        ("ddp", 8, 16),
        ("zero1", 8, 4 + 4 + 12 / 8),
        ("zero2", 8, 4 + 4 / 8 + 12 / 8),
        ("zero3", 8, 18 / 8),
        ("fsdp2", 8, 16 / 8),
        ("fsdp2+offload", 8, 16 / 8),
        ("fsdp2", 1, 16),
    ],
)
def test_a_parameter_costs_what_its_strategy_leaves_on_a_device(strategy, devices, bytes_):
    assert per_parameter(held(strategy, devices)) == pytest.approx(bytes_)


def test_two_moments_are_kept_of_every_trained_parameter():
    assert held("ddp", 2).always["optimizer states (AdamW)"] == 2 * 4 * SHAPE.trainable
    assert held("fsdp2", 4).always["optimizer states (AdamW)"] == 2 * 4 * SHAPE.trainable // 4


def test_gradients_are_freed_before_rollout_where_torchs_optimizer_steps():
    for strategy, devices in (("single", 1), ("ddp", 8), ("fsdp2", 8)):
        memory = held(strategy, devices)
        assert "gradients (fp32)" not in memory.always, strategy
        assert memory.update["gradients (fp32)"] == memory.step["gradients (fp32)"] > 0


def test_layers_that_are_cut_first_leave_fewer_parts_of_the_rest_and_are_gathered_in_part():
    config = planned("trainer.strategy=fsdp2", "trainer.tensor_parallel_size=2", "trainer.tokens_per_micro_batch=8192")
    sharding = sharding_of(config.trainer, 8)
    cut, whole = (estimate(config, SHAPE, WORK, each) for each in (sharding, planned_sharding("fsdp2", 8)))
    assert cut.always["parameters (fp32)"] == 4 * (10 * LAYER // 8 + REST // 4)
    assert cut.always["optimizer states (AdamW)"] == 2 * 4 * (10 * LAYER // 8 + REST // 4)
    assert cut.update["weights gathered"] == 2 * (REST + 2 * LAYER // 2)
    kept, kept_whole = (next(n for name, n in m.update.items() if name.startswith("activ")) for m in (cut, whole))
    tokens, _, _ = micro_batches(config, WORK)
    # gathered inputs come in the compute dtype and are not cast again for each linear layer
    assert kept - kept_whole == tokens * SHAPE.layers * 2 * SHAPE.hidden * (2 * 2 - 5)


def test_a_configuration_of_deepspeed_is_planned_in_its_stage():
    words = ("trainer.strategy=deepspeed", "trainer.deepspeed.stage=3", "trainer.deepspeed.offload_parameters=true")
    assert sharding_of(planned(*words).trainer, 4) == planned_sharding("zero3+offload", 4)
    assert sharding_of(planned(*words[:2]).trainer, 4) == planned_sharding("zero3", 4)
    assert sharding_of(planned(words[0]).trainer, 4) == planned_sharding("zero2", 4)


def test_two_layers_and_what_is_no_layer_are_gathered_at_a_time_or_all():
    gathered = REST + 2 * LAYER
    assert held("fsdp2", 8).update["weights gathered"] == 2 * gathered
    assert held("zero3", 8).update["weights gathered"] == 2 * gathered
    assert held("fsdp2", 8, dtype=torch.float32).update["weights gathered"] == 4 * gathered
    whole = sharding_of(planned("trainer.strategy=fsdp2", "trainer.fsdp2.reshard_after_forward=false").trainer, 8)
    assert estimate(planned(), SHAPE, WORK, whole).update["weights gathered"] == 2 * SHAPE.parameters
    for strategy in ("ddp", "zero1", "zero2"):
        assert "weights gathered" not in held(strategy, 8).update


def test_a_plan_of_fsdp2_is_the_largest_of_three_moments():
    sharding, config = planned_sharding("fsdp2", 2), planned("trainer.strategy=fsdp2")
    work = replace(WORK, prompts=1)
    moments = {
        "at the LM head": estimate(config, replace(SHAPE, vocab=100_000), work, sharding).update,
        "in a layer": estimate(config, replace(SHAPE, vocab=10), work, sharding).update,
        "at the end": estimate(config, replace(SHAPE, units=(SHAPE.units[0], LARGE_REST)), work, sharding).update,
    }
    logits = {moment: "a chunk of logits" in parts for moment, parts in moments.items()}
    assert logits == {"at the LM head": True, "in a layer": False, "at the end": False}
    activations = {moment: any(name.startswith("activations") for name in parts) for moment, parts in moments.items()}
    assert activations == {"at the LM head": True, "in a layer": True, "at the end": False}
    rest = LARGE_REST.count
    reduced = {moment: parts.get("unsharded gradients of a unit") for moment, parts in moments.items()}
    assert reduced == {"at the LM head": None, "in a layer": (2 + 4) * LAYER, "at the end": (2 + 4) * rest}
    gathered = {moment: parts["weights gathered"] for moment, parts in moments.items()}
    layers = 2 * (REST + 2 * LAYER)
    assert gathered == {"at the LM head": layers, "in a layer": layers, "at the end": 2 * rest}


def test_what_is_synchronized_once_per_update_is_unsharded_until_then():
    once = sharding_of(planned("trainer.strategy=fsdp2", "trainer.fsdp2.sync_every=update").trainer, 8)
    each, update = held("fsdp2", 8), estimate(planned(), SHAPE, WORK, once)
    more = {name: size - each.update.get(name, 0) for name, size in update.update.items()}
    gathered = 2 * (SHAPE.parameters - REST - 2 * LAYER)
    assert {name: size for name, size in more.items() if size} == {
        "weights gathered": gathered,
        "unsharded gradients (fp32)": 4 * SHAPE.parameters,
        "unsharded gradients of a unit": (2 + 4) * REST,
    }
    assert (update.always, update.rollout, update.step) == (each.always, each.rollout, each.step)
    zero2 = sharding_of(planned("trainer.strategy=deepspeed", "trainer.deepspeed.sync_every=update").trainer, 8)
    each, update = held("zero2", 8), estimate(planned(), SHAPE, WORK, zero2)
    assert update == replace(each, update=each.update | {"unsharded gradients (fp32)": 4 * SHAPE.parameters})


def test_the_only_pass_of_an_update_reduces_the_gradients_of_a_layer_at_once_and_frees_its_weights():
    """The plan kept all gradients until the end of the pass, and was 48 % too high."""
    settings = planned("trainer.strategy=fsdp2", "trainer.fsdp2.sync_every=update", "rollout.n=2")
    once, work = sharding_of(settings.trainer, 2), replace(WORK, prompts=1, micro_batch_tokens=10_000)
    update = estimate(settings, SHAPE, work, once).update
    assert "unsharded gradients (fp32)" not in update
    assert update["weights gathered"] == 2 * SHAPE.parameters, "when the backward pass begins"
    assert "gradients (fp32)" not in update
    # one that stores few activations has most at its end: gradients, and the weights of two layers
    few = planned("trainer.strategy=fsdp2", "rollout.n=2", "rollout.max_response_tokens=2")
    update = estimate(few, SHAPE, replace(work, prompt_tokens=1), once).update
    assert update["gradients (fp32)"] == 4 * SHAPE.parameters // 2
    assert update["weights gathered"] == 2 * (REST + 2 * LAYER)


def test_rows_that_are_fewer_than_devices_are_stored_on_every_device_and_gathered_with_padding():
    experts = ParameterUnit((ParameterShape("experts", (4, 16, 16)), ParameterShape("router", (4, 16))), copies=3)
    shape = replace(SHAPE, units=(experts,), vocab=1)
    at = {n: estimate(planned(), shape, WORK, planned_sharding("fsdp2", n)) for n in (4, 16)}
    assert (
        at[4].always
        == at[16].always
        == {"parameters (fp32)": 4 * 3 * (256 + 16), "optimizer states (AdamW)": 8 * 3 * (256 + 16)}
    )
    assert at[4].update["gradients (fp32)"] == at[16].update["gradients (fp32)"] == 4 * 3 * (256 + 16)
    for devices, memory in at.items():
        assert memory.update["weights gathered"] == 2 * 2 * devices * (256 + 16)
        assert memory.update["unsharded gradients of a unit"] == 2 * 4 * (256 + 16) + 4 * devices * (256 + 16)


def test_what_is_gathered_does_not_shrink_with_the_number_of_devices():
    assert held("fsdp2", 8).update["weights gathered"] == held("fsdp2", 1024).update["weights gathered"]


def test_weights_that_travel_in_the_compute_dtype_are_not_cast_once_more():
    for strategy in ("ddp", "zero1", "zero2"):
        assert held(strategy, 8).update["weights as cast"] == 2 * SHAPE.parameters
    for strategy in ("fsdp2", "zero3"):
        assert "weights as cast" not in held(strategy, 8).update


def test_a_local_engine_samples_from_a_whole_copy_where_weights_are_cut():
    assert held("fsdp2", 8, samples=True).always["copy that samples"] == 2 * SHAPE.parameters
    in_fp32 = held("fsdp2", 8, samples=True, dtype=torch.float32)
    assert in_fp32.always["copy that samples"] == 4 * SHAPE.parameters
    assert "copy that samples" not in held("ddp", 8, samples=True, dtype=torch.float32).always
    separate = held("fsdp2", 8)
    assert "copy that samples" not in separate.always
    assert separate.rollout == {}


def test_offloading_moves_state_to_the_host_and_frees_the_device():
    there, here = held("fsdp2", 8), held("fsdp2+offload", 8)
    assert {"parameters (fp32)", "optimizer states (AdamW)", "gradients (fp32)"} <= set(here.host)
    assert here.always == {}
    assert here.peak < there.peak
    assert per_parameter(here) == per_parameter(there)


def test_at_the_start_a_model_whose_weights_are_cut_is_whole_a_layer_at_a_time():
    unit = 4 * max(LAYER, REST)
    for strategy, size in (("fsdp2", 4), ("zero3", 2)):
        loading = held(strategy, 8).loading
        assert loading.pop("a layer or the rest (fp32), being sharded") == unit
        assert list(loading.values()) == [size * SHAPE.parameters // 8]
    with_copy = held("fsdp2", 8, samples=True)
    assert with_copy.loading["copy that samples"] == with_copy.always["copy that samples"]
    assert list(held("fsdp2+offload", 8).loading.values()) == [unit], "the rest is in the host's memory"
    for strategy in ("ddp", "zero1", "zero2"):
        assert held(strategy, 8).loading == {}, "they hold it whole in any case"


def test_what_a_checkpoint_is_copied_for_lies_on_the_host_shared_out_among_ranks():
    name, config = "copy for a checkpoint being written", planned("trainer.save_every=10")
    for strategy in ("ddp", "fsdp2", "zero2"):
        memory = estimate(config, SHAPE, WORK, planned_sharding(strategy, 8))
        assert memory.host[name] == 12 * SHAPE.trainable // 8
        on_cpu = estimate(config, SHAPE, replace(WORK, device_type="cpu"), planned_sharding(strategy, 8))
        assert on_cpu.always[name] == memory.host[name]
    for words in (("trainer.save_every=10", "trainer.save_async=false"), ()):
        assert name not in estimate(planned(*words), SHAPE, WORK, planned_sharding("ddp", 8)).host


def test_a_reference_model_is_cut_like_the_policy():
    config = planned("algorithm.kl.coef=0.1")
    for strategy, ways in (("ddp", 1), ("fsdp2", 8)):
        memory = estimate(config, SHAPE, WORK, planned_sharding(strategy, 8))
        assert memory.always["reference model"] == 4 * SHAPE.parameters // ways


def test_the_strategy_of_a_configuration_is_that_of_its_words():
    assert sharding_of(planned().trainer, 1) == planned_sharding("single", 1) == Sharding()
    assert sharding_of(planned().trainer, 4) == planned_sharding("ddp", 4)
    assert sharding_of(planned("trainer.strategy=fsdp2").trainer, 4) == planned_sharding("fsdp2", 4)
    words = ("trainer.strategy=fsdp2", "trainer.fsdp2.offload=true")
    assert sharding_of(planned(*words).trainer, 4) == planned_sharding("fsdp2+offload", 4)
    words = ("trainer.strategy=fsdp2", "trainer.fsdp2.reshard_after_forward=false")
    assert sharding_of(planned(*words).trainer, 4).gathered_units == "all"


@pytest.mark.parametrize(
    ("words", "copies"),
    [
        ((), 0),
        (("rollout.engine=vllm",), 0),
        (("rollout.engine=vllm_server",), 1),
        (("rollout.engine=vllm_server", "rollout.server.transfer=group"), 1),
        (("rollout.engine=vllm_server", "rollout.server.transfer=folder"), 2),
        (("rollout.engine=sglang_server",), 2),
        (("rollout.engine=vllm_server", "rollout.server.weights_dir=weights"), 0),
        (("rollout.engine=vllm_server", "model.lora.rank=4"), 0),
    ],
)
def test_the_host_of_rank_0_has_room_for_the_weights_that_it_sent(words, copies):
    config = planned("trainer.prompts_per_step=8", *words)
    work = planned_work(config, registry.get("cuda"), 8, torch.bfloat16, PADDED, prompt_tokens=16)
    assert work.sent_copies == copies
    sharding = planned_sharding("fsdp2", 8)
    there, on_cpu = (estimate(config, SHAPE, replace(work, device_type=kind), sharding) for kind in ("cuda", "cpu"))
    expected = copies * 2 * SHAPE.parameters or None
    assert there.host.get(SENT) == on_cpu.always.get(SENT) == expected
    assert SENT not in there.always


def test_an_unknown_strategy_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"--strategy='fsdp'.*Did you mean 'fsdp2'"):
        planned_sharding("fsdp", 8)
    assert all(planned_sharding(name, 2) for name in strategy_variants())


def test_adamw_needs_intermediate_values_on_accelerators_only():
    assert "intermediate values of AdamW" in held("ddp", 2).step
    assert "intermediate values of AdamW" not in held("ddp", 2, device_type=registry.get("cpu").device_type).step
