"""verl's DataProto in a file, as `gen_batch.dp` of its rollout skip has it, read without running code.

A pickle calls what it names. This one may name arrays of numpy and verl's class, and each name stands for a class that
records its arguments; all else is refused. Arrays of numbers and texts are then made from their bytes, and those of
objects from their lists, so that no byte of the file becomes an address. The state of verl's class has the tensors as a
file of `torch.save`, which torch reads by its own list of names, and a TensorDict in it as one tensor of bytes with a
table.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from hwgrpo.errors import DataError, quoted

REMEDY = "give gen_batch.dp as verl's skip.rollout writes it, or copy it again"
DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}
"""Dtypes of tensors that are read."""
CONSOLIDATED = "tensordict._reductions._rebuild_tensordict_files_consolidated"
"""What a saved TensorDict names, called with the table and the bytes."""


@dataclass(frozen=True)
class DataProto:
    """The content of a file."""

    tensors: Mapping[str, torch.Tensor]
    columns: Mapping[str, list[Any]]
    """Further values per row."""
    meta: Mapping[str, Any]


class _Inert:
    """Record the arguments and the state that a pickle has for a class or a function, and do nothing.

    With `__setstate__`, a state never sets an attribute, neither of an instance nor of the class.
    """

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _DataProto(_Inert):
    """verl's class. State: (tensors as bytes, columns, meta)."""


class _Dtype(_Inert):
    """A dtype. Arguments: kind with size, such as "f8", and flags. State: (version, byte order, ...)."""


class _ArrayClass(_Inert):
    """numpy's class of arrays, an argument of `_Array`."""


class _Array(_Inert):
    """An array. State: (version, shape, dtype, whether in Fortran's order, bytes or a list of objects)."""


class _Buffer(_Inert):
    """An array of pickle protocol 5. Arguments: (bytes, dtype, shape, "C" or "F")."""


class _Scalar(_Inert):
    """A number or a text of numpy. Arguments: (dtype, bytes)."""


