"""Steps that TRL and verl wrote: TRL's completions (`log_completions`), verl's `trainer.rollout_data_dir` and `skip`.

TRL    completions_00003.parquet: step, prompt, completion, a column per reward function, further ones, advantage
verl   3.jsonl: input, output, gts, score, step, further ones; it has no advantages
verl   genstep_000003/gen_batch.dp: prompts, responses, attention_mask, rm_scores, and with tools response_mask, which
       says what of a response was sampled; beside it new_batch.dp has a row per prompt with uid and reward_model

Only the last has token ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf, isinf, nan
from pathlib import Path
from typing import Any

import torch

from hwgrpo.data.formats import Part, first_repeated, read_file
from hwgrpo.errors import ConfigError, DataError, error_text, shown
from hwgrpo.replay.data_proto import REMEDY, DataProto, read_data_proto

TRL_COLUMNS, VERL_COLUMNS = ("step", "prompt", "completion", "advantage"), ("step", "input", "output", "score")
WRITTEN = "give the file as the peer wrote it"
PICKLE = b"\x80"
"""First byte of a pickle."""


@dataclass(frozen=True)
class PeerDump:
    """A step of S responses."""

    peer: str
    """"TRL" or "verl"."""
    step: int
    prompts: tuple[str, ...]
    """Text of each response's prompt."""
    responses: tuple[str, ...]
    groups: torch.Tensor
    """[S] int64: group of each response, numbered in order."""
    rewards: Mapping[str, torch.Tensor]
    """TRL: reward function -> [S] fp64, NaN where it returned none."""
    total: torch.Tensor | None
    """verl: [S] fp64 sums."""
    advantages: torch.Tensor | None
    """TRL: [S] fp64."""
    rows: Sequence[Mapping[str, Any]]
    """All columns of each response."""
    tokens: Sequence[Sequence[int]] | None = None
    """Token ids of each response; None: the file has none."""
    sampled: Sequence[Sequence[bool]] | None = None
    """Which of the tokens the policy sampled, the others being observed; None: all of them."""


def read_dump(path: Path, functions: Sequence[str], n: int, tokenizer: Any) -> PeerDump:
    """Read a step.

    Args:
        path: the file.
        functions: names of the reward functions, whose columns TRL's file must have.
        n: responses per prompt.
        tokenizer: decodes a file of tokens.

    Raises:
        ConfigError: two reward functions have one name.
        DataError: it is another file, malformed, has several steps, or groups of another size.
    """
    try:
        with path.open("rb") as file:
            is_pickle = file.read(1) == PICKLE
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error_text(error, 200)}); check its permissions, or copy it"
        ) from error
    if is_pickle:
        return _verl_rollout(path, n, tokenizer)
    if path.suffix not in (".parquet", ".jsonl"):
        raise DataError(
            f"{path}: a step of TRL is a .parquet file (log_completions), one of verl a .jsonl file "
            "(trainer.rollout_data_dir) or gen_batch.dp (skip)"
        )
    part = read_file(path)
    columns = {*part.columns}
    if columns >= {*VERL_COLUMNS}:
        return _verl(part, n)
    if columns >= {*TRL_COLUMNS}:
        return _trl(part, functions, n)
    raise DataError(
        f"{path} has the columns {', '.join(sorted(columns))}; a step of TRL has {', '.join(TRL_COLUMNS)}, one of verl "
        f"{', '.join(VERL_COLUMNS)}"
    )


def _trl(part: Part, functions: Sequence[str], n: int) -> PeerDump:
    twice = first_repeated(functions)
    if twice is not None:
        raise ConfigError(
            f"reward.functions has two with the name {twice!r}, and {part.name} one column of that name; rename one"
        )
    missing = [name for name in functions if name not in part.columns]
    if missing:
        raise DataError(
            f"{part.name} has no column of the reward function {missing[0]!r}; it has {', '.join(part.columns)}: "
            "reward.functions names them, in any order, with their weights"
        )
    prompts, responses = (_texts(part, name) for name in ("prompt", "completion"))
    rewards = {name: _numbers(part, name) for name in functions}
    return PeerDump(
        "TRL",
        _step(part),
        prompts,
        responses,
        _groups(part.name, prompts, n),
        rewards,
        None,
        _numbers(part, "advantage"),
        part.rows,
    )


def _verl(part: Part, n: int) -> PeerDump:
    prompts, responses = (_texts(part, name) for name in ("input", "output"))
    groups = _groups(part.name, prompts, n)
    return PeerDump("verl", _step(part), prompts, responses, groups, {}, _numbers(part, "score"), None, part.rows)


