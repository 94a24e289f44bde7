"""completions.jsonl as compact columns, thinned out to a limit by complete steps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hwgrpo.observe.completions import FILE
from hwgrpo.observe.shown_fields import number
from hwgrpo.support.jsonlines import read_lines


def compact(value: Any, digits: int = 6) -> float | int | None:
    """Return a number rounded to significant digits, integers as int; None for None or non-finite values."""
    read = number(value)
    if read is None or read != read or read in (float("inf"), float("-inf")):
        return None
    rounded = float(f"{read:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def steps_to_keep(counts: Mapping[int, int], limit: int) -> set[int]:
    """Choose steps spread evenly over the run whose completions do not exceed a limit.

    Args:
        counts: step -> completions.
        limit: the most completions; 0 keeps none.

    Returns:
        Every k-th step counted back from the last, for the smallest k that fits; the last step alone if none does.
    """
    if limit == 0:
        return set()
    steps = sorted(counts, reverse=True)
    for stride in range(1, len(steps) + 1):
        chosen = steps[::stride]
        if len(chosen) == 1 or sum(counts[step] for step in chosen) <= limit:
            return set(chosen)
    return set()


class _Table:
    """Distinct values, each stored once; columns contain their indices."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self._index: dict[str, int] = {}

    def index(self, value: str) -> int:
        """Return the number of a value, a new one when it is new."""
        if value not in self._index:
            self._index[value] = len(self.values)
            self.values.append(value)
        return self._index[value]


def read_completions(run_dir: Path, limit: int) -> dict[str, Any]:
    """Read the completions of a run as columns.

    Args:
        run_dir: folder of the run.
        limit: the most completions kept, see `steps_to_keep`; 0 for none.

    Returns:
        `{total, kept, texts, groups: {step, uid, source, prompt, question, truth, start}, rows: {response, reward,
        advantage, length, finished, rewards: {name: [...]}, extras}}`. Completions of one group (step and uid) follow
        each other in `rows`; `start` has one entry more than there are groups. prompt, question (the last user
        message), truth and source are indices into `texts`; extras maps a row's number to what a reward function
        returned beside the score.

    Raises:
        DataError: the file has a line, other than a torn last one, that this project did not write.
    """
    counts = Counter(record["step"] for record in read_lines(run_dir / FILE))
    keep = steps_to_keep(counts, limit)
    grouped: dict[tuple[int, str], list[dict[str, Any]]] = {}
    if keep:
        for record in read_lines(run_dir / FILE):
            if record["step"] in keep:
                grouped.setdefault((record["step"], str(record.get("uid", ""))), []).append(record)
    texts = _Table()
    groups: dict[str, list[Any]] = {
        name: [] for name in ("step", "uid", "source", "prompt", "question", "truth", "start")
    }
    rows: dict[str, Any] = {name: [] for name in ("response", "reward", "advantage", "length", "finished")}
    functions = sorted({name for records in grouped.values() for r in records for name in r.get("rewards") or {}})
    rows["rewards"] = {name: [] for name in functions}
    rows["extras"] = {}
    for (step, uid), records in grouped.items():
        first = records[0]
        truth, question = first.get("ground_truth"), first.get("question")
        for name, value in (
            ("step", step),
            ("uid", uid),
            ("source", texts.index(_text(first.get("source")))),
            ("prompt", texts.index(_text(first.get("prompt")))),
            ("question", None if question is None else texts.index(_text(question))),
            ("truth", None if truth is None else texts.index(_text(truth))),
            ("start", len(rows["response"])),
        ):
            groups[name].append(value)
        for record in records:
            dropped = {"dropped": record["dropped"]} if record.get("dropped") else {}
            if extras := {**(record.get("extras") or {}), **dropped}:
                rows["extras"][len(rows["response"])] = extras
            rows["response"].append(_text(record.get("response")))
            for name in ("reward", "advantage", "length"):
                rows[name].append(compact(record.get(name)))
            rows["finished"].append(int(bool(record.get("finished", True))))
            for name in functions:
                rows["rewards"][name].append(compact((record.get("rewards") or {}).get(name)))
    groups["start"].append(len(rows["response"]))
    return {
        "total": counts.total(),
        "kept": len(rows["response"]),
        "texts": texts.values,
        "groups": groups,
        "rows": rows,
    }


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
