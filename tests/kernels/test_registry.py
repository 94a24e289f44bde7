"""How an implementation is chosen, explained, pinned and refused."""

import json
from functools import partial
from types import SimpleNamespace

import hwgrpo_kernels
import pytest
import torch
from hwgrpo_kernels import Implementation, KernelRegistry, default_registry
from hwgrpo_kernels.entry_points import EntryPointScan
from hwgrpo_kernels.registry import parse_pins

from tests.kernels.registries import make

ACCELERATED = {"device_types": frozenset({"cuda"}), "rank": 10}  # hw: an implementation's device type


def choose(registry, **arguments):
    return registry.resolve("row_stats", "cpu", torch.float32, 517, **arguments)


def test_what_cannot_run_is_passed_over_and_explained():
    registry = make(triton=ACCELERATED)
    choice = choose(registry)
    assert choice.name == "torch"
    assert choice.function() == "torch"
    assert choice.line == "row_stats -> torch (triton: needs cuda, have cpu)"  # hw: an implementation's device type
    assert registry.explain() == [choice.line]


def test_highest_rank_that_can_run_wins_and_the_choice_is_cached():
    loads = []
    registry = make(fast={"rank": 5})
    registry.register(Implementation("row_stats", "faster", lambda: loads.append(1) or len, rank=9))
    assert choose(registry).name == "faster"
    assert choose(registry) is choose(registry)
    assert loads == [1]


def test_shape_class_is_all_that_a_choice_knows_of_the_vocabulary():
    registry = make(narrow={"rank": 1, "supports": lambda k: None if k.shape_class <= 512 else "V is over 512"})
    assert registry.resolve("row_stats", "cpu", torch.float32, 500).name == "narrow"
    wide = registry.resolve("row_stats", "cpu", torch.float32, 517)
    assert (wide.name, wide.key.shape_class) == ("torch", 1024)
    assert wide.line == "row_stats -> torch (narrow: V is over 512)"


def test_preference_orders_and_unknown_names_in_it_are_shown():
    registry = make(other={})
    registry.configure(preference=["npu_ops", "other", "torch"])
    assert choose(registry).line == "row_stats -> other (npu_ops: no kernel of that name)"
    assert choose(registry, preference=["torch"]).name == "torch"
    with pytest.raises(ValueError, match="must be a list of names"):
        registry.configure(preference="torch")


def test_missing_module_is_a_reason():
    registry = make(liger={"rank": 1, "requires": ("no_such_module",)})
    assert choose(registry).line == "row_stats -> torch (liger: needs module 'no_such_module', which is not installed)"


def test_implementation_that_fails_to_import_is_passed_over():
    registry = make()
    registry.register(Implementation("row_stats", "broken", "hwgrpo_kernels.nothing:here", rank=1))
    choice = choose(registry)
    assert choice.name == "torch"
    assert "broken: failed to load: No module named 'hwgrpo_kernels.nothing'" in choice.line


def test_a_verifier_that_raises_is_a_bug_and_not_a_reason():
    def broken(key):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        choose(make(buggy={"rank": 1, "supports": broken}))


def test_pins_from_the_environment_and_from_code():
    assert choose(make({"HWGRPO_KERNELS": "row_stats=torch"}, fast={"rank": 5})).line == (
        "row_stats -> torch (pinned by HWGRPO_KERNELS)"
    )
    registry = make({}, fast={"rank": 5})
    assert choose(registry).name == "fast"
    registry.configure(pins={"row_stats": "torch"})
    assert choose(registry).name == "torch"
    both = make({"HWGRPO_KERNELS": "row_stats=fast"}, fast={"rank": 5})
    both.configure(pins={"row_stats": "torch"})
    assert choose(both).name == "fast"


def test_pinned_implementation_that_cannot_run_is_an_error_with_reason_and_remedy():
    registry = make({"HWGRPO_KERNELS": "row_stats=triton"}, triton=ACCELERATED)
    wanted = "HWGRPO_KERNELS: row_stats=triton cannot run: needs .*have cpu. Remove the pin, or pin .*: torch"
    with pytest.raises(ValueError, match=wanted):
        choose(registry)


@pytest.mark.parametrize(
    "pins,message",
    [
        ("row_stat=torch", "HWGRPO_KERNELS: kernel op 'row_stat' is not known.*Did you mean 'row_stats'"),
        ("row_stats=troch", "implementation of row_stats 'troch' is not known.*Did you mean 'torch'"),
        ("row_stats", "must have the form op=implementation"),
    ],
)
def test_wrong_pins_are_refused_with_the_nearest_right_word(pins, message):
    with pytest.raises(ValueError, match=message):
        choose(make({"HWGRPO_KERNELS": pins}))


def test_configure_refuses_unknown_names_at_once():
    with pytest.raises(ValueError, match=r"kernels.pins: kernel op 'rowstats' is not known.*Did you mean 'row_stats'"):
        make().configure(pins={"rowstats": "torch"})


def test_unknown_op_is_refused_with_the_nearest_right_word():
    with pytest.raises(ValueError, match="Did you mean 'row_stats'"):
        make().resolve("row_stat", "cpu", torch.float32, 10)


def test_pins_are_read_with_spaces_and_empty_items():
    assert parse_pins(" row_stats = torch ,,row_grad=torch,") == {"row_stats": "torch", "row_grad": "torch"}


UNFIT = {"supports": lambda key: "V is too large", "rank": 10}


