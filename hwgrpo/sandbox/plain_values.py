"""Values that the process of a program and that of its tests exchange, as JSON: data, and references to objects.

Neither pickle nor marshal: what the program's process sends cannot run code, or damage memory, in the other one.
"""

from __future__ import annotations

import importlib
import json
import os
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import CoroutineType
from typing import Any

HEADER = 8
MAX_FRAME_BYTES = 16 << 20
ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}
PAIRS: dict[str, Callable[[list[Any]], Any]] = {
    "dict": dict,
    "Counter": lambda pairs: Counter(dict(pairs)),
    "OrderedDict": OrderedDict,
    "defaultdict": lambda pairs: defaultdict(None, pairs),
}
TEXTS: dict[str, Callable[[str], Any]] = {
    "float": float,
    "complex": complex,
    "Decimal": lambda text: importlib.import_module("decimal").Decimal(text),
    "Fraction": lambda text: importlib.import_module("fractions").Fraction(text),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "int": lambda text: int(text, 16),
}


TYPES = {each.__name__: each for each in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)}


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """Return a value as JSON's types.

    Args:
        value: any object.
        refer: returns the number of an object that is no data, or raises.

    Raises:
        RecursionError: it is nested too deeply, or contains itself.
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if isinstance(value, int):
        number = int(value)
        return number if -(1 << 53) < number < 1 << 53 else ["int", hex(number)]
    if kind is list:
        return ["list", [encode(each, refer) for each in value]]
    if kind.__name__ in ITEMS and kind in (tuple, set, frozenset, deque):
        return [kind.__name__, [encode(each, refer) for each in value]]
    if kind in (dict, Counter, OrderedDict, defaultdict):
        return [kind.__name__, [[encode(key, refer), encode(item, refer)] for key, item in value.items()]]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.hex()]
    if isinstance(value, float):
        return ["float", float.__repr__(value)]
    if kind is complex or (kind.__module__, kind.__name__) in (("decimal", "Decimal"), ("fractions", "Fraction")):
        return [kind.__name__, str(value)]
    if kind is type and value in TYPES.values():
        return ["type", value.__name__]
    return ["coroutine" if kind is CoroutineType else "ref", refer(value)]


def decode(packed: Any, resolve: Callable[[Any], Any]) -> Any:
    """Invert `encode`.

    Args:
        packed: JSON's types, from a process that may have sent anything.
        resolve: returns the object of a number; that of a coroutine has a method `awaited`.

    Raises:
        ValueError: it is nothing that `encode` returns.
    """
    if packed is None or isinstance(packed, bool | int | str):
        return packed
    if not isinstance(packed, list) or len(packed) != 2 or not isinstance(packed[0], str):
        raise ValueError("no encoded value")
    kind, content = packed
    if kind in ("ref", "coroutine"):
        return resolve(content) if kind == "ref" else resolve(content).awaited()
    try:
        if kind == "type":
            return TYPES[content]
        if kind in TEXTS and isinstance(content, str):
            return TEXTS[kind](content)
        if isinstance(content, list):
            if kind in PAIRS:
                return PAIRS[kind]([(decode(key, resolve), decode(item, resolve)) for key, item in content])
            items = [decode(each, resolve) for each in content]
            return items if kind == "list" else ITEMS[kind](items)
    except (TypeError, KeyError, ArithmeticError) as error:
        raise ValueError(f"no encoded value: {error}") from error
    raise ValueError("no encoded value")


def send(descriptor: int, message: Any) -> None:
    """Write a message of JSON's types to a pipe."""
    body = json.dumps(message).encode()
    view = memoryview(len(body).to_bytes(HEADER, "big") + body)
    while view:
        view = view[os.write(descriptor, view) :]


def receive(descriptor: int) -> Any:
    """Read a message from a pipe.

    Raises:
        EOFError: the pipe ended.
        ValueError: it is no JSON, or too long.
    """
    size = int.from_bytes(_read(descriptor, HEADER), "big")
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(_read(descriptor, size))


def _read(descriptor: int, size: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < size:
        chunk = os.read(descriptor, min(size - len(chunks), 1 << 20))
        if not chunk:
            raise EOFError
        chunks += chunk
    return bytes(chunks)
