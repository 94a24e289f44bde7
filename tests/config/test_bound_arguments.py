"""Keyword arguments of losses, estimators and functions of the user's own: within what their signatures declare."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from hwgrpo.algorithms.policy_loss import build_loss
from hwgrpo.catalog import ADVANTAGES, POLICY_LOSSES
from hwgrpo.config import load_config
from hwgrpo.config.algorithm_rules import check_declared
from hwgrpo.config.bound_arguments import Below, bind_arguments, check_arguments, declared_arguments, describe_argument
from hwgrpo.config.fields import Limits
from hwgrpo.errors import ConfigError
from tests.docs.pages import page, section, table

LOSS = """
from typing import Annotated
from hwgrpo.algorithms.scope import scoped
from hwgrpo.config.fields import Limits

@scoped("token")
def scaled(x, config, *, factor: Annotated[float, Limits(above=0, at_most=2)] = 1.0):
    return -factor * x.advantage * x.logprob, {}
"""


@pytest.mark.parametrize(
    ("name", "argument", "value", "message"),
    [
        ("dppo_tv", "cap", -2, r"kwargs.cap=-2 is out of range; allowed: above 0"),
        ("dppo_kl", "cap", 0, "allowed: above 0"),
        ("dro", "beta", -1, "kwargs.beta=-1 is out of range; allowed: at least 0"),
        ("kl_cov", "share", -1, "allowed: 0 < x <= 1"),
        ("kl_cov", "share", 1.5, "allowed: 0 < x <= 1"),
        ("kl_cov", "coef", -5, "allowed: at least 0"),
        ("clip_cov", "share", 0, "allowed: 0 < x <= 1"),
        ("clip_cov", "low", 5, "kwargs.low=5 with high=5.0 is out of range; allowed: a finite number, below high"),
        ("clip_cov", "high", 1, "kwargs.low=1.0 with high=1 is out of range"),
        ("vespo", "lambda_pos", -3, "allowed: at least 0"),
        ("vespo", "lambda_neg", -3, "allowed: at least 0"),
        ("vespo", "k_pos", -1, "allowed: at least 0"),
        ("vespo", "k_neg", -1, "allowed: at least 0"),
    ],
)
def test_arguments_of_a_loss_have_ranges_like_settings(name: str, argument: str, value: float, message: str):
    config = load_config("tiny_sort", [f"algorithm.loss.name={name}", f"algorithm.loss.kwargs.{argument}={value}"])
    with pytest.raises(ConfigError, match=message):
        check_declared(config.algorithm)


def test_arguments_of_an_estimator_have_them_too():
    config = load_config("tiny_sort", ["algorithm.advantage.name=gdpo", "algorithm.advantage.kwargs.per_response=2"])
    with pytest.raises(
        ConfigError, match=r"algorithm.advantage.kwargs.per_response=2 is out of range; allowed: 0 or 1"
    ):
        check_declared(config.algorithm)


def test_settings_with_arguments_are_loaded_without_torch():
    words = ["algorithm.loss.name=dro", "algorithm.loss.kwargs={beta: 0.3}", "algorithm.advantage.name=online_rft"]
    words.append("algorithm.advantage.kwargs={threshold: 0.5}")
    code = f"import sys, hwgrpo.config as c; c.load_config('tiny_sort', {words}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_argument_without_a_range_of_a_registered_function_does_not_exist():
    for registry in (POLICY_LOSSES, ADVANTAGES):
        for name in registry.readers("kwargs"):
            function: Any = getattr(registry.load(name), "function", registry.load(name))
            assert declared_arguments(function).keys() == function.__kwdefaults__.keys(), name
            check_arguments(function, function.__kwdefaults__, "the defaults are in range")


def test_a_function_of_the_users_own_declares_them_as_ours_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scaled.py").write_text(LOSS)
    name = "algorithm.loss.name=scaled.py:scaled"
    build_loss(load_config("tiny_sort", [name, "algorithm.loss.kwargs.factor=2"]).algorithm)
    config = load_config("tiny_sort", [name, "algorithm.loss.kwargs.factor=3"])
    with pytest.raises(ConfigError, match=r"algorithm.loss.kwargs.factor=3 is out of range; allowed: 0 < x <= 2"):
        build_loss(config.algorithm)


def test_text_and_annotations_that_only_a_type_checker_reads():
    def of_mode(x, *, mode: Literal["a", "b"] = "a", low: Annotated[float, Below("high")] = 0.0, high: float = 1.0): ...

    bind_arguments(of_mode, {"mode": "b"}, 1, "key")
    with pytest.raises(ConfigError, match=r"key.mode='c' is out of range; allowed: a or b"):
        bind_arguments(of_mode, {"mode": "c"}, 1, "key")
    with pytest.raises(ConfigError, match=r"key.low=0.0 with high=-1 is out of range; allowed: below high"):
        bind_arguments(of_mode, {"high": -1}, 1, "key")

    def unreadable(x, *, other: "Missing" = 0): ...  # noqa: F821  # pyright: ignore[reportUndefinedVariable]

    bind_arguments(unreadable, {"other": 5}, 1, "key")
    assert describe_argument(Annotated[float, Limits(at_least=0)]) == "at least 0"


def test_the_page_has_the_arguments_with_their_defaults_and_ranges():
    rows = table(section(page("grpo.md"), "Policy loss"), "argument", "of", "default", "allowed")
    expected = {
        (name, argument): (f"{function.function.__kwdefaults__[argument]:g}", describe_argument(annotation))
        for name in POLICY_LOSSES.readers("kwargs")
        for function in [POLICY_LOSSES.load(name)]
        for argument, annotation in declared_arguments(function.function).items()
    }
    found = {
        (name, argument): (row["default"], row["allowed"])
        for row in rows
        for name in row["of"].split(", ")
        for argument in row["argument"].split(", ")
    }
    assert found == expected
