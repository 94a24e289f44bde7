"""Select the implementation of an op: once per key, cached, with the reason."""

import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from . import entry_points
from .op import BUILT_IN, Implementation, Key, Op, shape_class

PINS_VARIABLE = "HWGRPO_KERNELS"
STRICT_VARIABLE = "HWGRPO_STRICT"
ENTRY_POINT_GROUP = "hwgrpo.kernels"
NONE_OF_THAT_NAME = "no kernel of that name"


@dataclass(frozen=True)
class Choice:
    """The implementation selected for a key, the reasons for skipping others, and the calls it declined.

    `declined` maps each reason for which `name` passed a call to the next implementation to the number of such calls.
    """

    key: Key
    name: str
    function: Callable[..., Any]
    skipped: tuple[tuple[str, str], ...] = ()
    pinned_by: str | None = None
    declined: dict[str, int] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """Return a readable line: `row_stats -> torch (triton: needs cuda, have cpu)`."""
        notes = [f"pinned by {self.pinned_by}"] if self.pinned_by else []
        notes += [f"{name}: {reason}" for name, reason in self.skipped]
        notes += [f"declined {calls} calls: {reason}" for reason, calls in self.declined.items()]
        return f"{self.key.op} -> {self.name}" + (f" ({'; '.join(notes)})" if notes else "")

    def as_json(self) -> dict[str, Any]:
        """Return the choice as plain values."""
        return {
            "op": self.key.op,
            "device_type": self.key.device_type,
            "dtype": str(self.key.dtype).removeprefix("torch."),
            "shape_class": self.key.shape_class,
            "implementation": self.name,
            "pinned_by": self.pinned_by,
            "skipped": dict(self.skipped),
            "declined": dict(self.declined),
            "line": self.line,
        }


@dataclass(frozen=True)
class Plugin:
    """An entry point of the group `hwgrpo.kernels`: its implementations, or the error of loading it.

    A distribution whose list of entry points is unreadable counts as a failed one, by the distribution's name.
    """

    name: str
    value: str
    implementations: tuple[str, ...] = ()
    error: str | None = None


