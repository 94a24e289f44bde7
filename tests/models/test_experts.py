"""Stacked experts: the products of transformers in the compute dtype, quantized weights, and adapters."""

from pathlib import Path

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from hwgrpo.errors import ConfigError
from hwgrpo.models.adapted_experts import AdaptedExperts
from hwgrpo.models.experts import IMPLEMENTATION, experts_forward
from hwgrpo.models.loading import load_model
from hwgrpo.models.quantization import Codes, dequantize, quantize, quantized_bytes, quantized_weights
from hwgrpo.models.saving import save_model
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.shared_setup import load_policy
from hwgrpo.values import Prompt, PromptBatch, Sampling
from tests.support.models.steps import gradients, update_of
from tests.support.models.tiny import ragged_batch, settings, sharpened
from tests.support.numbers.rounding import STEP, gaps

TOKENIZER = character_tokenizer("")
SIZES = {
    "vocab_size": len(TOKENIZER), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MIXTURES = {
    "Qwen3Moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16)),
    "Mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)),
    "GptOss": lambda: GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=4)),
}
"""The last one's experts are stored transposed, with biases and an activation of their own."""
methods = pytest.mark.parametrize("method", ["nf4", "int8"])
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@pytest.fixture(scope="module", params=MIXTURES)
def path(request, tmp_path_factory) -> str:
    """Save a model with values that are exact in bf16; return the setting that loads it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    sharpened(MIXTURES[request.param]()).bfloat16().save_pretrained(folder)
    return f"model.path={folder}"


def policy_of(*overrides: str) -> PolicyModel:
    """Load a policy whose new adapters change its outputs."""
    torch.manual_seed(5)
    policy = load_policy(settings("model.lora.rank=2", *overrides), Device(BACKEND), TOKENIZER)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return policy


def step_of(*overrides: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of a step."""
    config = settings("model.lora.rank=2", *overrides)
    loss, found, _ = gradients(update_of(policy_of(*overrides), config), ragged_batch(old=True))
    return loss, found


def assert_same(found: tuple[float, dict[str, torch.Tensor]], expected: tuple[float, dict[str, torch.Tensor]]) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert gradient.abs().max() > 0, name
        assert torch.equal(found[1][name], gradient), name


def adapters_of(policy: PolicyModel) -> int:
    return sum(isinstance(module, AdaptedExperts) for module in policy.model.modules())


@pytest.mark.parametrize("kind", [GptOssExperts, NemotronHExperts])
def test_outputs_and_gradients_are_those_of_transformers_bit_for_bit(kind):
    torch.manual_seed(0)
    config = GptOssConfig(**SIZES, num_local_experts=4)
    if kind is NemotronHExperts:
        config = NemotronHConfig(hidden_size=32, n_routed_experts=4, moe_intermediate_size=16)
    experts = kind(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    hidden = torch.randn(7, 32, requires_grad=True)
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(7)])  # the last expert gets no token
    weights = torch.rand(7, 2, requires_grad=True)
    results = []
    for forward in (grouped_mm_experts_forward, experts_forward):
        output = forward(experts, hidden, chosen, weights)
        results.append((output, *torch.autograd.grad(output.square().sum(), [hidden, weights, *experts.parameters()])))
    for expected, found in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_loss_and_gradients_on_a_base_in_bf16_equal_those_on_one_in_fp32_bit_for_bit(path):
    words = (path, "model.dtype=bfloat16")
    held = {p.dtype for name, p in policy_of(*words).model.named_parameters() if name.endswith("down_proj")}
    assert held == {torch.bfloat16}
    assert_same(step_of(*words), step_of(*words, "model.lora.base_dtype=float32"))


def test_experts_of_masters_in_fp32_are_multiplied_in_the_compute_dtype(path):
    policy = load_policy(settings(path, "model.dtype=bfloat16"), Device(BACKEND), TOKENIZER)
    seen: set[torch.dtype] = set()
    for module in policy.model.modules():
        if isinstance(getattr(module, "act_fn", None), nn.Module):
            module.act_fn.register_forward_hook(lambda _, inputs, out: seen.add(inputs[0].dtype))
    gradients(update_of(policy, settings(path)), ragged_batch(old=True))
    assert seen <= {torch.bfloat16}
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}


def test_adapters_of_experts_are_low_rank_products_with_the_gradients_of_the_sum_with_the_weight(path, monkeypatch):
    adapted = 0 if "GptOss" in path else 6  # peft adapts the experts and routers of some families
    assert adapters_of(policy_of(path)) == adapted
    _, found = step_of(path, "model.dtype=float32")
    monkeypatch.setattr(AdaptedExperts, "_activate_lora", ParamWrapper._activate_lora)
    _, expected = step_of(path, "model.dtype=float32")
    assert max(gaps(found, expected).values()) < STEP
    assert any(not torch.equal(found[name], gradient) for name, gradient in expected.items()) == bool(adapted)


def test_another_implementation_of_experts_has_their_adapters_too(path):
    batch, results = ragged_batch(old=True), []
    for implementation in (IMPLEMENTATION, "eager"):
        policy = policy_of(path, "model.dtype=float32")
        policy.base.set_experts_implementation(implementation)
        results.append(gradients(update_of(policy, settings(path)), batch)[1])
    assert max(gaps(*results).values()) < STEP


