"""The module `pytest` of the tests' process: what tests of functions use of it, without pytest itself."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

__all__ = ("approx", "fail", "fixture", "importorskip", "main", "mark", "param", "raises", "skip", "xfail")
MARKS = "pytestmark"
"""Attribute of functions, classes and modules with their marks, as pytest has it."""
RELATIVE, ABSOLUTE = 1e-6, 1e-12
"""Tolerances of `approx`, pytest's."""


class Skipped(Exception):
    """A test ends as neither passed nor failed."""


def skip(reason: str = "", **_: Any) -> None:
    """End the test as skipped."""
    raise Skipped(reason)


def xfail(reason: str = "") -> None:
    """End the test as expected to fail, which is no more than skipped."""
    raise Skipped(reason)


def fail(reason: str = "", pytrace: bool = True) -> None:
    """Fail the test."""
    raise AssertionError(reason)


def importorskip(name: str, *_: Any, **__: Any) -> ModuleType:
    """Import a module, or skip the test."""
    try:
        return __import__(name, fromlist=["*"])
    except ImportError as error:
        raise Skipped(str(error)) from error


def main(*_: Any, **__: Any) -> int:
    """Do nothing: the tests are run one by one."""
    return 0


@dataclass(frozen=True)
class Mark:
    """A decorator `pytest.mark.name(...)`."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]) and not self.args:
            setattr(args[0], MARKS, [*marks_of(args[0]), self])
            return args[0]
        if self.args or self.kwargs:
            raise TypeError(f"pytest.mark.{self.name} is called twice")
        return _Decorator(self.name, args, kwargs)


class _Decorator(Mark):
    """A mark with its arguments."""

    def __call__(self, target: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        setattr(target, MARKS, [*marks_of(target), self])
        return target


class _Marks:
    """`pytest.mark`; of marks with other names the tests are run as without."""

    def __getattr__(self, name: str) -> Mark:
        return Mark(name)


mark = _Marks()


@dataclass(frozen=True)
class Param:
    """A case of `parametrize` with marks."""

    values: tuple[Any, ...]
    marks: tuple[Mark, ...]


def param(*values: Any, marks: Any = (), id: Any = None) -> Param:
    """Return a case of `parametrize`."""
    return Param(values, tuple(marks) if isinstance(marks, Sequence) else (marks,))


def marks_of(target: Any) -> list[Mark]:
    """Return the marks of a function, class or module, in the order in which they were applied."""
    found = getattr(target, "__dict__", {}).get(MARKS, [])
    return list(found) if isinstance(found, list | tuple) else [found]


def require_wanted(marks: Iterable[Mark]) -> None:
    """Raise `Skipped` where a mark says so."""
    for each in marks:
        if each.name in ("skip", "xfail") or (each.name == "skipif" and any(each.args[:1])):
            raise Skipped(str(each.kwargs.get("reason", each.name)))


def cases(marks: Sequence[Mark]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each case of all `parametrize`."""
    axes = []
    for each in marks:
        if each.name != "parametrize":
            continue
        names = each.args[0] if each.args else each.kwargs["argnames"]
        values = each.args[1] if len(each.args) > 1 else each.kwargs["argvalues"]
        listed = names.replace(",", " ").split() if isinstance(names, str) else list(names)
        axes.append(list(_axis(listed, values, bare=isinstance(names, str) and len(listed) == 1)))
    for chosen in itertools.product(*axes):
        yield {name: value for one in chosen for name, value in one.items()}


def _axis(names: Sequence[str], values: Iterable[Any], bare: bool) -> Iterator[dict[str, Any]]:
    for each in values:
        marked = isinstance(each, Param)
        if marked and any(
            one.name in ("skip", "xfail") or (one.name == "skipif" and one.args[0]) for one in each.marks
        ):
            continue
        given = each.values if marked else (each,) if bare else tuple(each)
        if len(given) != len(names):
            raise TypeError(f"parametrize names {len(names)} arguments, and a case has {len(given)}")
        yield dict(zip(names, given, strict=True))


@dataclass(frozen=True)
class Fixture:
    """A function with `@pytest.fixture`."""

    function: Callable[..., Any]
    name: str
    scope: str
    autouse: bool


def fixture(
    function: Callable[..., Any] | None = None,
    *,
    scope: str = "function",
    autouse: bool = False,
    name: str | None = None,
    ids: Any = None,
) -> Any:
    """Make a function a fixture."""
    if function is None:
        return lambda decorated: fixture(decorated, scope=scope, autouse=autouse, name=name)
    return Fixture(function, name or function.__name__, scope, autouse)


@dataclass
class _Caught:
    """The exception that `raises` caught."""

    value: Any = None

    @property
    def type(self) -> Any:
        return type(self.value)

    def match(self, pattern: str) -> bool:
        assert re.search(pattern, str(self.value)), f"{pattern!r} is not in {str(self.value)!r}"
        return True


class _Raises:
    def __init__(self, expected: Any, match: str | None, check: Callable[[Any], bool] | None) -> None:
        self._expected, self._match, self._check, self._caught = expected, match, check, _Caught()

    def __enter__(self) -> _Caught:
        return self._caught

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        assert error is not None, f"did not raise {self._expected}"
        if not isinstance(error, self._expected):
            return False
        self._caught.value = error
        if self._match is not None:
            self._caught.match(self._match)
        assert self._check is None or self._check(error), f"{error!r} is another one"
        return True


def raises(expected: Any, *call: Any, match: str | None = None, check: Any = None, **named: Any) -> Any:
    """Fail unless a block or a call raises an exception of a class, or of one of several."""
    block = _Raises(expected, match, check)
    if not call:
        return block
    with block as caught:
        call[0](*call[1:], **named)
    return caught


class approx:
    """A number, or a sequence or mapping of numbers, that equals another one but for a tolerance."""

    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> None:
        self._expected, self._rel, self._abs, self._nan_ok = expected, rel, abs, nan_ok

    def __eq__(self, actual: object) -> bool:
        return self._same(actual, self._expected)

    def __repr__(self) -> str:
        return f"approx({self._expected!r})"

    def _same(self, actual: Any, expected: Any) -> bool:
        if isinstance(expected, Mapping):
            keyed = isinstance(actual, Mapping) and actual.keys() == expected.keys()
            return keyed and all(self._same(actual[key], each) for key, each in expected.items())
        if isinstance(expected, list | tuple):
            listed = isinstance(actual, list | tuple) and len(actual) == len(expected)
            return listed and all(map(self._same, actual, expected))
        if isinstance(expected, bool) or not hasattr(expected, "__abs__") or not hasattr(actual, "__abs__"):
            return bool(actual == expected)
        if actual == expected:
            return True
        if expected != expected:
            return self._nan_ok and actual != actual
        size = abs(expected)
        if isinstance(expected, float) and math.isinf(expected):
            return False
        most = ABSOLUTE if self._abs is None else self._abs
        if self._rel is not None or self._abs is None:
            most = max(most, (RELATIVE if self._rel is None else self._rel) * float(size))
        return bool(abs(actual - expected) <= most)
