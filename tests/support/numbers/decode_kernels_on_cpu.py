"""The kernels of a decode step selected on the CPU, where the lean step has torch's operations."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hwgrpo_kernels import Implementation, decode_definitions, default_registry

OPS = ("decode_attention", "swiglu")
DEFINITIONS: Mapping[str, Callable[..., Any]] = {op: getattr(decode_definitions, op) for op in OPS}


@contextmanager
def selected(functions: Mapping[str, Callable[..., Any]] = DEFINITIONS) -> Iterator[dict[str, int]]:
    """Let the registry select functions for the ops of a decode step within the block; yield their calls by op."""
    calls = dict.fromkeys(functions, 0)

    def counted(op: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[op] += 1
            return functions[op](*args, **kwargs)

        return call

    for op in functions:
        default_registry.register(Implementation(op, "for the test", lambda op=op: counted(op)))
    try:
        with default_registry.pinned(dict.fromkeys(functions, "for the test")):
            yield calls
    finally:
        for op in functions:
            del default_registry._implementations[op]["for the test"]