@dtypes
@methods
def test_loss_and_gradients_of_quantized_experts_are_those_of_the_dequantized_weights_bit_for_bit(path, method, dtype):
    words = (path, "model.lora.rank=2", f"model.dtype={dtype}", f"model.quantize={method}")
    policy, ordinary = policy_of(*words), policy_of(*words)
    assert sum(len(codes.size) == 3 for codes in quantized_weights(policy.model).values()) == 4
    for parameter, codes in quantized_weights(policy.model).items():
        assert parameter.nbytes == quantized_bytes(method, *codes.size)
    dequantize(ordinary.model)
    assert not quantized_weights(ordinary.model)
    batch, config = ragged_batch(old=True), settings(*words)
    assert_same(*(gradients(update_of(each, config), batch)[:2] for each in (policy, ordinary)))
    _, full = step_of(path, f"model.dtype={dtype}")
    _, own, _ = gradients(update_of(policy, config), batch)
    assert any(not torch.equal(own[name], gradient) for name, gradient in full.items()), "quantization changes nothing"


@methods
def test_each_expert_has_the_codes_of_a_matrix_of_its_own(method):
    weight = torch.randn(3, 8, 64)
    model = MIXTURES["Qwen3Moe"]()
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(weight)
    quantize(model, method)
    found = experts.stacked_codes["down_proj"].dequantized(experts.down_proj)
    for expert, matrix in zip(found, weight, strict=True):
        layer = nn.Linear(64, 8)
        layer.weight = nn.Parameter(matrix)
        alone = nn.Sequential(nn.ModuleDict({"layer": layer}))
        alone.get_output_embeddings = lambda: None
        quantize(alone, method)
        assert torch.equal(expert, alone[0]["layer"].dequantized())


def test_no_dequantized_expert_is_stored_for_the_backward_pass(path):
    policy = policy_of(path, "model.quantize=nf4")
    shapes = {codes.size for codes in quantized_weights(policy.model).values()}
    stored: set[tuple[int, ...]] = set()

    def pack(tensor):
        stored.add(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        update_of(policy, settings(path)).accumulate_gradients(ragged_batch(old=True), range(1))
    assert stored
    assert not stored & (shapes | {(*size[:-2], size[-1], size[-2]) for size in shapes})


def test_a_backward_pass_after_the_codes_of_experts_were_overwritten_is_an_error(path):
    policy = policy_of(path, "model.quantize=nf4")
    loss = policy.base(input_ids=torch.arange(1, 9)[None]).logits.sum()
    next(p for p, codes in quantized_weights(policy.model).items() if len(codes.size) == 3).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


PROMPTS = PromptBatch((Prompt("0", "sort 312=", tuple(TOKENIZER("sort 312=").input_ids), "123", {}),))


def engine_of(model, dtype: torch.dtype) -> LocalEngine:
    return LocalEngine(model, TOKENIZER, device=torch.device("cpu"), compute_dtype=dtype, max_sequences=16)


@dtypes
def test_the_sampler_shares_the_codes_and_samples_as_the_dequantized_model(path, dtype):
    policy = policy_of(path, f"model.dtype={dtype}", "model.quantize=nf4")
    compute, sampling = getattr(torch, dtype), Sampling(n=4, max_response_tokens=8, seed=1)
    engine = engine_of(policy.model, compute)
    own = {p.data_ptr() for p in policy.model.parameters()}
    assert not [p for p in engine._sampler.parameters() if p.data_ptr() not in own and not p.is_floating_point()]
    found = engine.generate(PROMPTS, sampling)
    dequantize(policy.model)
    expected = engine_of(policy.model, compute).generate(PROMPTS, sampling)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.logprobs, expected.logprobs)


def test_the_merged_model_is_the_dequantized_mixture_with_the_adapters(path, tmp_path: Path):
    words = (path, "model.dtype=float32", "model.quantize=nf4")
    policy = policy_of(*words)
    save_model(policy.model, TOKENIZER, tmp_path / "merged", merge=True)
    save_model(policy.model, TOKENIZER, tmp_path / "adapter", merge=False)
    assert {weight.dtype for weight in load_file(tmp_path / "merged" / "model.safetensors").values()} == {torch.float32}
    ids = torch.arange(1, 9)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    again = load_policy(settings(*words, f"model.lora.adapter={tmp_path}/adapter"), Device(BACKEND), TOKENIZER)
    with torch.no_grad():
        expected = policy.base(input_ids=ids).logits
        assert torch.equal(again.base(input_ids=ids).logits, expected)
        error = merged(input_ids=ids).logits - expected
    assert error.norm() <= STEP * expected.norm()


def test_experts_that_run_by_a_forward_of_their_own_are_refused_by_name():
    sizes = SIZES | {"num_local_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 1}
    model = Llama4ForCausalLM(Llama4TextConfig(**sizes, intermediate_size_mlp=48))
    with pytest.raises(ConfigError, match=r"Llama4ForCausalLM is not supported: its experts \(.*gate_up_proj\) run by"):
        quantize(model, "nf4")


def test_a_mixture_without_weights_gets_codes_of_the_same_size(path):
    config = settings(path).model
    empty, full = (load_model(config, attention="eager", on_meta_device=on_meta) for on_meta in (True, False))
    for model in (empty, full):
        quantize(model, "int8")
    assert [p.shape for p in empty.parameters()] == [p.shape for p in full.parameters()]
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    assert all(isinstance(codes, Codes) for codes in quantized_weights(empty).values())
