"""The memory of a plan against what tensors really take: state, keys and values, activations."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hwgrpo.config import Config, load_config
from hwgrpo.models.lora import apply_lora
from hwgrpo.models.quantization import quantize, quantized_weights
from hwgrpo.planning.memory import (
    EXPANDED,
    EXPERTS_IN_16_BITS,
    FOR_ADAPTERS,
    KEPT_FREE,
    LIBRARIES,
    PACKED,
    PRODUCTS_IN_16_BITS,
    Work,
    activation_bytes,
    cache_bytes,
    estimate,
    micro_batches,
)
from hwgrpo.planning.model_shape import model_shape
from hwgrpo.planning.planned_sharding import sharding_of
from hwgrpo.training.strategies.held_adamw import BLOCK, STATES, STREAMS, HeldAdamW, In8Bits
from hwgrpo.training.strategies.optimizer import build_optimizer
from hwgrpo.values import Sampling
from tests.rollout.decoders import batch_of, engine_of

MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"
WORK = Work(dtype=torch.float32, device_type="cpu", prompts=8, prompt_tokens=20, micro_batch_tokens=64)


def planned(*overrides: str) -> Config:
    words = ("model.path=unused", "data.train=task://sort", "reward.functions=[exact_match]", *overrides)
    return load_config(None, words)


def small(name: str, tmp_path: Path, layers: int = 2):
    """Return the configuration of a shipped shape, cut down to a size that runs at once."""
    shape = json.loads((MODELS / f"{name}.json").read_text())
    shape |= {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": layers, "vocab_size": 128}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "eos_token_id": 1, "bos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "pad_token_id": None}))
    return AutoConfig.from_pretrained(tmp_path)


def test_state_is_what_an_optimizer_step_leaves_behind(tmp_path):
    settings = small("Mistral-7B", tmp_path)
    model = AutoModelForCausalLM.from_config(settings).float()
    optimizer = build_optimizer(model, planned().optim)
    model(torch.ones(1, 3, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    held = {
        "parameters (fp32)": sum(p.nbytes for p in model.parameters()),
        "gradients (fp32)": sum(p.grad.nbytes for p in model.parameters() if p.grad is not None),
        "optimizer states (AdamW)": sum(
            s[key].nbytes for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")
        ),
    }
    config = planned()
    memory = estimate(config, model_shape(config.model, settings), WORK)
    parts = memory.always | memory.step
    assert {name: parts.pop(name) for name in held} == held
    assert parts == {"libraries, about": LIBRARIES}
    assert not memory.always.keys() & memory.step.keys()


def test_a_reference_and_a_copy_that_samples_are_counted_where_there_is_one(tmp_path):
    settings = small("Qwen3-8B", tmp_path)

    def parts(*overrides: str, dtype: torch.dtype = torch.float32) -> set[str]:
        config = planned(*overrides)
        work = Work(dtype=dtype, device_type="cpu", prompts=8, prompt_tokens=20, micro_batch_tokens=64)
        memory = estimate(config, model_shape(config.model, settings), work)
        return (set(memory.always) | set(memory.update) | set(memory.step)) - {PACKED}  # on some processors

    state = {"parameters (fp32)", "gradients (fp32)", "optimizer states (AdamW)", "a chunk of logits"}
    state |= {"activations of 531 tokens, about", "libraries, about", KEPT_FREE}
    head = {"gradient of the LM head (fp32)"}
    assert parts() == state | head
    assert parts("algorithm.kl.coef=0.1") == state | head | {"reference model"}
    assert parts("algorithm.kl.coef=0.1", "model.lora.rank=4") == state
    followed = planned("algorithm.kl.coef=0.1", "algorithm.kl.sync_every=2", "model.lora.rank=4")
    adapted = apply_lora(AutoModelForCausalLM.from_config(settings), followed.model.lora, moving_reference=True)
    held = sum(p.nbytes for name, p in adapted.named_parameters() if ".reference." in name)
    always = estimate(followed, model_shape(followed.model, settings), WORK).always
    assert always["frozen copy of the adapter"] == held
    assert parts(dtype=torch.bfloat16) == state | head | {"copy that samples", "weights as cast"}
    assert parts("rollout.dtype=float32", dtype=torch.bfloat16) == state | head | {"weights as cast"}


@pytest.mark.parametrize(
    "name,base,held",
    [
        ("Qwen3-8B", "float32", lambda shape: shape.trainable + 128 * 128 + shape.largest_layer),
        ("Qwen3-8B", "bfloat16", lambda shape: shape.trainable),
        ("Qwen3-4B", "bfloat16", lambda shape: shape.trainable),
    ],
    ids=["fp32 base", "bf16 base", "bf16 base whose head is tied"],
)
def test_under_adapters_the_cast_of_the_head_is_held_beside_that_of_one_layer(name, base, held, tmp_path):
    config = planned("model.lora.rank=4", f"model.lora.base_dtype={base}", "model.gradient_checkpointing=true")
    shape = model_shape(config.model, small(name, tmp_path))
    update = estimate(config, shape, replace(WORK, dtype=torch.bfloat16)).update
    assert update["weights as cast"] == 2 * held(shape)


def test_the_backward_pass_of_full_training_casts_the_weights_of_one_layer_at_a_time(tmp_path):
    shape = model_shape(planned().model, small("Qwen3-8B", tmp_path, layers=4))
    work = replace(WORK, dtype=torch.bfloat16, prompts=1)

    def cast(*overrides: str) -> int:
        config = planned("rollout.n=2", "rollout.max_response_tokens=4", *overrides)
        update = estimate(config, shape, work).update
        assert "gradients (fp32)" in update, "there are as many tokens as let gradients make the peak"
        return update["weights as cast"]

    assert cast("model.gradient_checkpointing=true") == 2 * (shape.largest_layer + 128 * 128)
    assert cast("model.gradient_checkpointing=false") == 2 * shape.parameters


@pytest.mark.parametrize(("compiled", "more"), [(True, PRODUCTS_IN_16_BITS), (False, 0)])
def test_compiled_products_are_planned_where_the_host_multiplies_16_bits_by_onednn(
    compiled, more, tmp_path, monkeypatch
):
    monkeypatch.setattr("hwgrpo.planning.memory.compiles_products", lambda: compiled)
    shape = model_shape(planned().model, small("Qwen3-8B", tmp_path))
    in_16_bits = estimate(planned(), shape, replace(WORK, dtype=torch.bfloat16))
    assert in_16_bits.always["libraries, about"] == LIBRARIES + more
    mixture = replace(shape, expert_parameters=shape.parameters // 2)
    with_experts = estimate(planned(), mixture, replace(WORK, dtype=torch.bfloat16))
    assert with_experts.always["libraries, about"] == LIBRARIES + more + compiled * EXPERTS_IN_16_BITS
    assert estimate(planned(), mixture, WORK).always["libraries, about"] == LIBRARIES
    assert estimate(planned(), shape, WORK).always["libraries, about"] == LIBRARIES
    adapted = planned("model.lora.rank=4")
    with_adapters = estimate(adapted, model_shape(adapted.model, small("Qwen3-8B", tmp_path)), WORK)
    assert with_adapters.always["libraries, about"] == LIBRARIES + FOR_ADAPTERS


def test_adapters_train_little_and_come_on_top_of_the_model(tmp_path):
    settings = small("Qwen2-7B", tmp_path)
    config = planned("model.lora.rank=4")
    shape = model_shape(config.model, settings)
    adapters = 2 * 4 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 352))
    assert shape.trainable == adapters
    always = estimate(config, shape, WORK).always
    assert always["parameters (fp32)"] == 4 * (shape.parameters + adapters)
    assert always["optimizer states (AdamW)"] == 8 * adapters


@pytest.mark.parametrize("tied", [False, True])
def test_a_frozen_base_in_bf16_is_planned_once_with_its_embeddings(tied, tmp_path):
    settings = small("Qwen3-8B", tmp_path)
    settings.tie_word_embeddings = tied
    words = ("model.lora.rank=4", "model.gradient_checkpointing=true")
    shape = model_shape(planned(*words).model, settings)
    assert shape.published == torch.bfloat16
    work = replace(WORK, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_config(settings)
    norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    memory = estimate(planned(*words), shape, work)
    assert memory.always["frozen matrices (bf16)"] == 2 * (model.num_parameters() - norms)
    assert memory.always["parameters (fp32)"] == 4 * (norms + shape.trainable)
    assert memory.always["copy that samples"] == 2 * (norms + shape.trainable)
    merged = estimate(planned(*words, "rollout.merge_adapters=true"), shape, work)
    in_layers = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    added = {name: size for name, size in merged.always.items() if memory.always.get(name) != size}
    assert added == {"copy with merged adapters": 2 * in_layers}
    assert memory.update["weights as cast"] == 2 * shape.trainable
    wide = estimate(planned(*words, "model.lora.base_dtype=float32"), shape, work)
    assert wide.always["parameters (fp32)"] == 4 * (model.num_parameters() + shape.trainable)
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert layer > shape.vocab * shape.hidden
    assert wide.update["weights as cast"] == 2 * (shape.trainable + layer + shape.vocab * shape.hidden)


@pytest.mark.parametrize("name", ["Qwen3-8B", "DeepSeek-LLM-7B", "GLM-4-9B"])
def test_the_key_value_cache_is_as_large_as_that_of_transformers(name, tmp_path):
    settings = small(name, tmp_path)
    model = AutoModelForCausalLM.from_config(settings).float()
    cache = model(torch.ones(3, 7, dtype=torch.long), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    shape = model_shape(planned().model, settings)
    assert held == cache_bytes(shape, prompts=0, sequences=3, prompt_tokens=5, response_tokens=7, itemsize=4)


def test_a_prompt_is_held_once_for_its_group_and_no_more_sequences_than_are_decoded_together(tmp_path):
    shape = model_shape(planned().model, small("Qwen3-8B", tmp_path))
    per_token = 2 * 4 * shape.layers * shape.kv_heads * shape.head_dim
    whole = planned("rollout.n=4", "rollout.max_response_tokens=100")
    (name, size), logits = estimate(whole, shape, WORK).rollout.items()
    assert name == "key-value cache of 32 sequences"
    assert size == per_token * (8 * 20 + 32 * 100)
    assert logits == ("logits of a decode step", 32 * shape.vocab * 8)
    cut = planned("rollout.n=4", "rollout.max_response_tokens=100", "rollout.max_sequences=8")
    # slots of two groups hold three times as many prompts: a long response holds that of a group that has ended
    sizes = list(estimate(cut, shape, WORK).rollout.items())
    assert sizes[0] == ("key-value cache of 8 sequences", per_token * (6 * 20 + 8 * 100))
    # prompts of the slots' 2 groups, and of the next one, are prefilled while the cache is full
    assert sizes[1] == ("key-value cache of 3 prompts", per_token * 3 * 20)


def test_the_chunk_of_logits_is_bounded_and_never_longer_than_the_micro_batch(tmp_path):
    config = planned()
    shape = model_shape(config.model, small("Qwen3-8B", tmp_path))
    assert estimate(config, shape, WORK).update["a chunk of logits"] == 531 * 128 * 4
    pinned = planned("kernels.chunk_rows=16")
    assert estimate(pinned, shape, WORK).update["a chunk of logits"] == 16 * 128 * 4


def test_an_exact_kl_has_hidden_states_head_and_logits_of_the_reference_beside_the_policys(tmp_path):
    settings = small("Qwen3-8B", tmp_path)
    exact = ("algorithm.kl.coef=0.1", "algorithm.kl.estimator=exact", "kernels.chunk_rows=16")

    def parts(*words: str, strategy: str = "single", dtype: torch.dtype = torch.float32) -> tuple[int, int]:
        config = planned(*exact, *words)
        shape = model_shape(config.model, settings)
        sharding = sharding_of(replace(config.trainer, strategy=strategy), 2)
        update = estimate(config, shape, replace(WORK, dtype=dtype), sharding).update
        return update.get("a chunk of logits", 0), update["hidden states and head of the reference"]

    hidden, head = 531 * 128, 128 * 128
    assert parts() == (2 * 16 * 128 * 4, 4 * hidden)
    assert parts("model.lora.rank=4") == parts()
    assert parts("algorithm.kl.sync_every=2", dtype=torch.bfloat16)[1] == 2 * (hidden + head)
    # the reference's embeddings, head and last norm are gathered in its forward
    assert parts(strategy="fsdp2")[1] == 4 * (hidden + 2 * head + 128)


def test_states_in_8_bits_or_in_host_memory_are_planned_as_they_are_held(tmp_path):
    settings = small("Mistral-7B", tmp_path)
    shape, work = model_shape(planned().model, settings), replace(WORK, device_type="cuda")  # hw: any accelerator
    plain, coded = (estimate(planned(*words), shape, work) for words in ((), ("optim.name=adamw_8bit",)))
    module = AutoModelForCausalLM.from_config(settings).float()
    optimizer = build_optimizer(module, planned("optim.name=adamw_8bit").optim)
    assert isinstance(optimizer, HeldAdamW)
    held = 0
    for parameter in module.parameters():
        optimizer.expanded(parameter)
        for key in STATES:
            state = optimizer.state[parameter][key]
            held += state._codes.nbytes + state._scales.nbytes if isinstance(state, In8Bits) else 0
    assert coded.always["optimizer states (AdamW, 8 bits)"] == pytest.approx(held, rel=0.02), "norms stay in fp32"
    assert held < 0.27 * plain.always["optimizer states (AdamW)"]
    offloaded = planned("trainer.offload=optimizer")
    there = estimate(offloaded, shape, work, sharding_of(offloaded.trainer, 1))
    assert there.host["optimizer states (AdamW)"] == plain.always["optimizer states (AdamW)"]
    assert "optimizer states (AdamW)" not in there.always
    largest = 352 * 128  # each parameter is stepped by itself, and smaller than a chunk
    assert there.step["intermediate values of AdamW"] == 12 * STREAMS * largest
    assert coded.step["intermediate values of AdamW"] == 24 * largest
    gradients = planned("trainer.offload=gradients")
    both = estimate(gradients, shape, work, sharding_of(gradients.trainer, 1))
    assert both.host == there.host | {"gradients (fp32)": plain.update["gradients (fp32)"]}
    assert not {name for name in both.always | both.update | both.step if name.startswith("gradients")}
    assert both.update["gradient of a parameter (fp32)"] == 8 * 352 * 128


def test_what_a_cpu_offloads_is_in_the_memory_that_it_computes_in(tmp_path):
    settings = small("Qwen3-8B", tmp_path)
    shape = model_shape(planned().model, settings)
    plain = estimate(planned(), shape, WORK)
    for moved in ("optimizer", "gradients"):
        config = planned(f"trainer.offload={moved}")
        memory = estimate(config, shape, WORK, sharding_of(config.trainer, 1))
        assert not memory.host
        assert memory.always["optimizer states (AdamW)"] == plain.always["optimizer states (AdamW)"]
        assert "intermediate values of AdamW" not in memory.step, "states and gradients are used where they are"
    assert memory.always["gradients (fp32)"] == plain.update["gradients (fp32)"]
    assert memory.update["gradient of a parameter (fp32)"] == 4 * 352 * 128


def test_states_in_8_bits_are_in_fp32_while_a_checkpoint_is_read_or_written(tmp_path, monkeypatch):
    monkeypatch.setattr("hwgrpo.planning.memory.CHUNK", BLOCK)
    shape = model_shape(planned().model, small("Mistral-7B", tmp_path))
    in_8_bits, states = planned("optim.name=adamw_8bit"), 8 * shape.trainable
    there = replace(WORK, device_type="cuda")  # hw: any accelerator
    assert estimate(in_8_bits, shape, there).host == {EXPANDED: states}
    assert estimate(in_8_bits, shape, WORK).step == {EXPANDED: states}
    assert estimate(planned(), shape, there).host == {}
    copied = planned("optim.name=adamw_8bit", "trainer.save_every=1")
    assert estimate(copied, shape, there).host == {"copy for a checkpoint being written": 12 * shape.trainable}


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize("method", ["nf4", "int8"])
def test_quantized_matrices_are_planned_as_they_are_held(name, method, tmp_path):
    config = planned("model.lora.rank=4", f"model.quantize={method}")
    settings = small(name, tmp_path)
    settings.moe_intermediate_size, settings.num_experts = 32, 16  # of the mixture
    memory = estimate(config, model_shape(config.model, settings), WORK)
    model = AutoModelForCausalLM.from_config(settings)
    parameters = model.num_parameters()
    largest = max(p.numel() for layer in model.model.layers for p in layer.parameters())
    quantize(model, method)
    codes = [p for p in model.parameters() if p.dtype == torch.uint8]
    held = sum(p.nbytes for p in codes)
    assert memory.always[f"frozen matrices ({method})"] == held
    [plain] = [size for name, size in memory.always.items() if name.startswith("parameters")]
    adapters = model_shape(config.model, settings).trainable
    in_codes = sum(math.prod(codes.size) for codes in quantized_weights(model).values())
    assert plain == 4 * (parameters - in_codes + adapters)
    for part in (memory.rollout, memory.update):
        assert part["a matrix being dequantized"] == 4 * largest


def test_every_device_holds_all_quantized_matrices_and_shards_the_rest(tmp_path):
    config = planned("model.lora.rank=4", "model.quantize=nf4", "trainer.strategy=fsdp2")
    shape = model_shape(config.model, small("Qwen3-8B", tmp_path))
    alone, shared = (estimate(config, shape, WORK, sharding_of(config.trainer, n)) for n in (1, 4))
    [plain] = [name for name in alone.always if name.startswith("parameters")]
    assert shared.always["frozen matrices (nf4)"] == alone.always["frozen matrices (nf4)"] > 0
    assert shared.always[plain] == pytest.approx(alone.always[plain] / 4, rel=0.01)
    rest = sum(unit.copies * unit.count for unit in shape.sharded_units)
    assert alone.always[plain] == 4 * rest
    assert shared.update["weights gathered"] <= WORK.dtype.itemsize * 1.01 * rest
    assert "frozen matrices (nf4)" in shared.loading
    offloaded = planned(
        "model.lora.rank=4", "model.quantize=nf4", "trainer.strategy=fsdp2", "trainer.fsdp2.offload=true"
    )
    device = replace(WORK, device_type="cuda")  # hw: any accelerator
    there = estimate(offloaded, shape, device, sharding_of(offloaded.trainer, 4))
    assert "frozen matrices (nf4)" in there.always
    assert plain in there.host


def test_rollout_and_update_take_turns_so_the_peak_holds_the_larger_one(tmp_path):
    config = planned("rollout.max_response_tokens=4000")
    memory = estimate(config, model_shape(config.model, small("Qwen3-8B", tmp_path)), WORK)
    rollout, update = sum(memory.rollout.values()), sum(memory.update.values())
    assert rollout > update
    assert memory.peak == sum(memory.always.values()) + rollout


def saved_for_backward(settings, dtype: torch.dtype, recomputed: bool, tokens: int) -> int:
    """Return the bytes of activations that the layers of a model keep after a forward pass."""
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa").float().train()
    if recomputed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    weights = {tuple(p.shape) for p in model.parameters() if p.ndim == 2}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        # weights, and what autocast made of them, are counted elsewhere
        if tuple(tensor.shape) not in weights and tuple(tensor.shape)[::-1] not in weights:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    ids = torch.ones(1, tokens, dtype=torch.long)
    cast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), cast:
        model.model(input_ids=ids, use_cache=False)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name, within",
    [("DeepSeek-LLM-7B", 0.01), ("Qwen2.5-7B", 0.01), ("Mistral-7B", 0.01), ("Qwen3-8B", 0.06), ("GLM-4-9B", 0.06)],
)
def test_activations_are_those_that_autograd_keeps_norms_of_heads_and_behind_blocks_too(name, within, dtype, tmp_path):
    """Of two depths the difference: what a model keeps beside its layers cancels out."""
    kept = [saved_for_backward(small(name, tmp_path, layers), dtype, False, 96) for layers in (2, 4)]
    shapes = [model_shape(planned().model, small(name, tmp_path, layers)) for layers in (2, 4)]
    told = [activation_bytes(shape, 96, dtype, recomputed=False) for shape in shapes]
    assert (kept[1] - kept[0]) / (told[1] - told[0]) == pytest.approx(1, abs=within)


def test_with_gradient_checkpointing_each_further_layer_keeps_its_input(tmp_path):
    kept = [saved_for_backward(small("Qwen3-8B", tmp_path, n), torch.bfloat16, True, 96) for n in (2, 4)]
    shapes = [model_shape(planned().model, small("Qwen3-8B", tmp_path, n)) for n in (2, 4)]
    told = [activation_bytes(shape, 96, torch.bfloat16, recomputed=True) for shape in shapes]
    assert kept[1] - kept[0] == told[1] - told[0] == 2 * 96 * 4 * 128


def test_devices_that_share_sequences_fill_their_budgets_together():
    for size, prompts in ((1, 8), (2, 4)):
        config = planned("rollout.max_response_tokens=13", "rollout.n=4", f"trainer.sequence_parallel_size={size}")
        tokens, number, _ = micro_batches(config, replace(WORK, prompts=prompts))
        assert tokens == 64, "rows of 32 tokens"
        assert number == 32 // (2 * size)


def test_from_the_second_pass_on_gradients_are_there_beside_activations(tmp_path):
    shape = model_shape(planned().model, small("Qwen3-8B", tmp_path))
    config = planned("rollout.max_response_tokens=13", "rollout.n=4")

    def parts(budget: int) -> tuple[tuple[int, int, int], set[str]]:
        work = replace(WORK, micro_batch_tokens=budget)
        names = {name for name in estimate(config, shape, work).update if name.startswith(("grad", "act"))}
        return micro_batches(config, work), {name.removesuffix(" tokens, about") for name in names} - {
            "gradient of the LM head (fp32)"
        }

    gradients = "gradients (fp32)"
    assert parts(32 * 32) == ((1024, 1, 0), {"activations of 1,024"})
    assert parts(32 * 31) == ((992, 2, 32), {"activations of 992"}), "the first pass has more activations"
    assert parts(32 * 17) == ((544, 2, 480), {"activations of 480", gradients})
    assert parts(32 * 16) == ((512, 2, 512), {"activations of 512", gradients})
    assert parts(32 * 10) == ((320, 4, 320), {"activations of 320", gradients})


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_the_sampler_packs_are_those_of_its_engine(tied, tmp_path):
    settings = small("Qwen3-8B", tmp_path)
    settings.vocab_size, settings.hidden_size, settings.num_attention_heads = 1024, 256, 8
    settings.tie_word_embeddings = tied
    config = planned("model.lora.rank=4")
    memory = estimate(config, model_shape(config.model, settings), WORK)
    model = apply_lora(AutoModelForCausalLM.from_config(settings), config.model.lora)
    engine = engine_of(model.eval())
    if engine._packed is None:
        assert PACKED not in memory.always
        return
    engine.generate(batch_of(), Sampling(1, 2, greedy=True))
    held = engine._packed._packed.values()
    assert memory.always[PACKED] == sum(each.weight.nbytes for each in held) > 0
