"""A model in the host's memory that computes on a device which has one of its layers at a time."""

import pytest
import torch
from hwgrpo_backends.device import Device
from hwgrpo_backends.npu import BACKEND
from torch import nn

from hwgrpo.models.layers import layerwise_on_device
from tests.support.models.tiny import tiny_llama, tiny_qwen3
from tests.support.numbers.rounding import assert_values_close

IDS = torch.arange(1, 13).view(2, 6)
NPU = torch.device("npu:0")


@pytest.mark.parametrize(
    "make", [tiny_qwen3, lambda: tiny_qwen3(tied=False), tiny_llama], ids=["tied", "untied", "llama"]
)
def test_it_computes_what_it_does_on_the_host_and_is_left_as_it_was(make):
    model = make()
    expected = model(IDS).logits
    before = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    with layerwise_on_device(model, NPU):
        found = model(IDS.to(NPU)).logits
        assert model.get_input_embeddings().weight.device == NPU
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == model.config.tie_word_embeddings
    assert found.device == NPU
    assert_values_close(found.cpu(), expected)
    after = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    assert all(name == was and tensor is held for (name, tensor), (was, held) in zip(after, before, strict=True))
    assert {tensor.device.type for _, tensor in after} == {"cpu"}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_device_has_what_is_outside_of_layers_and_one_of_them():
    model, device = tiny_qwen3(), Device(BACKEND)
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    outside = model.lm_head.weight.nbytes
    with torch.no_grad():
        model(IDS)
        device.reset_peak()
        before = device.memory().peak
        with layerwise_on_device(model, NPU):
            hidden = model.model(IDS.to(NPU), use_cache=False).last_hidden_state
            del hidden
        peak = device.memory().peak - before
    # twelve tokens' activations and rounding of the allocator to 512 bytes are the rest
    assert outside + layer < peak < outside + 1.8 * layer, (outside, layer, peak)


def test_a_part_of_a_layer_computes_and_has_gradients_by_itself():
    model = tiny_qwen3()
    part, hidden = model.model.layers[1].mlp, torch.randn(3, 32)
    with layerwise_on_device(model, NPU):
        leaf = hidden.to(NPU).requires_grad_()
        (found,) = torch.autograd.grad(part(leaf).square().sum(), leaf)
    leaf = hidden.requires_grad_()
    (expected,) = torch.autograd.grad(part(leaf).square().sum(), leaf)
    assert_values_close(found.cpu(), expected)


def test_after_an_error_in_a_forward_the_weights_are_on_the_host(monkeypatch: pytest.MonkeyPatch):
    model = tiny_qwen3()

    def fails(self: nn.Module, *_: object, **__: object) -> None:
        raise ValueError("no such mask")

    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", fails)
    with layerwise_on_device(model, NPU):
        with pytest.raises(ValueError, match="no such mask"):
            model(IDS.to(NPU))
        matrices = {p.device.type for p in model.model.layers.parameters() if p.ndim > 1}
        assert matrices == {"cpu"}
    assert {p.device.type for p in model.parameters()} == {"cpu"}