def test_strict_forbids_falling_back():
    registry = make(fast=UNFIT)
    registry.configure(strict=True)
    with pytest.raises(ValueError, match=r"row_stats would fall back to 'torch' .*but strict forbids that"):
        choose(registry)
    assert choose(make({"HWGRPO_STRICT": "1"})).name == "torch"
    with pytest.raises(ValueError, match="strict forbids"):
        choose(make({"HWGRPO_STRICT": "1"}, fast=UNFIT))


def test_strict_minds_an_implementation_for_another_device_only_where_it_was_asked_for():
    registry = make({"HWGRPO_STRICT": "1"}, triton=ACCELERATED)
    assert choose(registry).name == "torch"
    with pytest.raises(ValueError, match=r"would fall back to 'torch' \(triton: needs .* have cpu\)"):
        choose(registry, preference=["triton", "torch"])


def test_nothing_that_can_run_says_why():
    registry = KernelRegistry({})
    registry.declare(next(op for op in default_registry.ops() if op.name == "row_stats"))
    with pytest.raises(ValueError, match=r"no implementation of kernel row_stats can run on cpu .*none is registered"):
        choose(registry)


def test_a_registered_name_is_refused():
    with pytest.raises(ValueError, match="already registered"):
        make().register(Implementation("row_stats", "torch", lambda: len))


def entry_point(name, load):
    return SimpleNamespace(name=name, value=f"package:{name}", load=load)


def fail():
    raise OSError("its library is missing")


def test_plugins_are_taken_only_when_named_and_their_failures_shown(monkeypatch):
    theirs = Implementation("row_stats", "theirs", lambda: lambda: "theirs", rank=99)
    points = [entry_point("good", lambda: [theirs]), entry_point("bad", fail)]
    damaged = {"torn": "its entry_points.txt cannot be read"}
    monkeypatch.setattr(
        "hwgrpo_kernels.entry_points.find", {"hwgrpo.kernels": EntryPointScan(tuple(points), damaged)}.get
    )
    registry = make()
    assert choose(registry).name == "torch"
    registry.configure(preference=["theirs"])
    assert choose(registry).name == "theirs"
    assert registry.explain() == [
        "row_stats -> theirs",
        "plug-in torn failed: its entry_points.txt cannot be read",
        "plug-in bad failed: OSError: its library is missing",
    ]
    errors = {each["name"]: each["error"] for each in registry.choices()["plugins"]}
    assert errors == {**damaged, "good": None, "bad": "OSError: its library is missing"}


def test_choices_are_plain_values_for_a_file():
    registry = make({"HWGRPO_KERNELS": "row_stats=torch"})
    choose(registry)
    told = json.loads(json.dumps(registry.choices()))
    assert told["schema"] == "hwgrpo.kernels/1"
    assert told["pins"] == {"row_stats": "torch"}
    assert told["choices"][0]["implementation"] == "torch"
    assert told["choices"][0]["dtype"] == "float32"
    assert told["choices"][0]["shape_class"] == 1024


def test_every_op_runs_on_the_cpu_with_what_is_built_in():
    for op in default_registry.ops():
        assert hwgrpo_kernels.resolve(op.name, "cpu", torch.float32, 517, preference=["torch"]).name == "torch"


def test_pins_reach_the_ops(monkeypatch):
    calls = []

    def load():
        from hwgrpo_kernels.rows_torch import row_stats

        def counted(*arguments):
            calls.append(1)
            return row_stats(*arguments)

        return counted

    default_registry.register(Implementation("row_stats", "counted", load, rank=-1))
    monkeypatch.setenv("HWGRPO_KERNELS", "row_stats=counted")
    hwgrpo_kernels.configure()
    try:
        hwgrpo_kernels.linear_logprob(torch.randn(7, 4), torch.randn(9, 4), torch.zeros(7, dtype=torch.long))
    finally:
        monkeypatch.delenv("HWGRPO_KERNELS")
        del default_registry._implementations["row_stats"]["counted"]
        hwgrpo_kernels.configure()
    assert calls == [1]


def picky():
    """Return a registry whose first implementation leaves calls with an odd number to the next."""

    def declines(number):
        return "the number is odd" if number % 2 else None

    registry = make()
    for name, rank, limit in (("even", 9, declines), ("any", 5, None)):
        function = partial(lambda name, number: (name, number), name)
        registry.register(Implementation("row_stats", name, lambda f=function: f, rank=rank, declines=limit))
    return registry


def test_a_call_that_is_declined_goes_to_the_next_implementation_and_the_reason_is_kept():
    registry = picky()
    choice = choose(registry)
    assert [choice.function(2), choice.function(3), choice.function(number=5)] == [("even", 2), ("any", 3), ("any", 5)]
    assert choose(registry) is choice
    assert choice.declined == {"the number is odd": 2}
    assert choice.line == "row_stats -> even (declined 2 calls: the number is odd)"
    [told] = json.loads(json.dumps(registry.choices()))["choices"]
    assert told["declined"] == {"the number is odd": 2}


def test_strict_has_nothing_against_a_declined_call():
    registry = picky()
    registry.configure(strict=True)
    assert choose(registry).function(3) == ("any", 3)


def test_a_pinned_implementation_that_declines_a_call_is_an_error_with_the_reason():
    registry = picky()
    registry.configure(pins={"row_stats": "even"})
    assert choose(registry).function(2) == ("even", 2)
    with pytest.raises(ValueError, match="row_stats=even declines this call: the number is odd"):
        choose(registry).function(3)
