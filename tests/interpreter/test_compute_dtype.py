"""Fused modules that write the compute dtype: the bits of casts after them, and whole models near the plain ones."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hwgrpo_kernels import module_replacement, module_triton
from hwgrpo_kernels.module_replacement import add_norm, replace_modules, rms_norm, rotary, swiglu
from hwgrpo_kernels.module_replacement.compute_dtype import Readers, hand_out, linear_forward
from peft import LoraConfig as PeftConfig
from peft import get_peft_model

from hwgrpo.config.schema import LoraConfig
from hwgrpo.models import shared_prefix_masks
from hwgrpo.models.frozen_dtype import cast_frozen, prepare_base
from hwgrpo.models.lora import apply_lora
from hwgrpo.training.policy.layouts import BRANCHED, PACKED, PADDED, Layout
from hwgrpo.training.policy.micro_batch import build_micro_batch
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from tests.support.models.tiny import ragged_batch
from tests.support.numbers.npu_module_cases import SHAPE, tiny
from tests.support.numbers.rounding import BF16, STEP, assert_gradients_close, assert_values_close
from tests.support.numbers.row_cases import DEVICE

MODULES = ("rms_norm", "rotary", "swiglu")
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _a_cpu_takes_the_modules_of_gpus(monkeypatch):
    if DEVICE == "cpu":
        for each in (replace_modules, rms_norm, rotary, swiglu):
            monkeypatch.setattr(each, "in_triton", lambda device_type: True)
        monkeypatch.setattr(shared_prefix_masks, "MOST_KEYS_IN_FP32", 0)  # as on a GPU: attention in 16 bits


def policy_of(model: Any, dtype: torch.dtype) -> PolicyModel:
    return PolicyModel(model.to(DEVICE), compute_dtype=dtype, options=HeadOptions()).train()


def passes(policy: PolicyModel, layout: Layout) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return hidden states, log-probs, and the gradients of a weighted sum of log-probs, on the host."""
    batch, vocab = ragged_batch(prompts=2, n=2), SHAPE["vocab_size"]
    batch = replace(batch, prompt_tokens=batch.prompt_tokens % vocab, tokens=batch.tokens % vocab)
    micro = build_micro_batch(batch, layout.rows(batch, range(len(batch)), 1000, 32), {}, layout)
    micro = micro.to(torch.device(DEVICE))
    hidden = policy.hidden_states(micro)
    logits = hidden.float() @ policy.base.get_output_embeddings().weight.float().T
    logprobs = logits.log_softmax(-1).gather(1, micro.targets[:, None])[:, 0]
    weights = torch.linspace(-1, 1, len(logprobs), device=DEVICE)
    trained = {name: each for name, each in policy.named_parameters() if each.requires_grad}
    found = torch.autograd.grad((logprobs * weights).sum(), list(trained.values()))
    gradients = {name: each.cpu() for name, each in zip(trained, found, strict=True)}
    return hidden.detach().cpu(), logprobs.detach().cpu(), gradients


def with_adapters(model: Any, dtype: torch.dtype) -> Any:
    """Return a model with adapters, as a run makes it: frozen matrices in the compute dtype, norms in fp32."""
    castable = prepare_base(model.requires_grad_(False))
    model = apply_lora(model, LoraConfig(rank=2, alpha=4.0))
    cast_frozen(castable, dtype, round_values=True)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return model


