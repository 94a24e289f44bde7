"""A run's start says which tokens rewards do not see, and which markers its prompts leave open."""

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.config.schema import RewardFunctionConfig
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.planning.dry_run import make_plan
from hwgrpo.training.setup import build_run
from hwgrpo.training.text_notes import text_notes
from tests.support.runs import runs

OPENS = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"


def notes(
    *functions: RewardFunctionConfig,
    skips: bool,
    prompts: list[str],
    special: bool,
    marks: Collection[str] = (),
    **rollout: Any,
) -> list[str]:
    tokenizer = character_tokenizer("")
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<pic>"]})
    settings = SimpleNamespace(skip_special_tokens=skips, **{"stop": [], **rollout})
    config: Any = SimpleNamespace(rollout=settings, reward=SimpleNamespace(functions=functions))
    return list(text_notes(config, tokenizer, prompts, marks))


def test_kept_special_tokens_are_named_and_skipped_ones_where_a_reward_or_stop_string_looks_for_them():
    tags = RewardFunctionConfig("tags")
    [kept] = notes(tags, skips=False, prompts=["a"], special=True)
    assert "keeps special tokens such as <think>, </think>, <pic>" in kept
    first, second = notes(tags, skips=True, prompts=["a"], special=True, stop=["</think>"])
    assert first.startswith("reward tags will not find <think>: it is a special token")
    assert second.startswith("reward tags and rollout.stop='</think>' will not find </think>")
    assert notes(RewardFunctionConfig("exact_match"), skips=True, prompts=["a"], special=True) == []
    assert notes(tags, skips=False, prompts=["a"], special=False, stop=["b"]) == []
    [kept] = notes(tags, skips=False, prompts=["a"], special=True, marks={"<pic>", "<think>"})
    assert "keeps special tokens such as </think>; those of end" in kept
    assert notes(tags, skips=False, prompts=["a"], special=True, marks={"<pic>", "<think>", "</think>"}) == []


def test_opened_markers_are_named_with_the_rewards_that_count_them():
    prompts = ["a<think>\n", "b<think>\n", "c", "d<plan>"]
    pattern = RewardFunctionConfig("format", kwargs={"pattern": "<plan>.*"})
    functions = (RewardFunctionConfig("tags"), RewardFunctionConfig("regex"), RewardFunctionConfig("format"), pattern)
    first, second = notes(*functions, skips=True, prompts=prompts, special=False)
    behind = "which is the beginning of the response for"
    assert first == rf"2 of 4 prompts end with '<think>\n', {behind} reward tags and reward format"
    assert second == f"1 of 4 prompts end with '<plan>', {behind} reward format"


@pytest.mark.parametrize("name", ["format", "tags", "regex"])
@pytest.mark.parametrize("kwargs", [{"pattern": 5}, {"tags": 5}, {"pattern": ["a"], "tags": {"a": 1}}])
def test_arguments_of_a_wrong_type_are_left_to_the_reward(name: str, kwargs: dict[str, Any]):
    wrong = RewardFunctionConfig(name, kwargs=kwargs)
    named = notes(wrong, skips=True, prompts=["a<think>\n"], special=True)
    assert bool(named) == ("pattern" not in kwargs and name != "regex")


@pytest.fixture
def opening(tmp_path: Path) -> tuple[str, ...]:
    """Return the settings of a run whose chat template opens `<think>`."""
    (tmp_path / "template.jinja").write_text(OPENS)
    functions = "[format, {name: regex, kwargs: {pattern: '^<think>'}}]"
    return "data.chat=always", f"model.chat_template={tmp_path}/template.jinja", f"reward.functions={functions}"


def test_a_dry_run_and_a_run_name_the_opened_marker_and_its_rewards_count_it(tmp_path, opening, capsys):
    torch.set_num_threads(1)
    words = "prompts end with '<think>', which is the beginning of the response for reward format and reward regex"
    plan = make_plan(runs.small(tmp_path / "run", *opening), BACKEND, 1).text
    assert words in plan
    assert "regex: 1 for the answer itself, 1 for an empty response" in plan
    run = build_run(runs.small(tmp_path / "run", *opening, "observe.progress=plain"), BACKEND, 0, 1)
    run.close()
    assert words in "".join(capsys.readouterr())
