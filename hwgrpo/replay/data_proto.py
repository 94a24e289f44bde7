"""verl's DataProto in a file, as `gen_batch.dp` of its rollout skip has it, read without running code.

A pickle calls what it names. This one may name arrays of numpy and verl's class, which is inert here; all else is
refused. The class's state has the tensors as a file of `torch.save`, which torch reads by its own list of names, and a
TensorDict in it as one tensor of bytes with a table.
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

from hwgrpo.errors import DataError

CONSOLIDATED = "tensordict._reductions._rebuild_tensordict_files_consolidated"
"""What a saved TensorDict names, called with the table and the bytes."""


@dataclass(frozen=True)
class DataProto:
    """The content of a file."""

    tensors: Mapping[str, torch.Tensor]
    columns: Mapping[str, list[Any]]
    """Further values per row."""
    meta: Mapping[str, Any]


class _State:
    """Stands for verl's class: keeps its state `(tensors as bytes, columns, meta)`, and does nothing."""

    value: Any = None

    def __setstate__(self, state: Any) -> None:
        self.value = state


_ARRAY = numpy.zeros(1)
_OF_NUMPY = {
    "multiarray": {"_reconstruct": _ARRAY.__reduce__()[0], "scalar": _ARRAY[0].__reduce__()[0]},
    "numeric": {"_frombuffer": _ARRAY.__reduce_ex__(5)[0]},
}
ALLOWED: Mapping[str, Any] = {
    "verl.protocol.DataProto": _State,
    "numpy.ndarray": numpy.ndarray,
    "numpy.dtype": numpy.dtype,
    **{
        f"numpy.{core}.{module}.{name}": function
        for core in ("core", "_core")  # before numpy 2, and since
        for module, functions in _OF_NUMPY.items()
        for name, function in functions.items()
    },
}


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
        if not isinstance(found, _State):
            raise DataError(f"{path} is a pickle, and no DataProto of verl")
        batch, columns, meta = found.value
        return DataProto(_tensors(batch), {name: values.tolist() for name, values in columns.items()}, dict(meta))
    except (pickle.UnpicklingError, EOFError, OSError, ArithmeticError) as error:
        raise DataError(f"{path} is not read: {_reason(error)}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise DataError(f"{path} is damaged, or of another version of verl: {_reason(error)}") from error


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
    found = {}
    for name, (dtype, shape, start, *_) in table["leaves"].items():
        kind = getattr(torch, dtype.removeprefix("torch."))
        size = math.prod(shape) * kind.itemsize
        found[name] = values[start : start + size].clone().view(kind).view(shape)
    return found