@pytest.mark.parametrize(
    "family,layout,checkpointed",
    [
        ("qwen3", PADDED, False),
        ("llama", BRANCHED, True),
        ("qwen3", PACKED, False),
        ("qwen2 with adapters", BRANCHED, True),
    ],
)
def test_a_model_has_the_bits_that_autocasts_casts_give(family, layout, checkpointed, monkeypatch):
    name, _, adapters = family.partition(" with ")
    found = []
    for writes_compute_dtype in (True, False):
        with monkeypatch.context() as patched:
            if not writes_compute_dtype:
                patched.setattr(replace_modules, "_readers_that_cast", lambda *_: None)
                patched.setattr(add_norm, "candidates", lambda model: ())
            policy = policy_of(with_adapters(tiny(name), BFLOAT16) if adapters else tiny(name), BFLOAT16)
            applied = module_replacement.apply(policy.model, MODULES, BFLOAT16)
        assert len(applied.in_compute_dtype) == (3 * 2 if writes_compute_dtype else 0)
        if checkpointed:
            policy.base.gradient_checkpointing_enable({"use_reentrant": False})
        found.append(passes(policy, layout))
    (hidden, logprobs, gradients), (cast_hidden, cast_logprobs, cast_gradients) = found
    assert hidden.dtype == BFLOAT16
    assert torch.equal(hidden, cast_hidden)
    assert torch.equal(logprobs, cast_logprobs)
    if layout is PACKED:  # under a mask over the row sdpa repeats key heads: their gradients are added in 16 bits, too
        assert_gradients_close(gradients, cast_gradients, BF16)
        return
    for name, gradient in gradients.items():
        assert torch.equal(gradient, cast_gradients[name]), name


@pytest.mark.parametrize(
    "dtype,limit,adapters,checkpointed,layout",
    [
        *((FLOAT32, STEP, False, False, each) for each in (PADDED, PACKED, BRANCHED)),
        (BFLOAT16, BF16, False, False, PADDED),
        (BFLOAT16, BF16, True, True, BRANCHED),
    ],
    ids=["fp32 padded", "fp32 packed", "fp32 branched", "bf16 padded", "bf16 lora checkpointed branched"],
)
def test_a_fused_model_is_as_near_to_the_plain_one_as_rounding_allows(adapters, checkpointed, dtype, limit, layout):
    found = []
    for fused in (False, True):
        model = tiny("qwen3")
        policy = policy_of(with_adapters(model, dtype) if adapters else model, dtype)
        if fused:
            applied = module_replacement.apply(policy.model, MODULES, dtype)
            assert all(applied.replaced.values()), applied.line()
        if checkpointed:
            policy.base.gradient_checkpointing_enable({"use_reentrant": False})
            policy.base.enable_input_require_grads()
        found.append(passes(policy, layout))
    (plain_hidden, plain, expected), (hidden, logprobs, gradients) = found
    assert_values_close(hidden.float(), plain_hidden.float(), limit)
    assert_values_close(logprobs, plain, limit)
    assert_gradients_close(gradients, expected, limit)


def norms_of(layer: int) -> dict[str, tuple[str, ...]]:
    of = f"model.layers.{layer}"
    attention = tuple(f"{of}.self_attn.{each}_proj" for each in "qkv")
    return {
        f"{of}.input_layernorm": attention,
        f"{of}.post_attention_layernorm": (f"{of}.mlp.gate_proj", f"{of}.mlp.up_proj"),
        f"{of}.self_attn": (),
    }


def test_norms_that_linear_layers_alone_read_write_the_compute_dtype_and_others_keep_theirs():
    model = tiny("qwen3").to(DEVICE)
    applied = module_replacement.apply(model, MODULES, BFLOAT16)
    assert applied.in_compute_dtype == norms_of(0) | norms_of(1), "none of queries, keys, or the last one"
    assert len(applied.replaced["rms_norm"]) == 2 * 4 + 1
    again = tiny("qwen3").to(DEVICE)
    module_replacement.copy_to(again, applied.replaced, applied.in_compute_dtype)
    inputs = {"input_ids": torch.arange(12, device=DEVICE).view(2, 6)}
    with torch.autocast(DEVICE, BFLOAT16):
        first, copied, deep = (each(**inputs).logits for each in (model, again, copy.deepcopy(model)))
    assert torch.equal(first, copied)
    assert torch.equal(first, deep)
    applied.undo()
    assert not applied.in_compute_dtype
    assert not any("forward" in vars(each) for each in model.modules())