def _unknown(kind: str, value: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(value, names, n=1, cutoff=0.6)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{kind} {value!r} is not known; choose one of: {', '.join(names)}.{hint}"


def parse_pins(text: str) -> dict[str, str]:
    """Read `op=implementation,op=implementation`.

    Raises:
        ValueError: an item has no `=` or an empty side.
    """
    pins = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        op, equals, name = (each.strip() for each in item.partition("="))
        if not (op and equals and name):
            raise ValueError(f"{PINS_VARIABLE}: {item!r} must have the form op=implementation, e.g. row_stats=torch")
        pins[op] = name
    return pins


class KernelRegistry:
    """Ops, their implementations, and the selections so far.

    Args:
        environment: variables with the pins and the strict switch; None: `os.environ`.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = os.environ if environment is None else environment
        self._ops: dict[str, Op] = {}
        self._implementations: dict[str, dict[str, Implementation]] = {}
        self._selected: dict[tuple[Key, tuple[str, ...]], Choice] = {}
        self._plugins: list[Plugin] | None = None
        self._pins: dict[str, str] = {}
        self._preference: tuple[str, ...] = ()
        self._strict: bool | None = None

    def declare(self, op: Op) -> Op:
        """Add an op."""
        assert op.name not in self._ops, f"op {op.name!r} is declared twice"
        self._ops[op.name] = op
        self._implementations[op.name] = {}
        return op

    def register(self, implementation: Implementation) -> Implementation:
        """Add an implementation of a declared op.

        Raises:
            ValueError: the op is unknown, or has an implementation of this name.
        """
        self._check_op(implementation.op, "kernel op")
        table = self._implementations[implementation.op]
        if implementation.name in table:
            raise ValueError(f"kernel {implementation.op}={implementation.name!r} is already registered")
        table[implementation.name] = implementation
        self._selected.clear()
        return implementation

    def ops(self) -> tuple[Op, ...]:
        """Return the declared ops."""
        return tuple(self._ops.values())

    def implementations(self, op: str) -> tuple[Implementation, ...]:
        """Return the implementations of an op, highest rank first.

        Raises:
            ValueError: the op is unknown.
        """
        self._check_op(op, "kernel op")
        self.plugins()
        return tuple(sorted(self._implementations[op].values(), key=lambda each: -each.rank))

    def configure(
        self,
        *,
        pins: Mapping[str, str] | None = None,
        preference: Sequence[str] | None = None,
        strict: bool | None = None,
    ) -> None:
        """Set how implementations are selected; None keeps a setting. Clears earlier selections.

        Args:
            pins: op -> implementation that must run. Pins in HWGRPO_KERNELS take precedence.
            preference: names of implementations, best first, for every op that has them. Unregistered names are skipped
                with a reason, since a backend may prefer an implementation that is not installed.
            strict: raise instead of falling back from a preferred implementation; as HWGRPO_STRICT=1.

        Raises:
            ValueError: a pin names an unknown op or implementation.
        """
        if pins is not None:
            for op, name in pins.items():
                self._check_pin(op, name, "kernels.pins")
            self._pins = dict(pins)
        if isinstance(preference, str):
            raise ValueError(f"preference={preference!r} must be a list of names, as in [{preference!r}]")
        if preference is not None:
            self._preference = tuple(preference)
        if strict is not None:
            self._strict = strict
        self._selected.clear()

    @contextmanager
    def pinned(self, pins: Mapping[str, str]) -> Iterator[None]:
        """Add pins within a block; pins in HWGRPO_KERNELS take precedence.

        Raises:
            ValueError: a pin names an unknown op or implementation.
        """
        before = self._pins
        self.configure(pins={**before, **pins})
        try:
            yield
        finally:
            self._pins = before
            self._selected.clear()

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Leave the selections of a block out of `choices`, as those of a check before the first step."""
        before = dict(self._selected)
        try:
            yield
        finally:
            self._selected = before

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore pins, preference and strictness after a block."""
        before = self._pins, self._preference, self._strict
        try:
            yield
        finally:
            self._pins, self._preference, self._strict = before
            self._selected.clear()

    def resolve(
        self,
        op: str,
        device_type: str,
        dtype: torch.dtype,
        vocab: int,
        preference: Sequence[str] | None = None,
    ) -> Choice:
        """Select the implementation of `op` for tensors of this kind, and cache it.

        Args:
            device_type: torch device type ("cpu").
            dtype: of the logits (row ops, `token_logprob`) or of the hidden states (`linear_logprob`).
            vocab: V; only its shape class matters.
            preference: overrides the configured preference for this call.

        Raises:
            ValueError: the op is unknown, the pinned implementation is unknown or cannot run, strict forbids a
                fallback, or no implementation can run.
        """
        key = Key(op, device_type, dtype, shape_class(vocab))
        wanted = self._preference if preference is None else tuple(preference)
        choice = self._selected.get((key, wanted))
        if choice is None:
            choice = self._selected[key, wanted] = self._select(key, wanted)
        return choice

    def choices(self) -> dict[str, Any]:
        """Return settings, selections so far and plug-ins as plain values, for a run's kernels.json."""
        return {
            "schema": "hwgrpo.kernels/1",
            "pins": {op: name for op, (name, _) in self._all_pins().items()},
            "preference": list(self._preference),
            "strict": self._is_strict(),
            "choices": [choice.as_json() for choice in self._selected.values()],
            "plugins": [vars(plugin) | {"implementations": list(plugin.implementations)} for plugin in self.plugins()],
        }

    def explain(self) -> list[str]:
        """Return one line per selection so far, then one per failed plug-in."""
        failed = [f"plug-in {each.name} failed: {each.error}" for each in self.plugins() if each.error]
        return list(dict.fromkeys(choice.line for choice in self._selected.values())) + failed

    def plugins(self) -> list[Plugin]:
        """Load the entry points of `hwgrpo.kernels` on first use; return the result of each."""
        if self._plugins is None:
            points, damaged = entry_points.find(ENTRY_POINT_GROUP)
            self._plugins = [Plugin(name, "entry_points.txt", error=error) for name, error in damaged.items()]
            for point in points:
                self._plugins.append(self._load_plugin(point))
        return self._plugins

    def _load_plugin(self, point: Any) -> Plugin:
        names: list[str] = []
        try:
            loaded = point.load()
            for each in [loaded] if isinstance(loaded, Implementation) else loaded:
                _check_implementation(each)
                self.register(replace(each, origin=f"plug-in {point.name}"))
                names.append(f"{each.op}={each.name}")
        except (Exception, SystemExit) as error:  # a third-party package: shown in explain(), never fatal
            return Plugin(point.name, point.value, tuple(names), f"{type(error).__name__}: {error}")
        return Plugin(point.name, point.value, tuple(names))

    def _select(self, key: Key, preference: tuple[str, ...]) -> Choice:
        table = {each.name: each for each in self.implementations(key.op)}
        pin = self._all_pins().get(key.op)
        if pin is not None:
            return self._select_pinned(key, *pin)
        order = preference + tuple(n for n, each in table.items() if n not in preference and each.origin == BUILT_IN)
        return self._first_of(order, key, table, preference)

    def _first_of(
        self, order: tuple[str, ...], key: Key, table: Mapping[str, Implementation], preference: tuple[str, ...]
    ) -> Choice:
        skipped: list[tuple[str, str]] = []
        for position, name in enumerate(order, 1):
            if name not in table:
                skipped.append((name, NONE_OF_THAT_NAME))
                continue
            reason, function = _load(table[name], key)
            if function is not None:
                # Strict covers implementations for this device, and those preferred by name.
                relevant = [n for n, each in table.items() if n in preference or each.is_for(key.device_type)]
                missed = [f"{n}: {reason}" for n, reason in skipped if n in relevant]
                if missed and self._is_strict():
                    raise ValueError(
                        f"kernel {key.op} would fall back to {name!r} ({'; '.join(missed)}), but strict forbids that; "
                        f"install the missing package, or unset {STRICT_VARIABLE} / kernels.strict"
                    )
                choice = Choice(key, name, function, tuple(skipped))
                declines = table[name].declines
                if declines is None:
                    return choice
                following = partial(self._first_of, order[position:], key, table, preference)
                return replace(choice, function=_call_or_fall_back(choice, declines, following))
            skipped.append((name, str(reason)))
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped) or "none is registered"
        raise ValueError(
            f"no implementation of kernel {key.op} can run on {key.device_type} in {key.dtype} ({reasons})"
        )

    def _select_pinned(self, key: Key, name: str, source: str) -> Choice:
        self._check_pin(key.op, name, source)
        reason, function = _load(self._implementations[key.op][name], key)
        if function is None:
            runnable = [n for n, each in self._implementations[key.op].items() if each.reason_against(key) is None]
            raise ValueError(
                f"{source}: {key.op}={name} cannot run: {reason}. Remove the pin, or pin one that can: "
                f"{', '.join(sorted(runnable)) or 'none can'}"
            )
        choice = Choice(key, name, function, pinned_by=source)
        declines = self._implementations[key.op][name].declines
        if declines is None:
            return choice

        def refuse() -> Choice:
            raise ValueError(
                f"{source}: {key.op}={name} declines this call: {next(reversed(choice.declined))}. Remove the pin, "
                "so that such calls fall back to the next implementation"
            )

        return replace(choice, function=_call_or_fall_back(choice, declines, refuse))

    def _all_pins(self) -> dict[str, tuple[str, str]]:
        pins = {op: (name, "kernels.pins") for op, name in self._pins.items()}
        for op, name in parse_pins(self._environment.get(PINS_VARIABLE, "")).items():
            self._check_pin(op, name, PINS_VARIABLE)
            pins[op] = (name, PINS_VARIABLE)
        return pins

    def _is_strict(self) -> bool:
        return bool(self._strict) or self._environment.get(STRICT_VARIABLE, "") == "1"

    def _check_op(self, op: str, source: str) -> None:
        if op not in self._ops:
            raise ValueError(_unknown(source, op, self._ops))

    def _check_pin(self, op: str, name: str, source: str) -> None:
        self._check_op(op, f"{source}: kernel op")
        known = [each.name for each in self.implementations(op)]
        if name not in known:
            raise ValueError(_unknown(f"{source}: implementation of {op}", name, known))


