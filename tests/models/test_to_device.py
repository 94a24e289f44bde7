"""A model that is put on a device keeps its tied parameters tied, whatever the device's plug-in makes of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device
from torch import nn

from hwgrpo.models.loading import load_tokenizer
from hwgrpo.models.to_device import move_to_device
from hwgrpo.training.shared_setup import load_policy
from tests.support.runs import runs

HOST = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def untying(noise: float = 0.0):
    """A `Module.to` that makes new parameters, as it does where a plug-in says nothing of changing them in place."""

    def to(self: nn.Module, *_: Any, **__: Any) -> nn.Module:
        for module in self.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                copied = parameter.detach().clone()
                setattr(module, name, nn.Parameter(copied + noise * torch.rand(()), parameter.requires_grad))
        return self

    return to


def test_what_stays_tied_is_left_alone(caplog):
    model = Tied()
    weight = model.embedding.weight
    move_to_device(model, HOST)
    assert model.head.weight is model.embedding.weight is weight
    assert caplog.records == []


def test_parameters_that_a_plug_in_unties_are_tied_again_with_a_warning(monkeypatch, caplog):
    model, expected = Tied(), Tied()
    expected.load_state_dict(model.state_dict())
    model.embedding.weight.requires_grad_(False)
    monkeypatch.setattr(nn.Module, "to", untying())
    model.to(HOST)
    assert model.head.weight is not model.embedding.weight, "the planted move does not untie"
    model.head.weight = model.embedding.weight
    move_to_device(model, HOST)
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.requires_grad is False
    assert {name for name, _ in model.named_parameters()} == {"embedding.weight", "body.weight", "body.bias"}
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    [record] = caplog.records
    assert "copied embedding.weight, which embedding.weight and head.weight share" in record.getMessage()


def test_copies_that_differ_are_refused(monkeypatch):
    monkeypatch.setattr(nn.Module, "to", untying(noise=1.0))
    with pytest.raises(RuntimeError, match=r"embedding\.weight and head\.weight different values"):
        move_to_device(Tied(), HOST)


@pytest.mark.parametrize("lora", [0, 4])
def test_the_policy_is_moved_with_its_tied_head(monkeypatch, tmp_path: Path, caplog, lora: int):
    config = runs.small(tmp_path, f"model.lora.rank={lora}")
    tokenizer = load_tokenizer(config.model)
    plain = load_policy(config, Device(BACKEND), tokenizer)
    monkeypatch.setattr(nn.Module, "to", untying())
    moved = load_policy(config, Device(BACKEND), tokenizer)
    for policy in (plain, moved):
        assert policy.base.get_output_embeddings().weight is policy.base.get_input_embeddings().weight
    assert [name for name, _ in moved.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert "tied them again" in caplog.text