@pytest.mark.parametrize("what", ["fp32", "16-bit weights", "adapters of peft", "norms after the layer"])
def test_where_autocast_does_not_cast_for_all_readers_norms_keep_their_dtype(what):
    model = tiny("olmo2" if what == "norms after the layer" else "llama")
    if what == "16-bit weights":
        model = model.to(BFLOAT16)
    if what == "adapters of peft":
        model = get_peft_model(model, PeftConfig(r=2, target_modules="all-linear"))
    applied = module_replacement.apply(model.to(DEVICE), MODULES, None if what == "fp32" else BFLOAT16)
    assert applied.replaced["rms_norm"]
    assert not [each for each in applied.in_compute_dtype if each in applied.replaced["rms_norm"]]


def test_a_reader_that_does_not_cast_is_seen():
    weight, x = torch.ones(3, 4), torch.ones(2, 4)
    readers = Readers(torch.nn.Module())
    with readers:
        for name, read in {
            "linear": lambda each: torch.nn.functional.linear(each, weight),
            "moved": lambda each: torch.nn.functional.linear(each[:1].transpose(0, 1).contiguous().t(), weight),
            "added": lambda each: each.transpose(0, 1) + 1,
            "in place": lambda each: torch.nn.functional.linear(each, weight) + each.mul_(2).sum(),
        }.items():
            output = x.clone()
            readers.watch(name, (output,))
            read(output)
    assert [readers.casts_all(name) for name in ("linear", "moved", "added", "in place")] == [True, False, False, False]


