"""What is told of every implementation, and pins for the length of a block."""

import pytest
import torch
from hwgrpo_kernels import Implementation
from hwgrpo_kernels.overview import survey

from tests.kernels.registries import make

ELSEWHERE = frozenset({"meta"})


def verdicts(registry):
    (found,) = survey("cpu", torch.float32, 517, registry)
    return {each.name: (each.state, each.reason) for each in found.verdicts}, found


def test_the_chosen_one_comes_first_and_each_other_has_its_reason():
    registry = make(fast={"rank": 5}, absent={"device_types": ELSEWHERE, "rank": 9})
    told, found = verdicts(registry)
    assert list(told) == ["fast", "torch", "absent"]
    assert found.chosen == "fast"
    assert told["fast"] == ("chosen", "the first that can run")
    assert told["torch"] == ("usable", "could run, but fast comes first")
    assert told["absent"] == ("impossible", "needs meta, have cpu")
    assert found.error is None


def test_preference_pins_and_plug_ins_are_reasons():
    registry = make(other={}, theirs={"origin": "plug-in p", "rank": 9})
    registry.configure(preference=["gone", "other"])
    told, _ = verdicts(registry)
    assert told["other"] == ("chosen", "the first of the preferred that can run")
    assert told["gone"] == ("impossible", "no kernel of that name")
    assert told["theirs"] == ("usable", "from a plug-in, used only when pinned: row_stats=theirs")
    registry.configure(pins={"row_stats": "theirs"})
    told, found = verdicts(registry)
    assert told["theirs"] == ("chosen", "pinned by kernels.pins")
    assert told["other"] == ("usable", "could run, but theirs is pinned")
    assert found.chosen == "theirs"


def test_where_there_is_one_implementation_nothing_is_said_of_a_preference():
    registry = make()
    registry.configure(preference=["gone", "torch"])
    told, _ = verdicts(registry)
    assert told == {"torch": ("chosen", "the only one"), "gone": ("impossible", "no kernel of that name")}


def test_a_broken_import_is_a_reason():
    registry = make()
    registry.register(Implementation("row_stats", "broken", "no_such_module:f", rank=9))
    told, _ = verdicts(registry)
    assert told["broken"][0] == "impossible"
    assert "failed to load: No module named 'no_such_module'" in told["broken"][1]


def test_a_pin_that_cannot_run_is_told_and_the_others_are_still_judged():
    told, found = verdicts(make({"HWGRPO_KERNELS": "row_stats=absent"}, absent={"device_types": ELSEWHERE}))
    assert found.chosen is None
    assert found.error is not None
    assert "HWGRPO_KERNELS: row_stats=absent cannot run: needs meta, have cpu" in found.error
    assert told == {"torch": ("usable", "could run"), "absent": ("impossible", "needs meta, have cpu")}


def test_pins_hold_for_a_block_and_then_those_before_are_back():
    registry = make(other={}, third={})
    registry.configure(pins={"row_stats": "other"})

    def chosen():
        return registry.resolve("row_stats", "cpu", torch.float32, 517).name

    assert chosen() == "other"
    with registry.pinned({"row_stats": "third"}):
        assert chosen() == "third"
        with registry.pinned({}):
            assert chosen() == "third"
    assert chosen() == "other"
    with pytest.raises(RuntimeError), registry.pinned({"row_stats": "third"}):
        raise RuntimeError
    assert chosen() == "other"
    with pytest.raises(ValueError, match="Did you mean 'third'"), registry.pinned({"row_stats": "thrid"}):
        pass


def test_the_environment_wins_over_a_block():
    registry = make({"HWGRPO_KERNELS": "row_stats=torch"}, other={})
    with registry.pinned({"row_stats": "other"}):
        assert registry.resolve("row_stats", "cpu", torch.float32, 517).name == "torch"