def _load(implementation: Implementation, key: Key) -> tuple[str | None, Callable[..., Any] | None]:
    reason = implementation.reason_against(key)
    if reason is not None:
        return reason, None
    try:
        return None, implementation.function()
    except ImportError as error:  # installed but broken: fall back to the next implementation
        return f"failed to load: {error}", None
    except Exception as error:
        if implementation.origin == BUILT_IN:
            raise
        return f"failed to load: {type(error).__name__}: {error}", None


def _check_implementation(value: Any) -> None:
    """Raise TypeError unless a plug-in's value is a valid `Implementation`."""
    if not isinstance(value, Implementation):
        raise TypeError(f"it registers a {type(value).__name__}, not an Implementation")
    if not (isinstance(value.op, str) and isinstance(value.name, str) and isinstance(value.rank, int)):
        raise TypeError(f"op and name must be strings and rank an integer: {value!r}")


def _call_or_fall_back(
    choice: Choice, declines: Callable[..., str | None], following: Callable[[], Choice]
) -> Callable[..., Any]:
    """Return a function that calls the selected implementation, or the following one if it declines; see `Choice`.

    Strict does not apply to such calls: no installation would change them.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        reason = declines(*args, **kwargs)
        if reason is None:
            return choice.function(*args, **kwargs)
        choice.declined[reason] = choice.declined.pop(reason, 0) + 1  # the latest comes last
        return following().function(*args, **kwargs)

    return call


default_registry = KernelRegistry()
configure = default_registry.configure
resolve = default_registry.resolve
choices = default_registry.choices
explain = default_registry.explain
