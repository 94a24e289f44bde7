"""`reasoning_gym://chain_sum?size=2000&seed=1` -> rows, the same in every process and after a restart.

Some tasks of the package depend on the order of sets or draw from global generators, so an interpreter with fixed
string hashes makes the rows, with generators seeded per row.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from hwgrpo.errors import DataError, escaped
from hwgrpo.rewards.verifiers.reasoning_gym_tasks import PREFIX, TaskAddress, parse_address, version
from hwgrpo.support.child_processes import FIXED_HASHES

VALIDATION_SHARE = 5
"""One question in so many, by its hash, is for validation: none is in both splits, whatever the seeds."""
OWN_SHARE = 10
"""Training rows per row of the validation that a task has without `data.validation`; few enough for a small task."""
SPLITS = ("train", "validation")
MOST_TRIED = 4
"""Index of the package's data set at which the search ends, in the rows that a split is expected to need."""
SECONDS = 3600
"""Most seconds for the rows of a split: with some arguments a task searches for ever."""
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hwgrpo.data.reasoning_gym_rows import print_rows; print_rows(*sys.argv[2:])"
)


@functools.lru_cache(maxsize=8)
def task_rows(address: str, split: str) -> tuple[Mapping[str, Any], ...]:
    """Return the rows `{prompt, ground_truth, data_source, extra_info}` of a task's split.

    Args:
        address: `reasoning_gym://...`.
        split: "train" or "validation": a question belongs to one of them.

    Raises:
        ConfigError: as `parse_address` does.
        DataError: the package fails or takes too long, or has too few different questions for the split.
    """
    assert split in SPLITS, split
    parse_address(address)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path), address, split],
            env={**os.environ, **FIXED_HASHES},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(
            f"{address}: its rows for {split} are not made within {SECONDS:g} s; use a smaller size, or an easier task"
        ) from error
    if done.returncode:
        why = escaped((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1], 300)
        raise DataError(f"{address}: the package reasoning-gym fails: {why}; change its arguments")
    rows = tuple(json.loads(done.stdout))
    size = parse_address(address).size
    other = ", or name other prompts in data.validation" if split == "validation" else ""
    if not rows:
        raise DataError(f"{address} has no question for {split}: make its arguments wider{other}")
    if len(rows) < size:
        raise DataError(
            f"{address}: only {len(rows):,} of {size:,} rows for {split}, which are different questions: make its "
            f"arguments wider or size smaller, at most {len(rows)}{other}"
        )
    return rows


def own_validation(address: str, most: int) -> str:
    """Return the address of the validation of a task that is trained on.

    Args:
        address: `reasoning_gym://...`.
        most: most rows; 0 for no limit.
    """
    size = max(parse_address(address).size // OWN_SHARE, 1)
    task, _, query = address.partition("?")
    arguments = [each for each in query.split("&") if each and not each.startswith("size=")]
    return f"{task}?{'&'.join([*arguments, f'size={min(size, most) if most else size}'])}"


def print_rows(address: str, split: str) -> None:
    """Print the rows of a split in JSON; what the package prints goes to standard error."""
    output = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(output, "w", encoding="utf-8") as file:
        json.dump(rows_of(parse_address(address), split), file)


def rows_of(task: TaskAddress, split: str) -> list[dict[str, Any]]:
    """Return the rows of a split, at most `task.size`, each with another question."""
    import numpy as np

    expected = task.size * VALIDATION_SHARE if split == "validation" else task.size * 2
    dataset = task.dataset(MOST_TRIED * expected)
    rows: list[dict[str, Any]] = []
    questions: set[str] = set()
    for index in range(len(dataset)):
        random.seed(task.seed + index)
        np.random.seed((task.seed + index) % 2**32)
        entry = dataset[index]
        question = entry["question"]
        if question not in questions and split_of_question(question) == split:
            questions.add(question)
            rows.append(_row(task, entry))
        if len(rows) == task.size:
            break
    return rows


def split_of_question(question: str) -> str:
    """Return the split that a question belongs to, by its hash."""
    digest = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big")
    return "train" if digest % VALIDATION_SHARE else "validation"


def _row(task: TaskAddress, entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "prompt": str.__str__(entry["question"]),
        "ground_truth": _plain(entry["answer"]),
        "data_source": f"{PREFIX}{task.task}",
        "extra_info": {"address": task.address, "version": version(), "entry": repr(_plain(entry))},
    }


def _plain(value: Any) -> Any:
    """Return a value made of Python's own types alone, which its repr restores."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, list | set | frozenset):
        return [_plain(each) for each in value]
    if isinstance(value, str):
        return str.__str__(value)  # of numpy's and of an enumeration
    if hasattr(value, "tolist"):
        return value.tolist()
    return value if value is None or isinstance(value, bool | int | float) else str(value)
