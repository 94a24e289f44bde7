"""completions.jsonl as compact columns, thinned out to a limit by complete steps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from hwgrpo.observe.completions import FILE
from hwgrpo.observe.image_text import content_text, count_images
from hwgrpo.observe.shown_fields import number
from hwgrpo.report.inlined_images import MOST_BYTES, InlinedImages
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


def read_completions(run_dir: Path, limit: int, image_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Read the completions of a run as columns.

    Args:
        run_dir: folder of the run.
        limit: the most completions kept, see `steps_to_keep`; 0 for none.
        image_bytes: the most bytes of images; 0 for none.

    Returns:
        `{total, kept, texts, images, images_left, groups: {step, uid, source, prompt, question, truth, start, images},
        rows: {response, reward, advantage, length, finished, rewards: {name: [...]}, extras, outcomes, images}}`. The
        values of `images` are `[data URI or null, width, height]`; those of a group or row are their indices, and
        `images_left` counts those beyond the limit. Completions of one group (step and
        uid) follow each other in `rows`; `start` has one entry more than there are groups. prompt, question (the last
        user message), truth and source are indices into `texts`; extras maps a row's number to what a reward function
        returned beside the score, outcomes to `compact_outcome`. A row whose outcome has turns has no `response`.

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
    texts, images = _Table(), InlinedImages(run_dir, image_bytes)
    groups: dict[str, list[Any]] = {
        name: [] for name in ("step", "uid", "source", "prompt", "question", "truth", "start")
    }
    rows: dict[str, Any] = {name: [] for name in ("response", "reward", "advantage", "length", "finished")}
    functions = sorted({name for records in grouped.values() for r in records for name in r.get("rewards") or {}})
    rows["rewards"] = {name: [] for name in functions}
    rows["extras"], rows["outcomes"], rows["images"] = {}, {}, {}
    of_prompts: dict[int, list[int]] = {}
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
        if shown := images.indices(first.get("images")):
            of_prompts[len(groups["step"]) - 1] = shown
        for record in records:
            dropped = {"dropped": record["dropped"]} if record.get("dropped") else {}
            if extras := {**(record.get("extras") or {}), **dropped}:
                rows["extras"][len(rows["response"])] = extras
            observed = iter(images.indices(record.get("observed_images")))
            outcome = compact_outcome(record.get("outcome"), observed)
            if others := [*observed]:
                rows["images"][len(rows["response"])] = others
            if outcome:
                rows["outcomes"][len(rows["response"])] = outcome
            # the turns are the response once more
            rows["response"].append("" if outcome and outcome["turns"] else _text(record.get("response")))
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
        "images": images.values,
        "images_left": images.too_many,
        "groups": {**groups, "images": of_prompts},
        "rows": rows,
    }


def compact_outcome(outcome: Any, images: Iterator[int] | None = None) -> dict[str, Any] | None:
    """Return what the page shows of a trajectory in an environment or with tools; None where there is no outcome.

    Args:
        outcome: of a record (`hwgrpo.agents.episode.OUTCOME`).
        images: indices of those that were observed, of which a turn takes as many as it has; None: none were.

    Returns:
        `{environment, stop, failure, calls, failed, turns}`: numbers of calls and of failed ones, and each message as
        `{role, text, name, reasoning, calls: [[name, arguments]], reward, images}`, without what it does not have. A
        single turn without calls has no `turns`: it is the response.
    """
    if not isinstance(outcome, Mapping) or not outcome:
        return None
    rewards = iter(outcome.get("turn_rewards") or ())
    images = images or iter(())
    turns = [_turn(message, rewards, images) for message in outcome.get("messages") or ()]
    plain = len(turns) == 1 and not {"calls", "reasoning"} & turns[0].keys()
    return {
        **{name: _text(outcome.get(name)) for name in ("environment", "stop", "failure")},
        "calls": sum((outcome.get("calls") or {}).values()),
        "failed": sum((outcome.get("failed_calls") or {}).values()),
        "turns": [] if plain else turns,
    }


def _turn(message: Mapping[str, Any], rewards: Iterator[Any], images: Iterator[int]) -> dict[str, Any]:
    """Return a message of a trajectory; one of the policy has the next reward."""
    content, shown = message.get("content"), []
    if isinstance(content, list):
        shown = [*islice(images, count_images(content))]
        with_text = [part for part in content if part.get("text")]
        content = content_text(with_text if shown else content)
    turn: dict[str, Any] = {"role": _text(message.get("role")), "text": _text(content)}
    if shown:
        turn["images"] = shown
    for name, key in (("name", "name"), ("reasoning", "reasoning_content")):
        if message.get(key):
            turn[name] = _text(message[key])
    if calls := [call["function"] for call in message.get("tool_calls") or ()]:
        turn["calls"] = [[_text(call.get("name")), call.get("arguments")] for call in calls]
    if turn["role"] == "assistant":
        turn["reward"] = compact(next(rewards, None))
    return turn


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
