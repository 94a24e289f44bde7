"""Bounds for the rounding difference of two computations, from the summed values, on any processor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor

CONFIDENCE = 4.0
"""Standard deviations: one comparison in 16,000 exceeds them, and a test makes a few dozen independent ones."""


def bound(*, terms: int = 128, sums: int = 64, dtype: torch.dtype = torch.float32) -> float:
    """Return how far two computations may differ, as a share of the magnitude of what they sum.

    A sum rounds after each of its terms, by at most u = eps / 2 of what it has so far. The errors are as good as
    independent, so a sum of n terms is off by about sqrt(n) u times their magnitude, in whatever order and in however
    wide vectors a processor adds them (Higham and Mary, "A new approach to probabilistic rounding error analysis",
    2019, theorem 2.4: the same with a factor for the confidence). A value that has passed k such sums, one after the
    other, has k such errors, which add up as sqrt(k); and both computations have theirs: sqrt(2).

    The defaults are those of a step of the tests' models. No sum there is longer than 128 terms: tokens of a batch,
    widths, vocabularies. The longest way is 2 layers of 13 sums or elementwise steps (two norms, rotation, seven
    products, softmax, gate, residuals), and 6 around them, forward and again backward: 64.

    Args:
        terms: of the longest sum.
        sums: passed one after the other, forward and backward.
        dtype: of the computation; of the less exact one where they differ.
    """
    return CONFIDENCE * math.sqrt(2 * terms * sums) * torch.finfo(dtype).eps / 2


STEP = bound()
"""Of a step of a tiny model in fp32: 3e-5."""
BF16 = bound(terms=1, dtype=torch.bfloat16)
"""Of a step in bf16, 0.18: products sum in fp32, and only what enters and leaves them is rounded."""
BF16_FLIP = torch.finfo(torch.bfloat16).eps / math.sqrt(32)
"""Of log-probs by weights that are rounded to bf16 after an update, 1.4e-3.

Masters that differ in their last bit may lie on both sides of a rounding boundary; that moves one of the 32 terms of a
product by eps.
"""

GENTLE = ("optim.eps=1e-2", "optim.lr=2e-3")
"""AdamW that does not turn rounding of near-zero gradients into full steps, as it does with a small eps."""
PROBE = "rollout/probe_logprob_diff"
LOGITS = 10.0
"""As large as logits of tiny models are, and the log-prob of an unlikely token."""


def drift(steps: int) -> float:
    """Return how far metrics and weights may differ after GENTLE updates of one batch or more each.

    An update moves a weight by at most lr / eps = 0.2 of its gradient's error, and the next gradient, of a loss whose
    curvature is about 1, has that error beside its own: 1 + 0.2 times as much with each update.
    """
    return STEP * 1.2**steps


def gaps(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return how far each gradient is from the expected one, as a share of the magnitude of its summands.

    The error of a gradient follows its summands and not its value, which cancels: softmax does not depend on what all
    scores have in common, so that the gradient of a key's bias is zero but for rounding, however large the terms are
    that make it up. A gradient's summands are the backward signal of its layer times activations that norms keep
    near 1, for a bias as for the weight beside it. So the magnitude of n entries is taken for at least sqrt(n) times
    the root mean square of all entries of the model; where a gradient itself is larger, it is its own measure.

    Args:
        found: gradients by parameter; weights and optimizer states are compared alike.
        expected: of the same parameters, more exact or of another way to compute them.
    """
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    entries = sum(true.numel() for true in expected.values())
    rms = math.sqrt(sum(float(true.double().square().sum()) for true in expected.values()) / max(entries, 1))
    result = {}
    for name, true in expected.items():
        assert found[name].shape == true.shape, name
        apart = float((found[name].double() - true.double()).norm())
        scale = max(float(true.double().norm()), rms * math.sqrt(true.numel()))
        result[name] = apart / scale if scale else apart
    return result


def assert_gradients_close(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], limit: float = STEP, what: str = ""
) -> None:
    """Compare gradients of one model by the magnitude of their summands (see `gaps`)."""
    for name, gap in gaps(found, expected).items():
        assert gap <= limit, f"{what}{name}: {gap:.2e} apart, more than {limit:.1e}"


def assert_values_close(found: Tensor, expected: Tensor, limit: float = STEP, what: str = "") -> None:
    """Compare log-probs, entropies or losses, each entry, by the largest magnitude that is among them.

    A log-prob is a difference of logits, which are as large as the most unlikely token's is; one near 0 has their
    error. Below 1 the magnitude is taken for 1: what is summed are advantages and ratios near 1.
    """
    assert found.shape == expected.shape, what
    apart = (found.detach().double() - expected.detach().double()).abs()
    if apart.numel():
        scale = max(1.0, float(expected.detach().abs().max()))
        gap = float(apart.max()) / scale
        assert gap <= limit, f"{what}: {gap:.2e} apart, more than {limit:.1e}"


def assert_updates_close(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], limit: float = STEP, what: str = ""
) -> None:
    """Compare what updates have left: entries KIND.PARAMETER of one kind with each other, the rest as values.

    `sum.*` are sums over tokens, each of magnitude 1 or more, so `sum.tokens` is the least magnitude of all of them.
    """
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    sums = float(expected.get("sum.tokens", torch.ones(())))
    for kind, group in groupby(sorted(expected, key=_kind), _kind):
        names = list(group)
        if kind in ("", "sum"):
            for name in names:
                share = sums if kind == "sum" else 1.0
                assert_values_close(found[name] / share, expected[name] / share, limit, what + name)
        else:
            ours, theirs = ({name: values[name] for name in names} for values in (found, expected))
            assert_gradients_close(ours, theirs, limit, what)


def assert_metrics_close(
    found: Sequence[Mapping[str, Any]],
    expected: Sequence[Mapping[str, Any]],
    limit: float,
    without: tuple[str, ...] = (),
) -> None:
    """Compare the lines of metrics of two runs, all but those whose name starts as `without` says.

    Probes of applied weights are left out: only a sampler with weights of its own is probed, as under a strategy that
    shards the policy's.

    What is summed in a metric are advantages, ratios and rewards near 1, and log-probs in two kinds of them: those of
    the correction, which one unlikely response decides, and the norm of gradients that nearly cancel within groups.
    """
    lines = [[{k: v for k, v in line.items() if k != PROBE} for line in run] for run in (found, expected)]
    for ours, theirs in zip(*lines, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if not (without and name.startswith(without)):
                within = limit * (LOGITS if name.startswith(("rollout_corr/", "actor/grad_norm")) else 1.0)
                assert ours[name] == pytest.approx(value, rel=within, abs=within), (theirs["step"], name)


def _kind(name: str) -> str:
    """Return what an entry is of its parameter: `grad`, `weight`, `piece.exp_avg`; nothing for a value."""
    first, dot, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "piece" else first * bool(dot)
