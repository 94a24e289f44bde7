"""The process of a program: runs it as a script, or runs it and then calls its functions for the tests.

Nothing in here is trusted once the program has started: it may change all of this process.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.machinery
import linecache
import os
import random
import sys
import threading
import traceback
from types import ModuleType
from typing import Any, NoReturn

from hwgrpo.sandbox.plain_values import decode, encode, receive, send

NAME = "program.py"
MEMORY_CODE = 77
"""Exit code of a program that ran out of memory."""
REQUESTS, REPLIES = 3, 4
"""File descriptors of the tests' process."""
_HIDDEN: list[ModuleType] = []
MUTABLE = (list, dict, set)
SEED = 0
"""Seed of `random`, and of numpy's global generator, in each run."""


class _SeededNumpy:
    """Seeds numpy's global generator when it is imported, on the meta path."""

    @staticmethod
    def find_spec(name: str, path: Any, target: Any = None) -> Any:
        """Return the spec of `numpy.random`, whose loader seeds it; None for other modules."""
        if name != "numpy.random":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_seed(module: Any) -> None:
                load(module)
                module.seed(SEED)

            spec.loader.exec_module = load_and_seed
        return spec


def seed_generators() -> None:
    """Seed `random`, and numpy's global generator if it is imported."""
    random.seed(SEED)
    sys.meta_path.insert(0, _SeededNumpy)


def run_script(source: str) -> NoReturn:
    """Run a program as `python program.py` does, with descriptors 0, 1 and 2 as its streams, and exit."""
    _end(_execute(source, _new_module("__main__")))


def serve_functions(source: str) -> NoReturn:
    """Run a program, and then make the calls that arrive at descriptor `REQUESTS`, and exit."""
    module = _new_module("program")
    code = _execute(source, module)
    if code:
        _end(code)
    objects: list[Any] = []

    def refer(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def names() -> list[str]:
        return [name for name in vars(module) if not name.startswith("__")]

    send(REPLIES, names())
    while True:
        try:
            request = receive(REQUESTS)
        except EOFError:
            _end(0)
        try:
            reply = _serve(request, module, objects, refer)
        except MemoryError:
            _end(MEMORY_CODE)
        except BaseException as error:
            bases = [each.__name__ for each in type(error).__mro__]
            reply = {"raised": bases, "text": _text(error)}
        try:
            send(REPLIES, reply)
        except (ValueError, TypeError, RecursionError):
            send(REPLIES, {"raised": ["ValueError", "Exception"], "text": "the result cannot be sent"})


def _serve(request: Any, module: ModuleType, objects: list[Any], refer: Any) -> dict[str, Any]:
    target = objects[request["of"]] if request["of"] is not None else None
    arguments = [decode(each, objects.__getitem__) for each in request.get("arguments", ())]
    named = {name: decode(each, objects.__getitem__) for name, each in request.get("named", {}).items()}
    match request["do"]:
        case "name":
            value = getattr(module, request["name"])
        case "attribute":
            value = getattr(target, request["name"])
        case "set":
            value = setattr(target, request["name"], arguments[0])
        case "call":
            value = target(*arguments, **named)  # type: ignore[misc] - whatever the program has there
        case "iter":
            value = iter(target)  # type: ignore[arg-type]
        case "next":
            value = next(target)  # type: ignore[arg-type]
        case "len":
            value = len(target)  # type: ignore[arg-type]
        case "item":
            value = target[arguments[0]]  # type: ignore[index]
        case "text":
            value = str(target)
        case "await":
            value = importlib.import_module("asyncio").run(target)
        case "equal":
            value = bool(target == arguments[0])
        case other:
            raise ValueError(other)
    changed = [encode(each, refer) if type(each) in MUTABLE else None for each in arguments]
    return {"value": encode(value, refer), "arguments": changed}


def _new_module(name: str) -> ModuleType:
    """Replace `__main__` by an empty module of this name, and forget this package."""
    seed_generators()
    module = ModuleType(name)
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = sys.modules[name] = module
    sys.argv = [NAME]
    hidden = [sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "hwgrpo"]
    _HIDDEN.extend(hidden)  # freeing them would copy the memory that they share with the worker
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 - the program's
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1)  # noqa: SIM115
    return module


def _execute(source: str, module: ModuleType) -> int:
    """Run a program in a module; return its exit code."""
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    try:
        exec(compile(source, NAME, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except MemoryError:
        return MEMORY_CODE
    except BaseException as error:
        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace and trace.tb_next)
        return 1
    return 0


def _end(code: int) -> NoReturn:
    try:
        shutdown = getattr(threading, "_shutdown", None)
        if shutdown is not None:
            shutdown()  # threads that are no daemons end before the process does
        sys.stdout.flush()
    except MemoryError:
        code = code or MEMORY_CODE
    except BaseException:
        code = code or 1
    os._exit(code)


def _text(error: BaseException) -> str:
    try:
        return str(error)[:1000]
    except BaseException:
        return ""
