"""Files of JSON lines that survive a kill: one object with a `step` per line, a torn last line does not count."""

import base64
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from hwgrpo.errors import DataError
from hwgrpo.support.file_systems import sync
from hwgrpo.support.run_files import MOST_BYTES, open_own, open_to_read

_BLOCK = 1 << 16
_MOST_STEPS = 1 << 53


def jsonable(value: Any) -> Any:
    """Return `value` as something that strict JSON can hold.

    Numbers that are not finite become the strings "NaN", "Infinity" and "-Infinity": a bare NaN is not JSON, and
    null would not distinguish them; `float()` reads them back. Tensors and arrays become lists; bytes, as of images,
    base64; other objects, text.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    return base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else str(value)


def _complete_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each complete line and its parsed value.

    Raises:
        DataError: a line other than a torn last one is not a JSON object with a `step`.
    """
    try:
        opened = open_to_read(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; move it away") from error
    with opened as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_BYTES), b""), start=1):
            if not line.endswith(b"\n") and len(line) < MOST_BYTES:
                return  # the writer was killed in the middle of it
            try:
                record = json.loads(line)
                record["step"] = int(record["step"])
                if abs(record["step"]) > _MOST_STEPS:
                    raise ValueError("a step of that number")
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                raise DataError(
                    f"{path}, line {number}: not a JSON object with an integer 'step' ({error!r}); "
                    "the file was changed by something else: repair the line or move the file away"
                ) from error
            yield line, record


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file in order; nothing when it does not exist, and nothing for a torn last line."""
    if path.exists():
        for _, record in _complete_lines(path):
            yield record


def _drop_torn_line(path: Path) -> None:
    """Cut off what follows the last line end, so that the next line starts at the margin."""
    with open(path, "r+b", opener=open_own) as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _BLOCK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
            end = start
        file.truncate(0)


class StepLines:
    """One file of JSON lines, opened for appending at the first line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line and hand it to the operating system, so that a killed process loses none."""
        if self._file is None:
            if self.path.exists():
                _drop_torn_line(self.path)
            # Text that is not valid Unicode (a lone surrogate) turns into \udXXX, which is how JSON spells it.
            self._file = open(self.path, "a", encoding="utf-8", errors="backslashreplace", opener=open_own)  # noqa: SIM115
        self._file.write(json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def cut_back(self, step: int) -> None:
        """Remove every line of a later step, in one atomic replacement of the file."""
        self.close()
        if not self.path.exists():
            return
        temporary = self.path.with_name(self.path.name + ".tmp")
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:
            file.writelines(line for line, record in _complete_lines(self.path) if record["step"] <= step)
            file.flush()
            sync(file)
        temporary.replace(self.path)

    def close(self) -> None:
        """Close the file; a later `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None
