"""Per-token estimators of KL(policy || reference) from the log-probs of sampled tokens.

`hwgrpo/catalog.py` lists them by name. Throughout, x = ref_logprob - logprob. k1, k2, k3 are Schulman's (Approximating
KL Divergence, 2020). The settings' defaults are verl's `kl_penalty`; without clamps k3 is TRL's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from hwgrpo.catalog import EXACT_KL, KL_ESTIMATORS
from hwgrpo.config.bound_arguments import bind_arguments
from hwgrpo.config.schema import KlConfig
from hwgrpo.support.torch_settings import with_kept_torch_settings
from hwgrpo.user_code import names_a_file

KLFunction = Callable[..., torch.Tensor]


def build_kl(config: KlConfig) -> KLFunction:
    """Return the estimator `(logprob_N, ref_logprob_N) -> kl_N` that the settings name, with the settings it reads.

    `exact` is `(full_kl_N) -> kl_N`.

    Raises:
        ConfigError: there is no such estimator, or it takes other arguments.
    """
    function = KL_ESTIMATORS.load(config.estimator)
    built_in = KL_ESTIMATORS.built_in.get(config.estimator)
    if built_in is not None and built_in.reads:
        return functools.partial(function, **{name: getattr(config, name) for name in built_in.reads})
    bound = bind_arguments(function, config.kwargs, 1 if config.estimator == EXACT_KL else 2, "algorithm.kl.kwargs")
    if names_a_file(config.estimator):
        return with_kept_torch_settings(bound, f"algorithm.kl.estimator={config.estimator!r}")
    return bound


def k3(
    logprob_N: torch.Tensor,
    ref_logprob_N: torch.Tensor,
    *,
    input_clamp: float | None,
    output_clamp: float | None,
) -> torch.Tensor:
    """e^x - x - 1: never negative, low variance. Its expected gradient is that of KL(reference || policy).

    Args:
        logprob_N, ref_logprob_N: [N] log-probs of the sampled tokens.
        input_clamp: x is kept within plus or minus this; None: not at all.
        output_clamp: the result is kept within plus or minus this; None: not at all. At 10 the gradient vanishes for
            x > 2.6109, tokens that the policy pushed more than 2.6 nats below the reference, and for x < -11.

    Returns:
        [N].
    """
    x = ref_logprob_N - logprob_N
    if input_clamp is not None:
        x = x.clamp(-input_clamp, input_clamp)
    kl = x.exp() - x - 1
    return kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)


def k1(logprob_N: torch.Tensor, ref_logprob_N: torch.Tensor) -> torch.Tensor:
    """-x: unbiased value, but as a loss its gradient is zero in expectation; use `k1+` or `k2` to regularise."""
    return logprob_N - ref_logprob_N


def absolute(logprob_N: torch.Tensor, ref_logprob_N: torch.Tensor) -> torch.Tensor:
    """|x|."""
    return (logprob_N - ref_logprob_N).abs()


def k2(logprob_N: torch.Tensor, ref_logprob_N: torch.Tensor) -> torch.Tensor:
    """x^2 / 2: its expected gradient is that of KL(policy || reference)."""
    return (logprob_N - ref_logprob_N).square() * 0.5


def k1_plus(logprob_N: torch.Tensor, ref_logprob_N: torch.Tensor) -> torch.Tensor:
    """The value of k1 with the gradient of k2, in expectation that of KL(policy || reference)."""
    return _straight_through(k1(logprob_N, ref_logprob_N), logprob_N, ref_logprob_N)


def k3_plus(
    logprob_N: torch.Tensor,
    ref_logprob_N: torch.Tensor,
    *,
    input_clamp: float | None,
    output_clamp: float | None,
) -> torch.Tensor:
    """The value of k3 with the gradient of k2, which no clamp cuts off."""
    value_N = k3(logprob_N.detach(), ref_logprob_N, input_clamp=input_clamp, output_clamp=output_clamp)
    return _straight_through(value_N, logprob_N, ref_logprob_N)


def exact(full_kl_N: torch.Tensor) -> torch.Tensor:
    """sum over the vocabulary of p (log p - log p_ref), which the kernels compute with its gradient.

    Args:
        full_kl_N: [N] `TokenStats.full_kl`.
    """
    return full_kl_N


def _straight_through(value_N: torch.Tensor, logprob_N: torch.Tensor, ref_logprob_N: torch.Tensor) -> torch.Tensor:
    """Return `value_N` with the gradient (logprob - ref_logprob) d logprob.

    The zero that carries the gradient is a product, not `k2 - k2.detach()`: adding a large k2 to a small value and
    taking it away again would round the value.
    """
    slope_N = (logprob_N - ref_logprob_N).detach()
    return value_N.detach() + slope_N * (logprob_N - logprob_N.detach())
