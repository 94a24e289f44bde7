"""Which cause is named for which pattern of the gap, and how sure it is."""

import math
import random
import re

import pytest

from hwgrpo.algorithms.gap_causes import Gap, diagnose
from tests.support.models.tiny import settings

CONFIG = settings()


def series(k3: list[float], slope: float = 0.0, r2: float = 0.05, start: int = 1) -> list[Gap]:
    return [Gap(start + i, value, slope, r2) for i, value in enumerate(k3)]


def noisy(level: float, n: int, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [level * draw.uniform(0.5, 2) for _ in range(n)]


STALE = [1e-13, *(1e-3 * t * t for t in range(1, 15))]
CASES = {
    "never new weights": (series(STALE, 0.3, 0.6), "stale weights", "likely"),
    "never new weights, sharper": (series(STALE, 0.3, 0.9), "stale weights", "likely"),
    "stopped taking weights": (series([1e-13] * 8 + STALE[1:10]), "stale weights", "likely"),
    "grown, then steady": (series([1e-4, *noisy(0.2, 15)]), "stale weights", "possible"),
    "bf16": (series(noisy(2e-3, 15)), "lower precision of the engine", "possible"),
    "temperature": (series(noisy(0.08, 15), 0.4, 0.95), "another sampling temperature", "likely"),
    "lower temperature": (series(noisy(0.08, 15), -0.4, 0.95), "another sampling temperature", "likely"),
    "small temperature": (series(noisy(1e-3, 15), 0.05, 0.95), "another sampling temperature", "likely"),
    "damaged": (series(noisy(1.5, 5), -0.5, 0.3), "wrong or damaged weights in the engine", "likely"),
    "unrelated": (series(noisy(3.0, 5), -0.97, 0.85), "wrong or damaged weights in the engine", "likely"),
    "damaged later": (
        series([1e-13] * 9 + noisy(0.5, 6), -0.3, 0.3),
        "wrong or damaged weights in the engine",
        "likely",
    ),
    "slightly damaged later": (
        series([1e-13] * 9 + noisy(0.05, 6), -0.3, 0.3),
        "wrong or damaged weights in the engine",
        "possible",
    ),
    "another temperature later": (
        series([1e-4] * 9 + noisy(0.1, 6), 0.3, 0.95),
        "another sampling temperature",
        "likely",
    ),
    "not a number": (series([1e-3, math.nan, math.nan]), "log-probs that are not finite", "likely"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cause_of_each_pattern_is_named(case):
    gaps, name, certainty = CASES[case]
    cause = diagnose(gaps[0], gaps, CONFIG)
    assert (cause.name, cause.certainty) == (name, certainty), cause.text


def test_configured_staleness_is_named_with_its_setting():
    config = settings("rollout.max_staleness=1", "algorithm.correction.name=token_truncate")
    gaps = series([1e-13, *noisy(0.2, 8)])
    cause = diagnose(gaps[0], gaps, config)
    assert cause.name == "stale weights"
    assert "lower rollout.max_staleness (now 1)" in cause.remedy
    later = diagnose(gaps[0], series([1e-13, *noisy(1e-3, 6), *noisy(2.0, 4)]), config)
    assert later.name == "wrong or damaged weights in the engine", "not from the second step on"


def test_a_temperature_is_estimated():
    gaps = series(noisy(0.1, 8), slope=-0.25, r2=0.97)
    assert "a temperature of about 0.75;" in diagnose(gaps[0], gaps, CONFIG).evidence


def test_slopes_that_change_are_no_temperature():
    gaps = [Gap(i, 0.05, slope, 0.9) for i, slope in enumerate((0.1, 0.3, -0.2, 0.4), 1)]
    assert diagnose(gaps[0], gaps, CONFIG).name == "lower precision of the engine"


@pytest.mark.parametrize("case", CASES)
def test_remedies_name_settings_that_there_are(case):
    gaps, _, _ = CASES[case]
    for config in (CONFIG, settings("rollout.max_staleness=2", "algorithm.correction.name=token_mask")):
        text = diagnose(gaps[0], gaps, config).text
        named = re.findall(r"\b(?:rollout|optim|kernels|algorithm|model)\.[a-z_.]*[a-z_]", text)
        assert named, text
        for key in named:
            value = config
            for part in key.split("."):
                value = getattr(value, part)