def _verl_rollout(path: Path, n: int, tokenizer: Any) -> PeerDump:
    """Read verl's `gen_batch.dp`, with the columns of `new_batch.dp` beside it."""
    data = read_data_proto(path)
    for name in ("prompts", "responses", "attention_mask", "rm_scores"):
        if name not in data.tensors:
            late = "; verl computed the rewards after it wrote the file" if name == "rm_scores" else ""
            raise DataError(f"{path} has no {name}, but {', '.join(data.tensors) or 'nothing'}{late}")
    prompts, responses, scores = (data.tensors[name] for name in ("prompts", "responses", "rm_scores"))
    _check_shapes(path, data)
    tokens = [
        [row[mask].tolist() for row, mask in zip(values, masks, strict=True)]
        for values, masks in (
            (prompts, data.tensors["attention_mask"][:, : prompts.shape[1]].bool()),
            (responses, data.tensors["attention_mask"][:, prompts.shape[1] :].bool()),
        )
    ]
    count = len(responses)
    sampled = None
    if "response_mask" in data.tensors:
        present = data.tensors["attention_mask"][:, prompts.shape[1] :].bool()
        sampled = [row[mask].tolist() for row, mask in zip(data.tensors["response_mask"].bool(), present, strict=True)]
    columns, batch = dict(data.columns), path.with_name("new_batch.dp")
    if path.name == "gen_batch.dp" and batch.is_file():
        for name, values in read_data_proto(batch).columns.items():
            if len(values) * n != count:
                raise DataError(f"{batch} has {len(values)} prompts, {path} {count} responses, and rollout.n={n}")
            columns.setdefault(name, [value for value in values for _ in range(n)])
    rows = [{name: values[i] for name, values in columns.items()} for i in range(count)]
    for row in rows:
        if isinstance(row.get("reward_model"), Mapping) and "ground_truth" in row["reward_model"]:
            row["ground_truth"] = row["reward_model"]["ground_truth"]
    asked, answered = (
        tuple(tokenizer.decode(each, skip_special_tokens=True) for each in of_kind) for of_kind in tokens
    )
    digits = re.search(r"genstep_(\d+)$", path.parent.name)
    step = data.meta.get("global_steps", int(digits[1]) if digits else 0)
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**63:
        raise DataError(f"{path}: global_steps={shown(step)} is no step; {REMEDY}")
    groups = _groups(path, [str(each) for each in columns.get("uid", asked)], n)
    return PeerDump("verl", step, asked, answered, groups, {}, scores.double().sum(1), None, rows, tokens[1], sampled)


def _check_shapes(path: Path, data: DataProto) -> None:
    """Raise `DataError` unless tensors and columns have one row per response, and the tokens are token ids."""
    prompts, responses = data.tensors["prompts"], data.tensors["responses"]
    for name, tokens in (("prompts", prompts), ("responses", responses)):
        if tokens.ndim != 2 or not tokens.numel():
            raise DataError(f"{path}: {name} has shape {[*tokens.shape]}, not [responses, tokens]; {REMEDY}")
        if tokens.is_floating_point() or tokens.dtype == torch.bool or tokens.min() < 0 or tokens.max() >= 2**31:
            raise DataError(f"{path}: {name} of dtype {tokens.dtype} has values that are no token ids; {REMEDY}")
    count, width = responses.shape
    shapes = {
        "prompts": (count, prompts.shape[1]),
        "attention_mask": (count, prompts.shape[1] + width),
        "rm_scores": (count, width),
        **({"response_mask": (count, width)} if "response_mask" in data.tensors else {}),
    }
    for name, shape in shapes.items():
        if data.tensors[name].shape != shape:
            raise DataError(
                f"{path}: {name} has shape {[*data.tensors[name].shape]}, and responses {[count, width]}; it must be "
                f"{[*shape]}: {REMEDY}"
            )
    for name, values in data.columns.items():
        if len(values) != count:
            raise DataError(f"{path}: column {name!r} has {len(values)} values for {count} responses; {REMEDY}")


def _texts(part: Part, name: str) -> tuple[str, ...]:
    for i, row in enumerate(part.rows):
        if not isinstance(row.get(name), str):
            raise DataError(f"{part.place(i)}: {name} is no text; {WRITTEN}")
    return tuple(row[name] for row in part.rows)


def _numbers(part: Part, name: str) -> torch.Tensor:
    values = []
    for i, row in enumerate(part.rows):
        if name not in row:
            raise DataError(f"{part.place(i)}: it has no {name}; {WRITTEN}")
        value = row[name]
        number = nan if value is None else inf
        if isinstance(value, int | float) and not isinstance(value, bool):
            with suppress(OverflowError):  # an integer beyond float
                number = float(value)
        if isinf(number):
            raise DataError(f"{part.place(i)}: {name}={shown(value)} is no finite number; {WRITTEN}")
        values.append(number)
    return torch.tensor(values, dtype=torch.float64)


def _step(part: Part) -> int:
    found = _numbers(part, "step").tolist()
    for i, step in enumerate(found):
        if not step.is_integer():
            raise DataError(f"{part.place(i)}: step={shown(part.rows[i]['step'])} is no step; {WRITTEN}")
    steps = sorted({int(each) for each in found})
    if len(steps) != 1:
        raise DataError(f"{part.name} has the steps {', '.join(map(str, steps))}; name a file of one step")
    return steps[0]


def _groups(name: str | Path, prompts: Sequence[str], n: int) -> torch.Tensor:
    """Return the group of each response: n rows in a row with one prompt, or else all rows of a prompt."""
    chunks = [prompts[start : start + n] for start in range(0, len(prompts), n)]
    if len(prompts) % n == 0 and all(len({*chunk}) == 1 for chunk in chunks):
        return torch.arange(len(prompts)) // n
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    groups = torch.tensor([numbers[prompt] for prompt in prompts])
    sizes = groups.bincount()
    if not bool((sizes == n).all()):
        worst = int((sizes != n).nonzero()[0])
        raise DataError(
            f"{name} has {int(sizes[worst])} responses to the prompt {[*numbers][worst][:60]!r}, and "
            f"rollout.n={n}; set rollout.n to the peer's"
        )
    return groups
