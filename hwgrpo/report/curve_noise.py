"""Whether the gap between two curves is larger than the noise of each.

A curve is a level that drifts, plus noise: `x_t = level_t + e_t`, `level_t = level_(t-1) + slope + u_t`, with the
variances s^2 of `e` and q of `u`. Both are estimated from the curve's own steps by maximum likelihood; for q it is the
upper end of its 95 % interval, since a curve that happens not to drift must not make noise look small. Two runs that
start from the same weights and then sample differently have a gap of variance `s_a^2 + s_b^2 + n (q_a + q_b)` after n
steps. Here q is that of the steadier run: a jump in one of them is what is looked for, not noise.
Source: Harvey 1989, Forecasting, Structural Time Series Models and the Kalman Filter, sections 2.4 and 4.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

FEWEST = 4
"""Values of a curve from which its noise is estimated."""
FALSE_ALARMS = 0.01
"""Share of comparisons of two equally distributed runs in which some metric may seem to part."""
_RATIOS = np.concatenate([[0.0], np.geomspace(1e-7, 1e4, 45)])
"""Candidates for q / s^2."""
_INTERVAL = 2.706
"""Twice the log-likelihood below its maximum, at the upper end of the interval: chi-square of 1, one-sided 95 %."""


@dataclass(frozen=True)
class CurveNoise:
    """Noise of one curve."""

    noise: float
    """s^2: variance of a value about its level."""
    drift: float
    """q: variance of the level's change from one value to the next."""
    freedom: float
    """Degrees of freedom of the estimate."""


@dataclass(frozen=True)
class GapTest:
    """Result for one metric."""

    index: int | None
    """First value from which the curves part; None: the gap is within noise."""
    largest: float
    """Largest mean gap of a window, in its standard errors."""
    limit: float
    """Standard errors from which a gap counts."""
    smallest: float
    """Smallest gap that would count if it were the same at all values."""


def estimate_noise(values: ArrayLike) -> CurveNoise:
    """Return the noise of a curve.

    Args:
        values: [n] finite, n >= FEWEST.
    """
    x = np.asarray(values, dtype=float)
    changes = np.diff(x) - (x[-1] - x[0]) / max(1, len(x) - 1)  # about their mean, the slope
    freedom = len(x) - 2
    scale = float(changes @ changes) / max(1, freedom)
    if scale == 0.0 or not math.isfinite(scale):
        return CurveNoise(scale, scale, freedom)
    gains, factors = _filter(len(x))
    x = np.concatenate([[0.0], np.cumsum(changes)]) / math.sqrt(scale)
    level, squares = np.zeros(len(_RATIOS)), np.zeros(len(_RATIOS))
    for t in range(1, len(x)):
        innovation = x[t] - level
        squares += innovation**2 / factors[t]
        level = level + gains[t] * innovation
    noise = squares / freedom
    fit = -(len(x) - 1) * np.log(noise) - np.log(factors[1:]).sum(axis=0)  # twice the log-likelihood
    best = int(np.flatnonzero(fit >= fit.max() - _INTERVAL)[-1])
    noise_here = float(noise[best]) * scale
    return CurveNoise(noise_here, noise_here * float(_RATIOS[best]), freedom)


@lru_cache(maxsize=8)
def _filter(count: int) -> tuple[Any, Any]:
    """Return gains and variances of the innovations of a Kalman filter, [count, ratios] each; row 0 is not used."""
    gains, factors = np.ones((2, count, len(_RATIOS)))
    spread = np.ones(len(_RATIOS))
    for t in range(1, count):
        spread = spread + _RATIOS
        factors[t] = spread + 1
        gains[t] = spread / factors[t]
        spread = gains[t]
    return gains, factors


def compare_curves(gaps: ArrayLike, a: CurveNoise, b: CurveNoise, *, start: int, elapsed: int, tests: int) -> GapTest:
    """Return from where two curves part by more than their noise.

    The mean gap of each window of 1, 2, 4, ... values is compared with its standard error. The limit is the quantile
    of Student's t at which all windows of all metrics together exceed it by chance in `FALSE_ALARMS` of comparisons.
    A single value is cut to the limit first: an outlier alone does not make curves part, two in a row do.

    Args:
        gaps: [n] finite.
        a, b: noise of the curves.
        start: first value that may differ.
        elapsed: steps of drift before it: 0 where the weights are still equal there.
        tests: metrics that are compared.
    """
    noise, drift = a.noise + b.noise, 2 * min(a.drift, b.drift)
    d = np.asarray(gaps, dtype=float)[start:]
    if len(d) == 0 or not d.any():
        return GapTest(None, 0.0, 0.0, 0.0)
    if noise + drift == 0.0:
        return GapTest(start + int(np.flatnonzero(d)[0]), math.inf, 0.0, 0.0)
    widths = [2**k for k in range(len(d).bit_length()) if 2**k <= len(d)]
    limit = t_quantile(FALSE_ALARMS / 2 / (tests * sum(len(d) - w + 1 for w in widths)), _freedom(a, b))
    steps = elapsed + np.arange(len(d))
    single = limit * np.sqrt(noise + drift * steps)
    d = np.clip(d, -single, single)
    sums = np.concatenate([[0.0], np.cumsum(d)])
    largest, ends = 0.0, []
    smallest = math.inf
    for w in widths:
        means = (sums[w:] - sums[:-w]) / w
        variance = noise / w + drift * (steps[: len(means)] + (w - 1) * (2 * w - 1) / (6 * w))
        if w > 1 or len(d) == 1:
            smallest = min(smallest, limit * math.sqrt(float(variance.min())))
        errors = np.divide(np.abs(means), np.sqrt(variance), out=np.zeros(len(means)), where=variance > 0)
        errors[(variance == 0) & (means != 0)] = math.inf
        largest = max(largest, float(errors.max()))
        above = np.flatnonzero(errors > limit * (1 + 1e-9))
        if len(above):
            ends.append((int(above[0]) + w - 1, -float(errors[above[0]]), int(above[0])))
    return GapTest(start + min(ends)[2] if ends else None, largest, limit, smallest)


def _freedom(a: CurveNoise, b: CurveNoise) -> float:
    """Return the degrees of freedom of the sum of two variances. Source: Welch 1947; Satterthwaite 1946."""
    first, second = a.noise + a.drift, b.noise + b.drift
    return (first + second) ** 2 / (first**2 / a.freedom + second**2 / b.freedom or math.ulp(0.0))


@lru_cache(maxsize=256)
def t_quantile(tail: float, freedom: float) -> float:
    """Return the value that Student's t exceeds with a probability.

    `t = sqrt(v) tan(angle)`, and the density of the angle is proportional to `cos(angle)^(v - 1)`.
    """
    v = min(freedom, 1e6)
    constant = math.exp(math.lgamma((v + 1) / 2) - math.lgamma(v / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        # towards the pole most of the mass is at the lower end, so the points are closer there
        rest = (math.pi / 2 - middle) * np.linspace(0, 1, 2001) ** 3
        density = np.cos(middle + rest) ** (v - 1)
        above = constant * float(((density[1:] + density[:-1]) / 2 * np.diff(rest)).sum())
        low, high = (middle, high) if above > tail else (low, middle)
    return math.sqrt(v) * math.tan((low + high) / 2)
