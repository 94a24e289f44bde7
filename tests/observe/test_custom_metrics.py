"""Metrics of the user's own: one value per response, over all ranks."""

from pathlib import Path

import pytest
import torch

from hwgrpo.config.schema import ObserveConfig
from hwgrpo.errors import ConfigError, RunError
from hwgrpo.observe.custom_metrics import CustomMetrics, over_ranks
from hwgrpo.values import Completions

FUNCTIONS = """
import torch

def lengths(prompts, completions, rewards, advantages, *, scale=1.0):
    return {"chars": torch.tensor([scale * len(text) for text in completions.texts])}

def too_few(prompts, completions, rewards, advantages):
    return {"chars": [1.0]}

def broken(prompts, completions, rewards, advantages):
    raise KeyError("column")

def leaves(prompts, completions, rewards, advantages):
    raise SystemExit(3)

def in_place(prompts, completions, rewards, advantages):
    return {"sums": advantages.add_(completions.tokens.zero_()[:2] + 1)}
"""
COMPLETIONS = Completions(
    prompt_index=torch.tensor([0, 0]),
    tokens=torch.tensor([1, 2, 3]),
    offsets=torch.tensor([0, 1, 3]),
    logprobs=torch.zeros(3),
    finished=torch.tensor([True, True]),
    texts=("a", "bcd"),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


def measured(file: Path, function: str, **kwargs) -> dict[str, list[float]]:
    config = ObserveConfig(metrics=[f"{file}:{function}"], kwargs={function: kwargs} if kwargs else {})
    return CustomMetrics(config).measure(None, COMPLETIONS, None, torch.zeros(2))  # type: ignore[arg-type]


def test_a_metric_has_a_value_per_response_and_its_arguments(file: Path):
    assert measured(file, "lengths", scale=2) == {"chars": [2.0, 6.0]}


def test_a_metric_that_computes_in_place_changes_nothing_that_is_trained_on(file: Path):
    assert measured(file, "in_place") == {"sums": [1.0, 1.0]}
    assert COMPLETIONS.tokens.tolist() == [1, 2, 3]


def test_mean_max_and_min_are_over_the_responses_of_all_ranks():
    ranks = [{"chars": [1.0, float("nan")]}, {"chars": [2.0, 6.0]}, {}]
    assert over_ranks(ranks, {"reward": 1.0}) == {"chars/mean": 3.0, "chars/max": 6.0, "chars/min": 1.0}
    assert over_ranks([{"never": [float("nan")]}], {}) == {}


def test_a_metric_of_ours_keeps_its_name():
    with pytest.raises(ConfigError, match=r"response_length/mean is a metric of every run"):
        over_ranks([{"response_length": [1.0]}], {"response_length/mean": 3.0})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("too_few", r"too_few' returned 1 values of 'chars' for 2 responses"),
        ("broken", r"broken': KeyError: 'column' at .*mine.py:\d+"),
        ("leaves", r"leaves': SystemExit: 3"),
    ],
)
def test_a_function_that_fails_ends_the_run_with_its_name(file: Path, function: str, message: str):
    with pytest.raises(RunError, match=message):
        measured(file, function)


def test_arguments_that_a_function_lacks_are_refused(file: Path):
    with pytest.raises(ConfigError, match=r"observe\.kwargs=.*'scala'"):
        measured(file, "lengths", scala=2)