@pytest.mark.parametrize("shape", [(1, 5), (2, 9, 100), (67, 48)])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_copies_of_a_norm_have_the_bits_of_casts_after_it(count, shape):
    def random(*size, seed=0):
        return torch.randn(*size, generator=torch.Generator().manual_seed(seed), device="cpu").to(DEVICE)

    x, weight = random(*shape).requires_grad_(), random(shape[-1], seed=1).requires_grad_()
    # of such different sizes that fp32 sums depend on the order
    scales = (2.0 ** (8 * random(*shape, seed=seed + 9)) for seed in range(count))
    upstream = [(random(*shape, seed=seed + 2) * scale).to(BFLOAT16) for seed, scale in enumerate(scales)]
    copies = module_triton.rms_norm_copies(x, weight, 1e-6, BFLOAT16, count)
    one = module_triton.rms_norm(x, weight, 1e-6)
    casts = [one.to(BFLOAT16) for _ in range(count)]
    for ours, theirs in zip(copies, casts, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() == copies[0].data_ptr()
    # the last reader has the first copy, and autograd adds its gradient first
    found = torch.autograd.grad(copies, (x, weight), upstream)
    expected = torch.autograd.grad(casts, (x, weight), upstream[::-1])
    assert all(map(torch.equal, found, expected))


def test_a_copy_that_is_not_read_adds_nothing():
    x, weight = torch.randn(5, 8, device=DEVICE).requires_grad_(), torch.ones(8, device=DEVICE, requires_grad=True)
    copies = module_triton.rms_norm_copies(x, weight, 1e-6, BFLOAT16, 3)
    (found,) = torch.autograd.grad(copies[1].float().square().sum(), x)
    one = module_triton.rms_norm_copies(x, weight, 1e-6, BFLOAT16, 1)[0]
    assert torch.equal(found, torch.autograd.grad(one.float().square().sum(), x)[0])


def test_a_rotation_in_16_bits_has_the_bits_of_a_cast_after_it():
    x = torch.randn(2, 5, 3, 20, device=DEVICE).transpose(1, 2).requires_grad_()
    cos, sin = torch.randn(2, 1, 5, 20, device=DEVICE)
    rotated = module_triton.rotate_halves(x, cos, sin, BFLOAT16)
    cast = module_triton.rotate_halves(x, cos, sin).to(BFLOAT16)
    assert torch.equal(rotated, cast)
    upstream = torch.randn(rotated.shape, device=DEVICE).to(BFLOAT16)
    assert torch.equal(*(torch.autograd.grad(each, x, upstream)[0] for each in (rotated, cast)))


def test_a_layer_adds_and_norms_in_one_kernel_where_its_forward_is_of_that_form(monkeypatch):
    launched = []
    own = module_triton.add_rms_norm
    monkeypatch.setattr(module_triton, "add_rms_norm", lambda *args: launched.append(args) or own(*args))
    for family in ("llama", "mistral", "qwen2", "qwen3", "olmo2", "glm4", "gemma"):
        with monkeypatch.context() as patched:
            applied = module_replacement.apply(tiny(family).to(DEVICE), ("rms_norm",), BFLOAT16)
            layers = () if family in ("olmo2", "glm4", "gemma") else ("model.layers.0", "model.layers.1")
            assert applied.replaced.get("add_rms_norm", ()) == layers, family
            patched.undo()
    assert len(launched) == 2 * 4, "one self-test of each layer"


def test_a_layer_of_other_arithmetic_in_the_same_names_keeps_its_own(monkeypatch):
    model = tiny("llama").to(DEVICE)

    def forward(self, hidden_states, attention_mask=None, position_embeddings=None, **options):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states, attention_mask=attention_mask, position_embeddings=position_embeddings
        )
        hidden_states = residual + 0.5 * hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        return residual + self.mlp(hidden_states)

    monkeypatch.setattr(type(model.model.layers[0]), "forward", forward)
    applied = module_replacement.apply(model, MODULES, BFLOAT16)
    assert "add_rms_norm" not in applied.replaced
    assert "its outputs differ from the plain module's" in applied.skip_reasons("add_rms_norm")
    assert applied.replaced["rms_norm"], "its norms are replaced nevertheless"


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("shape", [(1, 5), (2, 9, 100), (67, 48), (3, 4097)])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_a_sum_and_its_norm_have_the_bits_of_the_two_after_each_other(dtype, shape, count):
    def random(*size, seed):
        return torch.randn(*size, generator=torch.Generator().manual_seed(seed), device="cpu").to(DEVICE)

    x, weight = random(*shape, seed=0).requires_grad_(), random(shape[-1], seed=1).requires_grad_()
    update = random(*shape, seed=2).to(dtype).requires_grad_()
    upstream = [random(*shape, seed=3), *(random(*shape, seed=seed + 4).to(dtype) for seed in range(count))]
    found = module_triton.add_rms_norm(x, update, weight, 1e-6, dtype, count)
    total = x + update
    expected = (total, *module_triton.rms_norm_copies(total, weight, 1e-6, dtype, count))
    assert all(map(torch.equal, found, expected))
    for used in (slice(None), slice(1, None), slice(0, 1)):
        ours, theirs = (
            torch.autograd.grad(
                each[used], (x, update, weight), upstream[used], retain_graph=True, allow_unused=used == slice(0, 1)
            )
            for each in (found, expected)
        )
        for gradient, other in zip(ours, theirs, strict=True):
            assert (gradient is None) == (other is None)
            assert gradient is None or torch.equal(gradient, other)


def test_the_norm_of_a_sum_in_16_bits_is_of_the_rounded_sum():
    x, update = torch.randn(2, 9, 40, device=DEVICE).to(BFLOAT16)
    weight = torch.randn(40, device=DEVICE)
    total, normed = module_triton.add_rms_norm(x, update, weight, 1e-6)
    assert torch.equal(total, x + update)
    assert torch.equal(normed, module_triton.rms_norm(total, weight, 1e-6))


def test_linear_layers_read_copies_in_turn_and_the_last_the_output_itself():
    layer = torch.nn.Linear(1, 1, bias=False, device=DEVICE)
    torch.nn.init.ones_(layer.weight)
    first, second, third = torch.tensor([[1.0], [2.0], [3.0]], device=DEVICE).split(1)
    hand_out(first, [second, third])
    assert [linear_forward(layer, first).item() for _ in range(4)] == [3.0, 2.0, 1.0, 1.0]
