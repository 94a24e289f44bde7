"""Columns: what is declared once is selected, split, concatenated and stored, each entry with its sequence."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hwgrpo.errors import DataError
from hwgrpo.ragged import Ragged, offsets_of
from hwgrpo.training.feed.scored_groups import pack, values_json
from hwgrpo.values import Completions, Rewards, StepRewards, TrainBatch

LENGTHS = st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=4)
"""Of each prompt, the lengths of its responses."""


def numbered(lengths: list[list[int]], *, floors: bool, versions: bool, version: int = 3) -> Completions:
    """Return completions whose entries are all different."""
    flat = torch.tensor([length for group in lengths for length in group], dtype=torch.int64)
    total = int(flat.sum())
    return Completions(
        prompt_index=torch.repeat_interleave(torch.tensor([len(group) for group in lengths], dtype=torch.int64)),
        tokens=torch.arange(total) + 100,
        offsets=offsets_of(flat),
        logprobs=-torch.arange(total).float(),
        finished=torch.arange(len(flat)) % 2 == 0,
        texts=tuple(f"text {i}" for i in range(len(flat))),
        weight_version=version,
        versions=torch.arange(total) + version if versions else None,
        floors=-10.0 - torch.arange(total) if floors else None,
        loss_mask=torch.arange(total) % 3 > 0 if floors else None,
        row_starts=torch.where(torch.arange(total) % 4 == 1, torch.arange(total), -1) if floors else None,
        token_extras={"routes": torch.arange(total * 6, dtype=torch.uint8).view(total, 2, 3)},
        outcomes=tuple(
            {"reward": i / 2, "turn_rewards": [i / 2, 0.0], "states": ["s", None], "messages": [{"role": "tool"}]}
            for i in range(len(flat))
        )
        if floors
        else (),
    )


def scored(count: int, *, steps: bool, extras: bool) -> Rewards:
    counts = torch.arange(count) % 3 + 1
    total = int(counts.sum())
    return Rewards(
        total=torch.arange(count).double(),
        valid=torch.arange(count) % 3 > 0,
        per_function={"b": torch.arange(count).double() + 10, "a": torch.arange(count).double() + 20},
        failures={"errors/a": 1},
        extras=tuple({"n": i} for i in range(count)) if extras else (),
        steps=StepRewards(
            torch.arange(total).double(), torch.arange(total), offsets_of(counts), torch.arange(total) - 1
        )
        if steps
        else None,
        greedy=torch.arange(count).double() + 30,
    )


def rows(value: Ragged) -> list[dict[str, Any]]:
    """Return the entries of each sequence, one plain dict per sequence."""
    count, columns = len(value), {}
    for field in fields(value):  # type: ignore[arg-type]
        column, content = field.metadata.get("column"), getattr(value, field.name)
        if column is None or column.per == "prompt_token" or content is None or content == ():
            continue
        if isinstance(content, Ragged):
            columns[field.name] = rows(content)
        elif isinstance(content, dict):
            each = {name: _entries(values, column.per, value) for name, values in content.items()}
            columns[field.name] = [{name: values[i] for name, values in each.items()} for i in range(count)]
        else:
            columns[field.name] = _entries(content, column.per, value)
    return [{name: values[i] for name, values in columns.items()} for i in range(count)]


def _entries(values: Any, per: str, value: Ragged) -> list[Any]:
    if isinstance(values, tuple):
        return list(values)
    if per == "sequence":
        return values.tolist()
    bounds = value.offsets.tolist()
    return [values[bounds[i] : bounds[i + 1]].tolist() for i in range(len(value))]


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, floors=st.booleans(), versions=st.booleans(), data=st.data())
def test_a_selection_has_the_rows_of_its_sequences(lengths: Any, floors: bool, versions: bool, data: Any):
    value = numbered(lengths, floors=floors, versions=versions)
    wanted = data.draw(st.lists(st.booleans(), min_size=len(value), max_size=len(value)))
    mask = torch.tensor(wanted, dtype=torch.bool)
    for each in (value, scored(len(value), steps=True, extras=True)):
        found = each.select(mask)
        assert rows(found) == [row for row, keep in zip(rows(each), wanted, strict=True) if keep]
    assert value.select(mask).weight_version == value.weight_version


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, floors=st.booleans(), versions=st.booleans(), steps=st.booleans(), extras=st.booleans())
def test_what_is_split_by_prompt_concatenates_to_the_same(
    lengths: Any, floors: bool, versions: bool, steps: bool, extras: bool
):
    value, rewards = (
        numbered(lengths, floors=floors, versions=versions),
        scored(sum(map(len, lengths)), steps=steps, extras=extras),
    )
    parts = value.by_prompt(len(lengths))
    assert [len(part) for part in parts] == [len(group) for group in lengths]
    assert all(not part.prompt_index.any() for part in parts)
    if parts:
        again = Completions.concat(parts, prompts=[1] * len(parts))
        assert rows(again) == rows(value)
        assert again.weight_version == (value.weight_version if len(value) else 0)
        assert rows(Rewards.concat(rewards.split(map(len, parts)))) == rows(rewards)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, floors=st.booleans(), versions=st.booleans(), steps=st.booleans(), extras=st.booleans())
def test_files_return_what_was_stored(lengths: Any, floors: bool, versions: bool, steps: bool, extras: bool):
    value = replace(numbered(lengths, floors=floors, versions=versions), late=2, dropped={1: "late"})
    rewards = scored(len(value), steps=steps, extras=extras)
    for each in (value, rewards):
        tensors, values_json = each.to_tensors("x.")
        again = type(each).from_tensors("x.", tensors, json.loads(json.dumps(values_json)))
        assert rows(again) == rows(each)
        assert getattr(again, "weight_version", 3) == 3
        assert {f.name: getattr(again, f.name) for f in fields(each) if not f.metadata and f.name != "offsets"} == {
            f.name: getattr(each, f.name) for f in fields(each) if not f.metadata and f.name != "offsets"
        }


def test_prefetched_responses_in_a_checkpoint_have_their_outcomes():
    value = numbered([[2, 1], [3]], floors=True, versions=False)
    tensors = {f"{i}.{name}": each for i in range(2) for name, each in pack("", [value], {"asked": "x"}).items()}
    packed = values_json("1.", tensors)
    assert packed is not None
    assert packed["asked"] == "x"
    assert Completions.from_tensors("1.", tensors, packed).outcomes == value.outcomes


def test_checkpoints_of_version_0_1_are_read():
    """The names in their files, written out: a renamed field needs the former name as `stored`."""
    tensors = {
        "prompt_index": torch.tensor([0, 0]),
        "tokens": torch.tensor([5, 6, 7]),
        "offsets": torch.tensor([0, 2, 3]),
        "logprobs": torch.tensor([-1.0, -2.0, -3.0]),
        "finished": torch.tensor([True, False]),
        "versions": torch.tensor([1, 2, 2]),
        "floors": torch.tensor([-9.0, -8.0, -7.0]),
        "total": torch.tensor([0.5, 1.0]).double(),
        "valid": torch.tensor([True, False]),
        "steps.rewards": torch.tensor([0.5, 1.0]).double(),
        "steps.ends": torch.tensor([1, 0]),
        "steps.offsets": torch.tensor([0, 1, 2]),
        "reward.match": torch.tensor([0.5, 1.0]).double(),
        "reward.format": torch.tensor([0.0, 1.0]).double(),
    }
    packed = {"functions": ["match", "format"], "extras": [{"n": 1}, {}], "texts": ["a", "b"], "weight_version": 1}
    files = {f"surplus.0.{name}": values for name, values in tensors.items()}
    completions = Completions.from_tensors("surplus.0.", files, packed)
    assert rows(completions) == [
        {"prompt_index": 0, "tokens": [5, 6], "logprobs": [-1, -2], "floors": [-9, -8], "token_extras": {}}
        | {"finished": True, "texts": "a", "versions": [1, 2]},
        {"prompt_index": 0, "tokens": [7], "logprobs": [-3], "floors": [-7], "token_extras": {}}
        | {"finished": False, "texts": "b", "versions": [2]},
    ]
    assert (completions.weight_version, completions.late, completions.dropped) == (1, None, {})
    late = Completions.from_tensors("surplus.0.", files, packed | {"late": 2, "dropped": [[3, "late"]]})
    assert (late.late, late.dropped) == (2, {3: "late"})
    assert rows(Rewards.from_tensors("surplus.0.", files, packed)) == [
        {"total": 0.5, "valid": True, "per_function": {"match": 0.5, "format": 0.0}, "extras": {"n": 1}}
        | {"steps": {"rewards": [0.5], "ends": [1]}},
        {"total": 1.0, "valid": False, "per_function": {"match": 1.0, "format": 1.0}, "extras": {}}
        | {"steps": {"rewards": [1.0], "ends": [0]}},
    ]


def test_parts_without_an_optional_column_get_what_stands_for_it():
    with_floors, without = numbered([[2]], floors=True, versions=False), numbered([[1]], floors=False, versions=False)
    floors = Completions.concat([without, with_floors], prompts=[1, 1]).floors
    assert floors is not None
    assert floors.tolist() == [-math.inf, -10, -11]
    mask = Completions.concat([without, with_floors], prompts=[1, 1]).loss_mask
    assert mask is not None
    assert mask.tolist() == [True, False, True]
    joined = Completions.concat([without, with_floors], prompts=[1, 1])
    assert joined.outcomes == ({}, *with_floors.outcomes)
    assert without.outcome_of_each == ({},)
    assert Completions.concat([without, without], prompts=[1, 1]).outcomes == ()
    mixed = Completions.concat([with_floors, replace(without, weight_version=5)], prompts=[1, 1])
    assert mixed.versions is not None
    assert mixed.versions.tolist() == [3, 3, 5]
    assert mixed.weight_version == 3
    assert Completions.concat([without, without], prompts=[1, 1]).versions is None
    with_extras, bare = scored(2, steps=False, extras=True), scored(1, steps=False, extras=False)
    assert Rewards.concat([bare, with_extras]).extras == ({}, {"n": 0}, {"n": 1})
    assert Rewards.concat([bare, bare]).extras == ()


def test_parts_with_and_without_a_column_that_nothing_fills_are_refused():
    with_steps, without = scored(2, steps=True, extras=False), scored(2, steps=False, extras=False)
    with pytest.raises(DataError, match="with and without steps"):
        Rewards.concat([with_steps, without])
    joined = Rewards.concat([with_steps, scored(0, steps=False, extras=False)])
    assert joined.steps is not None
    mine, others = numbered([[2]], floors=False, versions=False), numbered([[1]], floors=False, versions=False)
    with pytest.raises(DataError, match=r"other names of token_extras .*: mine, routes"):
        Completions.concat([replace(mine, token_extras={"mine": torch.zeros(2)}), others], prompts=[1, 1])
    nothing = replace(numbered([[]], floors=False, versions=False), token_extras={})
    assert Completions.concat([nothing, others], prompts=[1, 1]).token_extras.keys() == {"routes"}


def test_parts_without_responses_do_not_decide():
    nothing = replace(numbered([[]], floors=False, versions=False), weight_version=0)
    joined = Completions.concat([nothing, numbered([[1, 2]], floors=False, versions=False)], prompts=[1, 1])
    assert joined.prompt_index.tolist() == [1, 1]
    assert joined.weight_version == 3
    assert joined.versions is None


def test_prompts_of_batches_are_numbered_one_after_another():
    batch = TrainBatch(
        prompt_index=torch.tensor([1, 1]),
        tokens=torch.tensor([5, 6, 7]),
        offsets=torch.tensor([0, 1, 3]),
        logprobs=torch.zeros(3),
        prompt_tokens=torch.tensor([1, 2, 3]),
        prompt_offsets=torch.tensor([0, 2, 3]),
        advantages=torch.tensor([1.0, -1.0]),
        temperature=0.5,
    )
    joined = TrainBatch.concat([batch, batch])
    assert joined.temperature == 0.5, "a group of ranks scores at that of its parts"
    assert joined.prompt_index.tolist() == [1, 1, 3, 3]
    assert joined.prompt_offsets.tolist() == [0, 2, 3, 5, 6]
    assert joined.prompt_tokens.tolist() == [1, 2, 3, 1, 2, 3]
    assert joined.offsets.tolist() == [0, 1, 3, 4, 6]
    assert joined.select(torch.tensor([False, False, True, False])).prompt_tokens.tolist() == [1, 2, 3, 1, 2, 3]


def test_a_part_holds_no_storage_of_the_whole():
    part = numbered([[4], [4000]], floors=True, versions=True).by_prompt(2)[0]
    assert len(pickle.dumps(part)) < 4000


def test_failures_stay_behind_when_a_batch_is_split():
    assert scored(2, steps=False, extras=False).split([1, 1])[0].failures == {}
    late = replace(numbered([[1]], floors=False, versions=False), late=1, dropped={0: "late"})
    assert (late.by_prompt(1)[0].late, late.by_prompt(1)[0].dropped) == (None, {})


def test_the_values_are_declared_without_torch():
    code = "import sys, hwgrpo.values; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_column_says_whether_it_has_an_entry_per_token():
    value = numbered([[2, 1]], floors=True, versions=False)
    for name, per_token in (("tokens", True), ("floors", True), ("finished", False), ("prompt_index", False)):
        column, found = value.column(name)
        assert column is getattr(value, name)
        assert found is per_token


@pytest.mark.parametrize("lengths", [[], [0], [3, 0, 2]])
def test_offsets_bound_runs_of_the_lengths(lengths: list[int]):
    assert offsets_of(torch.tensor(lengths, dtype=torch.int64)).tolist() == [
        sum(lengths[:i]) for i in range(len(lengths) + 1)
    ]
