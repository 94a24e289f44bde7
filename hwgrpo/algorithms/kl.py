"""Per-token estimators of KL(policy || reference) from the log-probs of sampled tokens.

k3 is here, the others are in `kl_variants.py`; `hwgrpo/catalog.py` lists them by name. Throughout, x = ref_logprob -
logprob. k1, k2, k3 are Schulman's (Approximating KL Divergence, 2020). The settings' defaults are verl's `kl_penalty`;
without clamps k3 is TRL's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from hwgrpo.catalog import CLAMPED_KL_ESTIMATORS, EXACT_KL, KL_ESTIMATORS
from hwgrpo.config.bound_arguments import bind_arguments
from hwgrpo.config.schema import KlConfig
from hwgrpo.torch_settings import with_kept_torch_settings
from hwgrpo.user_code import names_a_file

KLFunction = Callable[..., torch.Tensor]


def build_kl(config: KlConfig) -> KLFunction:
    """Return the estimator `(logprob_N, ref_logprob_N) -> kl_N` that the settings name, with its clamps.

    `exact` is `(full_kl_N) -> kl_N`.

    Raises:
        ConfigError: there is no such estimator, or it takes other arguments.
    """
    function = KL_ESTIMATORS.load(config.estimator)
    if config.estimator in CLAMPED_KL_ESTIMATORS:
        return functools.partial(function, input_clamp=config.input_clamp, output_clamp=config.output_clamp)
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