_OF_NUMPY = {"multiarray._reconstruct": _Array, "multiarray.scalar": _Scalar, "numeric._frombuffer": _Buffer}
ALLOWED: Mapping[str, type[_Inert]] = {
    "verl.protocol.DataProto": _DataProto,
    "numpy.ndarray": _ArrayClass,
    "numpy.dtype": _Dtype,
    **{
        f"numpy.{core}.{name}": inert
        for core in ("core", "_core")  # before numpy 2, and since
        for name, inert in _OF_NUMPY.items()
    },
}
"""Names that a pickle may have, and what stands for them: never a class or a function of numpy itself."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {full}, which is not called: a pickle of verl has arrays alone")
        return ALLOWED[full]


def read_data_proto(path: Path) -> DataProto:
    """Read a file that verl's `DataProto.save_to_disk` wrote.

    Raises:
        DataError: it is no such file, or names anything else.
    """
    try:
        with path.open("rb") as file:
            found = _Reader(file).load()
        if isinstance(found, _DataProto):
            batch, columns, meta = found.state
            plain = _Plain()
            by_name = {name: plain.column(name, values) for name, values in columns.items()}
            return DataProto(_tensors(batch), by_name, dict(plain.of(meta)))
    except (pickle.UnpicklingError, EOFError, OSError, ArithmeticError, MemoryError) as error:
        raise DataError(f"{path} is not read: {_reason(error)}; {REMEDY}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise DataError(f"{path} is damaged, or of another version of verl: {_reason(error)}; {REMEDY}") from error
    raise DataError(f"{path} is a pickle, and no DataProto of verl; {REMEDY}")


class _Plain:
    """Values of a pickle with Python's numbers, texts and lists in place of numpy's scalars and arrays."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        """id of a value -> what it became: a value with many references is converted once."""

    def of(self, value: Any) -> Any:
        """Return a value, converted.

        Raises:
            pickle.UnpicklingError: an array is of another kind, or its shape is not that of its data.
        """
        if id(value) not in self._made:
            self._made[id(value)] = self._converted(value)
        return self._made[id(value)]

    def column(self, name: Any, values: Any) -> list[Any]:
        """Return the values of a column, one per row."""
        found = self.of(values)
        if not isinstance(name, str) or not isinstance(found, list):
            raise pickle.UnpicklingError(f"its column {quoted(name)} is no array with a value per row")
        return found

    def _converted(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self.of(key): self.of(each) for key, each in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return type(value)(self.of(each) for each in value)
        if isinstance(value, _Array):
            _, shape, dtype, fortran, data = value.state
            return self._array(data, dtype, shape, "F" if fortran else "C")
        if isinstance(value, _Buffer):
            return self._array(*value.arguments)
        if isinstance(value, _Scalar):
            dtype, data = value.arguments
            return self._array(data, dtype, (), "C")
        if isinstance(value, _Inert | type):
            name = next(name for name, inert in ALLOWED.items() if inert in (value, type(value)))
            raise pickle.UnpicklingError(f"it has {name} as a value")
        return value

    def _array(self, data: Any, dtype: Any, shape: Any, order: Any) -> Any:
        """Return the values of an array as lists in lists."""
        name = dtype.arguments[0] if isinstance(dtype, _Dtype) and dtype.arguments else dtype
        if not isinstance(name, str) or not re.fullmatch(r"O8?|[biufcSU][1-9][0-9]{0,8}", name):
            raise pickle.UnpicklingError(f"it has an array of dtype {quoted(name)}; numbers, texts and lists are read")
        if not isinstance(shape, tuple) or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise pickle.UnpicklingError(f"it has an array of shape {quoted(shape)}")
        count, swapped = math.prod(shape), dtype.state is not None and dtype.state[1] == ">"
        kind = numpy.dtype(object if name[0] == "O" else (">" if swapped else "<") + name)
        fits = isinstance(data, list) if kind.hasobject else isinstance(data, bytes | bytearray)
        size = count if kind.hasobject else count * kind.itemsize
        if not fits or len(data) != size or order not in ("C", "F") or (not count and len(shape) > 1):
            raise pickle.UnpicklingError(f"it has an array of shape {quoted(shape)} and dtype {name}, with other data")
        if not kind.hasobject:
            return numpy.frombuffer(data, kind, count).reshape(shape, order=order).tolist()
        objects = numpy.empty(count, object)
        for i, each in enumerate(data):
            objects[i] = self.of(each)
        return objects.reshape(shape).tolist()  # of objects numpy writes the list in C order, whatever the flag says


def _reason(error: Exception) -> str:
    """Return an error's message; in place of torch's, which proposes to run the code, the name that is refused."""
    text = str(error)
    if "weights_only" in text:
        named = re.search(r"GLOBAL (\S+)", text)
        return f"it names {named[1]}, which is not called" if named else "its tensors are not those of torch.save"
    return text.partition("\n")[0] or repr(error)


def _tensors(saved: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of a saved TensorDict, name -> tensor."""

    def consolidated(table: Any, values: torch.Tensor) -> tuple[Any, torch.Tensor]:
        return table, values

    with torch.serialization.safe_globals([(consolidated, CONSOLIDATED)]):
        table, values = torch.load(io.BytesIO(saved), weights_only=True, map_location="cpu")
    plain = type(values) is torch.Tensor and values.layout == torch.strided and values.device.type == "cpu"
    if not plain or values.dtype != torch.uint8 or values.ndim != 1 or not values.is_contiguous():
        raise pickle.UnpicklingError("its tensors are no TensorDict of bytes with a table")
    found = {}
    for name, (dtype, shape, start, *_) in table["leaves"].items():
        if dtype not in DTYPES:
            raise pickle.UnpicklingError(f"its tensor {quoted(name)} has dtype {quoted(dtype)}")
        kind, size = DTYPES[dtype], math.prod(shape) * DTYPES[dtype].itemsize
        if start < 0 or any(each < 0 for each in shape) or start + size > len(values):
            raise pickle.UnpicklingError(f"its tensor {quoted(name)} of shape {quoted(shape)} exceeds its bytes")
        data = values[start : start + size].clone()
        found[name] = (data != 0 if kind == torch.bool else data.view(kind)).view(shape)
    return found
