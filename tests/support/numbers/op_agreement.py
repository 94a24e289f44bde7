"""What tests hold ops to, generated from their declarations; the comparison itself is a vendor's, too."""

from collections.abc import Iterator
from typing import Any

import pytest
from hwgrpo_kernels import Key, default_registry
from hwgrpo_kernels.op import shape_class
from hwgrpo_kernels.testing import DTYPES, as_outputs, assert_agrees, cases, in_fp64

__all__ = ["DTYPES", "as_outputs", "assert_agrees", "in_fp64", "runnable"]


def runnable(device_type: str) -> Iterator[Any]:
    """Yield op, implementation, dtype, case and shape for all that this machine can run on a type of device."""
    for op in default_registry.ops():
        for implementation in default_registry.implementations(op.name):
            for dtype in DTYPES:
                key = Key(op.name, device_type, dtype, shape_class(op.shapes[0].V))
                if implementation.reason_against(key) is None:
                    for case, shape in cases(op, dtype):
                        tag = f"{op.name}-{implementation.name}-{str(dtype)[6:]}-{case}-{'x'.join(map(str, shape))}"
                        yield pytest.param(op, implementation, dtype, case, shape, id=tag)
