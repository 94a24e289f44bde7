"""Adapters on a base model in 4 or 8 bits: the results of the dequantized weights, and one copy of the codes."""

import math
import os
import subprocess
import sys

import hwgrpo_kernels
import pytest
import torch
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hwgrpo.errors import ConfigError
from hwgrpo.models import quantization
from hwgrpo.models.quantization import QuantizedLinear, dequantize, quantize, quantized_bytes
from hwgrpo.models.saving import save_model
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.rank0_weights import Rank0Weights
from hwgrpo.training.shared_setup import load_policy, make_replica
from hwgrpo.training.strategies.fsdp2 import Fsdp2
from hwgrpo.values import Prompt, PromptBatch, Sampling
from tests.support.models.steps import gradients, update_of
from tests.support.models.tiny import ragged_batch, settings, tiny_llama, tiny_qwen3
from tests.support.processes.launch import ROOT
from tests.support.processes.wheels import fetched

TOKENIZER = character_tokenizer("")
METHODS = ("nf4", "int8")
DTYPES = ("float32", "bfloat16")
methods = pytest.mark.parametrize("method", METHODS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def qwen2() -> Qwen2ForCausalLM:
    """Return a random Qwen2, whose projections of queries, keys and values have biases."""
    torch.manual_seed(0)
    sizes = {"vocab_size": len(TOKENIZER), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    return model


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    qwen2().save_pretrained(folder)
    return f"model.path={folder}"


def policy_of(*overrides: str) -> PolicyModel:
    """Load a policy whose new adapters change its outputs."""
    torch.manual_seed(5)
    policy = load_policy(settings("model.lora.rank=2", *overrides), Device(BACKEND), TOKENIZER)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return policy


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


@pytest.mark.parametrize("size", [(64, 48), (7, 37), (1, 1), (3, 64)])
@methods
def test_a_weight_is_within_half_a_step_of_its_codes(size, method):
    layer = nn.Linear(size[1], size[0])
    found = QuantizedLinear(layer, method).dequantized()
    weight = layer.weight.detach()
    if method == "int8":
        allowed = (weight.abs().amax(1, keepdim=True) / 127 / 2).expand_as(weight)
    else:
        blocks = weight.flatten().split(hwgrpo_kernels.NF4_BLOCK)
        gap = (1 - 0.6961928009986877) / 2  # the largest between neighbours of the table
        allowed = torch.cat([torch.full_like(block, float(block.abs().max()) * gap) for block in blocks]).view(size)
    assert ((found - weight).abs() <= allowed * (1 + 1e-5)).all()
    assert found.abs().max() == pytest.approx(float(weight.abs().max()), rel=1e-6)


@pytest.mark.parametrize(("method", "error"), [("nf4", 0.09), ("int8", 0.009)])
def test_the_error_of_normally_distributed_weights_is_what_the_documentation_says(method, error):
    layer = nn.Linear(4096, 64)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    difference = QuantizedLinear(layer, method).dequantized() - layer.weight.detach()
    assert float(difference.norm() / layer.weight.detach().norm()) == pytest.approx(error, rel=0.05)


@methods
def test_weights_of_zeros_stay_zeros(method):
    layer = nn.Linear(70, 3)
    nn.init.zeros_(layer.weight)
    assert torch.equal(QuantizedLinear(layer, method).dequantized(torch.bfloat16), torch.zeros(3, 70).bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize(("package", "lines"), [("bitsandbytes", 3), ("torchao", 4)])
def test_layers_are_those_of_another_package_on_a_cpu(package, lines):
    folder = fetched(package, (package,))
    paths = os.pathsep.join(str(each) for each in (folder, ROOT, ROOT / "kernels"))
    done = subprocess.run(
        [sys.executable, str(ROOT / f"tests/models/{package}_check.py")],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == lines, done.stdout


@pytest.mark.parametrize("size", [(50, 40), (3, 400), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_codes_are_dequantized_in_chunks_to_the_same_values(size, dtype, monkeypatch):
    layer = QuantizedLinear(nn.Linear(size[1], size[0], dtype=dtype), "int8")
    codes, scales = layer.weight[: size[0] * size[1]].view(torch.int8).view(size), layer.weight[-4 * size[0] :]
    expected = (codes * scales.view(torch.float32)[:, None]).to(dtype)
    monkeypatch.setattr(quantization, "CHUNK", 120)
    produced: list[int] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mul.Tensor:
                produced.append(math.prod(args[0].shape))
            return func(*args, **(kwargs or {}))

    with Products():
        found = layer.dequantized(dtype)
    assert torch.equal(found, expected)
    assert found.dtype == dtype
    assert sum(produced) == expected.numel()
    assert max(produced) <= max(120, size[1])


@methods
def test_a_layer_compiles_into_one_graph_with_the_same_results(method):
    layer = QuantizedLinear(nn.Linear(70, 33), method)
    input = torch.randn(5, 70, requires_grad=True)
    results = []
    for forward in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        with torch.autocast("cpu", torch.bfloat16):
            output = forward(input)
        results.append((output, *torch.autograd.grad(output.float().sum(), input)))
    for expected, found in zip(*results, strict=True):
        assert torch.equal(found, expected)


@methods
def test_fake_tensors_get_the_shape_and_dtype_of_the_values(method):
    with FakeTensorMode():
        layer = QuantizedLinear(nn.Linear(70, 33), method)
        values, output = layer.dequantized(torch.bfloat16), layer(torch.randn(5, 70))
    assert (values.shape, values.dtype, output.shape) == ((33, 70), torch.bfloat16, (5, 33))


@dtypes
@methods
def test_loss_and_gradients_are_those_of_ordinary_layers_of_the_dequantized_weights_bit_for_bit(path, method, dtype):
    words = (path, "model.lora.rank=2", f"model.dtype={dtype}", f"model.quantize={method}")
    batch, config = ragged_batch(old=True), settings(*words)
    policy, ordinary = policy_of(*words), policy_of(*words)
    dequantize(ordinary.model)
    assert len(quantized_layers(policy.model)) == 14
    assert not quantized_layers(ordinary.model)
    loss, own, _ = gradients(update_of(policy, config), batch)
    expected_loss, expected, _ = gradients(update_of(ordinary, config), batch)
    assert loss == expected_loss
    assert len(expected) == 28
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        assert torch.equal(own[name], gradient), name
    _, full, _ = gradients(update_of(policy_of(path, f"model.dtype={dtype}"), config), batch)
    assert any(not torch.equal(own[name], gradient) for name, gradient in full.items()), "quantization changes nothing"


@methods
def test_no_dequantized_weight_is_stored_for_the_backward_pass(path, method):
    policy = policy_of(path, f"model.quantize={method}")
    shapes = {tuple(layer.dequantized().shape) for layer in quantized_layers(policy.model).values()}
    stored: set[tuple[int, ...]] = set()

    def pack(tensor):
        stored.add(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        update_of(policy, settings(path)).accumulate_gradients(ragged_batch(old=True), range(1))
    assert stored
    assert not stored & (shapes | {shape[::-1] for shape in shapes})


@methods
def test_a_backward_pass_after_the_codes_were_overwritten_is_an_error(method):
    layer = QuantizedLinear(nn.Linear(8, 4), method)
    output = layer(torch.ones(2, 8, requires_grad=True))
    layer.weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@methods
def test_only_layers_in_the_decoder_are_quantized_and_adapters_stay_fp32(path, method):
    policy = policy_of(path, "model.dtype=bfloat16", f"model.quantize={method}")
    for name, parameter in policy.model.named_parameters():
        if name.endswith("base_layer.weight"):
            assert parameter.dtype == torch.uint8, name
        else:
            assert parameter.dtype == torch.float32, name
        assert parameter.requires_grad == ("lora" in name), name
    for layer in quantized_layers(policy.model).values():
        assert layer.weight.nbytes == quantized_bytes(method, layer.out_features, layer.in_features)


def engine_of(model, dtype: torch.dtype) -> LocalEngine:
    return LocalEngine(model, TOKENIZER, device=torch.device("cpu"), compute_dtype=dtype, max_sequences=16)


PROMPTS = PromptBatch((Prompt("0", "sort 312=", tuple(TOKENIZER("sort 312=").input_ids), "123", {}),))
SAMPLING = Sampling(n=4, max_response_tokens=8, seed=1)


@dtypes
@methods
def test_the_sampler_shares_the_codes_and_samples_as_the_dequantized_model_with_its_current_adapters(
    path, method, dtype
):
    words, compute = (path, f"model.dtype={dtype}", f"model.quantize={method}"), getattr(torch, dtype)
    policy = policy_of(*words)
    engine = engine_of(policy.model, compute)
    own = {p.data_ptr() for p in policy.model.parameters()}
    copies = [p for p in engine._sampler.parameters() if p.data_ptr() not in own]
    assert not [p for p in copies if not p.is_floating_point()]
    assert (len(copies) == 0) == (dtype == "float32")
    first = engine.generate(PROMPTS, SAMPLING)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05)
    engine.update_weights(1)
    found = engine.generate(PROMPTS, SAMPLING)
    assert not torch.equal(first.logprobs, found.logprobs)
    dequantize(policy.model)
    ordinary = engine_of(policy.model, compute)
    assert engine.decode_path == ordinary.decode_path
    # with these weights rounding to bf16 may change logits by more than the lean step's startup check allows
    assert engine.decode_path == "lean" or dtype == "bfloat16"
    expected = ordinary.generate(PROMPTS, SAMPLING)
    assert torch.equal(found.tokens, expected.tokens)
    # the ordinary layers of the same input are one product, whose rounding may differ where one of them is narrow
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-5, atol=0)


def test_a_copy_that_samples_while_the_policy_trains_shares_the_codes(path):
    words = (path, "model.dtype=bfloat16", "model.quantize=nf4")
    policy = policy_of(*words)
    replica = make_replica(settings("model.lora.rank=2", *words), policy, None)
    codes = {layer.weight.data_ptr() for layer in quantized_layers(policy.model).values()}
    assert {layer.weight.data_ptr() for layer in quantized_layers(replica).values()} == codes
    assert {p.dtype for p in replica.parameters()} == {torch.uint8, torch.bfloat16}


def test_a_copy_that_samples_beside_a_sharded_policy_shares_the_codes_of_every_rank(path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "broadcast", lambda weight, src: None)  # as on rank 0
    words = (path, "model.dtype=bfloat16", "model.quantize=nf4")
    policy = policy_of(*words)
    weights = Rank0Weights(policy.model, torch.device("cpu"), rank=0)
    weights.replicate(policy.model)
    replica = make_replica(settings("model.lora.rank=2", *words), policy, weights)
    materializer = weights.materializer(policy.model)
    for layer in policy.base.model.layers:
        assert {parameter.dtype for parameter in materializer.materialize(layer).values()} == {torch.float32}
    codes = {layer.weight.data_ptr() for layer in quantized_layers(policy.model).values()}
    assert len(codes) == 14
    assert {layer.weight.data_ptr() for layer in quantized_layers(replica).values()} == codes


def test_fsdp2_shards_all_but_the_codes(path):
    config = settings("model.lora.rank=2", path, "model.quantize=nf4", "trainer.strategy=fsdp2")
    policy = policy_of(path, "model.quantize=nf4")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        Fsdp2(torch.device("cpu"), "gloo").wrap(policy, config)
        kinds = {(parameter.dtype, isinstance(parameter, DTensor)) for parameter in policy.parameters()}
    finally:
        torch.distributed.destroy_process_group()
    assert kinds == {(torch.uint8, False), (torch.float32, True)}


@dtypes
@methods
def test_the_merged_model_is_the_dequantized_base_with_the_adapter_and_the_adapter_is_saved(
    path, method, dtype, tmp_path
):
    policy = policy_of(path, f"model.dtype={dtype}", f"model.quantize={method}")
    layer = policy.base.model.layers[1].mlp.up_proj
    update = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    expected = layer.base_layer.dequantized() + update
    before = {name: parameter.clone() for name, parameter in policy.model.named_parameters()}
    save_model(policy.model, TOKENIZER, tmp_path / "merged", merge=True)
    save_model(policy.model, TOKENIZER, tmp_path / "adapter", merge=False)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {weight.dtype for weight in merged.values()} == {torch.float32}
    torch.testing.assert_close(merged["model.layers.1.mlp.up_proj.weight"], expected, rtol=1e-6, atol=1e-7)
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    base = AutoModelForCausalLM.from_pretrained(path.removeprefix("model.path="))
    quantize(base, method)
    again = PeftModel.from_pretrained(base, tmp_path / "adapter")
    ids = torch.arange(1, 9)[None]
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(again(input_ids=ids).logits, whole(input_ids=ids).logits, rtol=1e-3, atol=1e-4)


@methods
def test_an_adapter_is_trained_further_on_a_quantized_base(path, method, tmp_path):
    first = policy_of(path, f"model.quantize={method}")
    save_model(first.model, TOKENIZER, tmp_path, merge=False)
    words = (path, f"model.quantize={method}", "model.lora.rank=0", f"model.lora.adapter={tmp_path}")
    policy = load_policy(settings(*words), Device(BACKEND), TOKENIZER)
    own = {name: p for name, p in policy.model.named_parameters() if "lora" in name and ".default." in name}
    assert {p.dtype for p in own.values()} == {torch.float32}
    for name, parameter in first.model.named_parameters():
        if name in own:
            assert torch.equal(own[name], parameter), name


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("model.lora.rank=0",), "model.quantize='nf4' with model.lora.rank=0: quantized weights are not trained"),
        (("trainer.strategy=deepspeed",), "model.quantize='nf4' with trainer.strategy='deepspeed'"),
        (("rollout.engine=vllm",), "samples with the unquantized base model: set algorithm.correction.name"),
        (("model.quantize=fp4",), "model.quantize='fp4'"),
    ],
)
def test_what_does_not_go_with_quantized_weights_is_refused_with_the_remedy(words, told):
    with pytest.raises(ConfigError) as error:
        settings("model.lora.rank=2", "model.quantize=nf4", *words)
    assert told in str(error.value)


def test_an_engine_with_the_unquantized_base_is_taken_with_a_correction():
    words = ("rollout.engine=vllm", "algorithm.correction.name=token_truncate")
    assert settings("model.lora.rank=2", "model.quantize=nf4", *words).model.quantize == "nf4"


@pytest.mark.parametrize("model", [tiny_llama, tiny_qwen3])
def test_a_model_without_weights_gets_layers_of_the_same_size(model):
    with torch.device("meta"):
        empty = model()
    quantize(empty, "nf4")
    full = model()
    quantize(full, "nf4")
    assert [p.shape for p in empty.parameters()] == [p.shape for p in full.parameters()]
    assert {p.device.type for p in empty.parameters()} == {"meta"}
