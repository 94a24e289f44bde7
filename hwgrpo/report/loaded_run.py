"""A run as it is compared with others: its record and the completions that it logged."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwgrpo.errors import ConfigError, DataError, error_text
from hwgrpo.observe.completions import FILE
from hwgrpo.report.run_data import RunRecord, read_run
from hwgrpo.support.jsonlines import read_lines

SAMPLES = {
    "prompts": ("uid", "prompt"),
    "responses": ("response", "length", "finished", "dropped"),
    "rewards": ("reward", "rewards"),
    "advantages": ("advantage",),
}
"""Stage of the step -> the fields of completions.jsonl that it writes."""
_FIELDS = tuple(field for fields in SAMPLES.values() for field in fields)
_LONGEST = 200
"""Characters of a text that are kept; of a longer one the beginning and a hash."""


@dataclass(frozen=True)
class LoadedRun:
    """A run as it is compared."""

    record: RunRecord
    samples: Mapping[int, Sequence[Mapping[str, Any]]]
    """Step -> its records of completions.jsonl, in order."""


def load_run(folder: Path) -> LoadedRun:
    """Read a run's folder; the run may be finished, in progress, resumed or killed.

    Raises:
        ConfigError: it is not the folder of a run, or a file in it is damaged; the message names it.
    """
    with name_damage(folder):
        return LoadedRun(read_run(folder), _read_samples(folder))


@contextmanager
def name_damage(*folders: Path) -> Iterator[None]:
    """Turn what damaged files of runs raise into errors that name the folders.

    Raises:
        ConfigError: the body raised an error.
    """
    try:
        yield
    except ConfigError:
        raise
    except DataError as error:
        raise ConfigError(str(error)) from error
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, OSError) as error:
        raise ConfigError(
            f"{' or '.join(map(str, folders))} has files that no run wrote, or that were changed: {error_text(error)}; "
            "move the YAML and JSON files aside, one after another, to find which"
        ) from error


def _read_samples(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the fields that are compared; where steps were repeated, the later attempt counts."""
    samples: dict[int, list[dict[str, Any]]] = {}
    newest = None
    for record in read_lines(folder / FILE):
        step = record["step"]
        if newest is not None and step < newest:
            samples = {each: records for each, records in samples.items() if each < step}
        newest = step
        samples.setdefault(step, []).append({key: _shortened(record[key]) for key in _FIELDS if key in record})
    return samples


def _shortened(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= _LONGEST:
        return value
    digest = hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{value[:_LONGEST]}... ({len(value)} characters, sha256 {digest})"
