"""The planner's sizes against those of torch's own fully_shard, over ranks that a fake process group stands for."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from hwgrpo.models.lm_head import HeadSpec
from hwgrpo.models.lora import apply_lora
from hwgrpo.planning.memory import Work, estimate
from hwgrpo.planning.model_shape import model_shape
from hwgrpo.planning.planned_sharding import planned_sharding
from hwgrpo.planning.step_time import Rates, step_seconds
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.training.policy.sequence_shard import SINGLE_RANK, SequenceGroup
from hwgrpo.training.strategies.fsdp2 import Fsdp2
from tests.support.models.tiny import settings

SIZES = {
    "vocab_size": 102,
    "hidden_size": 36,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
EXPERTS = Qwen3MoeConfig(
    **SIZES,
    moe_intermediate_size=20,
    num_experts=4,
    num_experts_per_tok=2,
    mlp_only_layers=[0],
    tie_word_embeddings=False,
)
"""Its first layer has no experts."""
DENSE = Qwen3Config(**SIZES, tie_word_embeddings=False)
TIED = Qwen3Config(**SIZES, tie_word_embeddings=True)
BIASED = Qwen2Config(**{**SIZES, "hidden_size": 32, "head_dim": 8})
LORA = ("model.lora.rank=6",)
WORK = Work(dtype=torch.float32, device_type="cuda", prompts=1, prompt_tokens=16, micro_batch_tokens=16, samples=False)
"""What is planned; the model itself is on the CPU, in fp32, of which bytes are counted."""


@dataclass(frozen=True)
class Stored:
    """Bytes that rank 0 really stores, or sends."""

    parameters: int
    gradients: int
    moments: int
    gathered: int
    """Two decoder layers, the largest, and all that is in none."""
    exchanged: int
    """All-gathers for forward and backward, and the reduce-scatter: to all other ranks its shard."""


@contextmanager
def ranks(count: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def stored(model: PreTrainedConfig, devices: int, words: tuple[str, ...] = (), tensor: int = 1) -> Stored:
    """Shard a model as the strategy does, unshard it, put gradients through its reduce-scatter, and step AdamW."""
    config = settings("trainer.strategy=fsdp2", *words)
    with ranks(devices):
        group = dist.new_group(list(range(tensor))) if tensor > 1 else None
        base = AutoModelForCausalLM.from_config(model)
        if words:
            base = apply_lora(base, config.model.lora)
        policy = PolicyModel(base, compute_dtype=torch.float32, options=HeadOptions(), head=HeadSpec())
        strategy = Fsdp2.__new__(Fsdp2)
        strategy.device, strategy.world_size = torch.device("cpu"), devices
        strategy.sequence_group = SequenceGroup(tensor, 0, group, group, tensor=True) if tensor > 1 else SINGLE_RANK
        strategy.wrap(policy, config)
        policy._get_fsdp_state()._lazy_init()
        units = [module for module in policy.modules() if isinstance(module, FSDPModule)]
        gathered, exchanged, gradients = {}, 0, 0
        for unit in units:
            [param_group] = unit._get_fsdp_state()._fsdp_param_groups
            unit.unshard()
            outputs = [output for param in param_group.fsdp_params for output in param.all_gather_outputs]
            gathered[unit] = sum(output.untyped_storage().nbytes() for output in outputs)
            trained = [param for param in param_group.fsdp_params if param.sharded_param.requires_grad]
            for param in trained:
                param.unsharded_param.grad = torch.zeros_like(param.unsharded_param)
            param_group.post_backward()
            param_group.finalize_backward()
            # all gradients of a unit are views of what its reduce-scatter gave
            scattered = {param.sharded_param.grad.to_local().untyped_storage() for param in trained}
            by_address = {storage.data_ptr(): storage.nbytes() for storage in scattered}
            own = sum(param._sharded_param_data.nbytes for param in param_group.fsdp_params)
            gradients += sum(by_address.values())
            exchanged += (devices // tensor - 1) * (2 * own + sum(by_address.values()))
        strategy.optimizer.step()
        moments = [s[key] for s in strategy.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        params = [p for unit in units for g in unit._get_fsdp_state()._fsdp_param_groups for p in g.fsdp_params]
        layers = sorted(gathered[unit] for unit in units if unit is not policy)[-2:]
        return Stored(
            parameters=sum(p._sharded_param_data.untyped_storage().nbytes() for p in params),
            gradients=gradients,
            moments=sum(moment.to_local().nbytes for moment in moments),
            gathered=gathered[policy] + sum(layers),
            exchanged=exchanged,
        )


def planned(model: PreTrainedConfig, devices: int, words: tuple[str, ...] = (), tensor: int = 1) -> Stored:
    config = settings("rollout.n=1", "algorithm.advantage.singleton=raw", *words)
    shape = model_shape(config.model, model)
    sharding = planned_sharding("fsdp2", devices, tensor)
    memory = estimate(config, shape, WORK, sharding)
    chip = SimpleNamespace(flops={}, bandwidth=None)
    seconds = step_seconds(config, shape, None, WORK, sharding, chip, Rates(link=1.0), devices=devices, samplers=0)[
        "exchange"
    ]
    assert seconds is not None
    return Stored(
        parameters=memory.always["parameters (fp32)"],
        gradients=memory.update["gradients (fp32)"],
        moments=memory.always["optimizer states (AdamW)"],
        gathered=memory.update["weights gathered"],
        exchanged=int(seconds),
    )


@pytest.mark.parametrize("devices", [2, 4, 8, 16, 512])
@pytest.mark.parametrize("model", [EXPERTS, DENSE, TIED], ids=["experts", "dense", "tied"])
def test_a_plan_has_the_padded_sizes_that_fully_shard_stores_and_gathers(model, devices):
    assert planned(model, devices) == stored(model, devices)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("devices", [2, 4, 16])
def test_adapters_have_few_rows_and_are_padded_to_as_many_as_there_are_devices(devices):
    assert planned(DENSE, devices, LORA) == stored(DENSE, devices, LORA)
    assert planned(EXPERTS, devices, LORA) == stored(EXPERTS, devices, LORA)


@pytest.mark.parametrize("devices", [4, 16, 128])
@pytest.mark.parametrize("model", [DENSE, BIASED], ids=["norms of heads", "biases"])
def test_layers_that_are_cut_first_are_sharded_over_the_groups_with_norms_and_biases_as_they_are(model, devices):
    assert planned(model, devices, tensor=2) == stored(model, devices, tensor=2)


@pytest.mark.parametrize("model", [EXPERTS, DENSE], ids=["experts", "dense"])
def test_zero3_shards_flat_and_shrinks_with_every_device(model):
    shape = model_shape(settings().model, model)
    for devices in (2, 512):
        memory = estimate(settings(), shape, WORK, planned_sharding("zero3", devices))
        flat = sum(-(-p.numel() // devices) for p in AutoModelForCausalLM.from_config(model).parameters())
        assert memory.always["parameters (fp32)"] == 4 * flat


def test_a_plan_says_from_how_many_devices_on_experts_do_not_shrink():
    units = model_shape(settings().model, EXPERTS).units
    note = planned_sharding("fsdp2", 16).padding_note(units)
    assert note is not None
    assert "the 4 rows of mlp.experts.gate_up_proj; no less state beyond 4 devices" in note
    share = planned(EXPERTS, 16).parameters * 16 / stored(EXPERTS, 1).parameters
    assert note.startswith(f"{share:.1f} times an even share: fully_shard")
    assert planned_sharding("fsdp2", 2).padding_note(units) is None
    assert planned_sharding("zero3", 16).padding_note(units) is None
    assert planned_sharding("ddp", 16).padding_note(units) is None
