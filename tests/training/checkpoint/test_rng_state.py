"""The random state of a checkpoint on the family it is from, on another one, and from before families were recorded."""

import dataclasses
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hwgrpo_backends import registry
from hwgrpo_backends.device import Device

from hwgrpo.training.checkpoint import rng_state
from tests.support.runs.runs import metrics, run

CPU = registry.get("cpu")


class Generator:
    """The generator of a device that is not there, with a state of its own kind."""

    def __init__(self):
        self.state = torch.arange(16, dtype=torch.uint8)

    def get_rng_state(self, device):
        return self.state.clone()

    def set_rng_state(self, state, device):
        assert state.numel() == 16, "a state of another kind"
        self.state = state.clone()


@pytest.fixture
def chip(monkeypatch):
    """An accelerator whose generator is its own, and is seeded when torch's are."""
    generator = Generator()
    monkeypatch.setattr(
        torch, "get_device_module", lambda device_type: SimpleNamespace(
            device_count=lambda: 1, get_rng_state=generator.get_rng_state, set_rng_state=generator.set_rng_state
        )
    )  # fmt: skip
    seed_host = torch.manual_seed

    def seed_all(seed):
        generator.state = torch.full((16,), seed % 256, dtype=torch.uint8)
        return seed_host(seed)

    monkeypatch.setattr(torch, "manual_seed", seed_all)
    return Device(dataclasses.replace(CPU, name="chip", device_type="privateuseone")), generator


def drawn():
    return torch.rand(3).tolist(), random.random(), np.random.rand()


def test_the_same_family_gets_its_own_state_back(chip):
    device, generator = chip
    generator.state += 1
    state = rng_state.capture(device)
    before, wanted = generator.state.clone(), drawn()
    generator.state += 5
    drawn()
    assert rng_state.restore(state, device, seed=9) is None
    assert torch.equal(generator.state, before)
    assert drawn() == wanted


def test_another_familys_device_state_is_not_used_and_the_rest_is(chip):
    device, generator = chip
    on_cpu = rng_state.capture(Device(CPU))
    wanted = drawn()
    note = rng_state.restore(on_cpu, device, seed=9)
    assert "is of cpu, not of chip" in note
    assert "seeded with 9" in note
    assert generator.state.tolist() == [9] * 16
    assert drawn() == wanted


def test_a_checkpoint_of_an_accelerator_goes_on_on_the_cpu(chip):
    device, _ = chip
    on_chip = rng_state.capture(device)
    wanted = drawn()
    note = rng_state.restore(on_chip, Device(CPU), seed=9)
    assert "is of chip, not of cpu" in note
    assert drawn() == wanted, "on the CPU dropout draws from torch's generator, whose state is there"


def test_a_state_without_a_family_is_taken_for_ones_own_unless_its_length_differs(chip):
    device, generator = chip
    on_chip, on_cpu = rng_state.capture(device), rng_state.capture(Device(CPU))
    before = generator.state.clone()
    del on_chip["family"], on_cpu["family"]
    generator.state += 3
    assert rng_state.restore(on_chip, device, seed=9) is None
    assert torch.equal(generator.state, before)
    assert "another device family" in rng_state.restore(on_cpu, device, seed=9)
    assert generator.state.tolist() == [9] * 16
    assert rng_state.restore(on_cpu, Device(CPU), seed=9) is None


def test_a_run_that_changes_its_family_says_so_and_goes_on(tmp_path, capsys):
    words = ("trainer.save_every=1", "trainer.validate_at_start=false", "observe.progress=plain")
    other = dataclasses.replace(CPU, name="other")
    run(tmp_path / "run", *words, "trainer.max_steps=1", backend=other)
    assert "random state" not in capsys.readouterr().out
    run(tmp_path / "run", *words, "trainer.max_steps=3")
    assert "the checkpoint's random state is of other, not of cpu" in capsys.readouterr().out
    run(tmp_path / "whole", *words, "trainer.max_steps=3")
    ours, whole = ([line for line in metrics(tmp_path / name) if "reward" in line] for name in ("run", "whole"))
    assert len(ours) == 3
    assert ours == whole, "nothing but dropout depends on it"
