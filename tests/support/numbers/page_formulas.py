"""The loss of an update as docs/grpo.md writes it: response by response, in fp64, without any of hwgrpo's functions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

ARGUMENTS: dict[str, dict[str, float]] = {
    "vespo": {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
    "dppo_tv": {"cap": 20.0},
    "dppo_kl": {"cap": 20.0},
    "kl_cov": {"share": 2e-4, "coef": 0.1},
    "clip_cov": {"share": 2e-4, "low": 1.0, "high": 5.0},
    "dro": {"beta": 0.1},
}
"""Defaults of a loss's own arguments."""


@dataclass(frozen=True)
class Response:
    """A response of T tokens; all are [T] fp64, and `lp`, `entropy` and `full_kl` may have a gradient."""

    prompt: int
    advantage: float
    lp: Tensor
    entropy: Tensor
    old: Tensor
    ref: Tensor
    roll: Tensor
    full_kl: Tensor


def update_loss(algorithm: Any, responses: list[Response], max_response_tokens: int) -> Tensor:
    """Return the loss [] of an update of all these responses."""
    filled = [each for each in responses if len(each.lp)]
    policy = policy_terms(algorithm, filled)
    weights = token_weights(algorithm.aggregation, filled, max_response_tokens)
    total = torch.zeros((), dtype=torch.float64)
    bonus = bonus_weights(algorithm, filled)
    for each, term, weight, of_bonus in zip(filled, policy, weights, bonus, strict=True):
        token = term
        if algorithm.kl.coef:
            token = token + algorithm.kl.coef * kl_term(algorithm.kl, each)
        total = total + weight * (token - algorithm.entropy_coef * of_bonus * each.entropy).sum()
    return total


def policy_terms(algorithm: Any, responses: list[Response]) -> list[Tensor]:
    """Return policy loss times correction, 0 where a mask leaves a token out, [T] of each response."""
    arguments = ARGUMENTS.get(algorithm.loss.name, {}) | algorithm.loss.kwargs
    chosen = chosen_tokens(algorithm, arguments, responses)
    kept = kept_tokens(algorithm, responses)
    terms = []
    for each, selected, stays in zip(responses, chosen, kept, strict=True):
        term = policy_loss(algorithm.loss, arguments, each, selected) * correction(algorithm, each) * stays
        threshold = algorithm.off_policy_threshold
        if threshold is not None and each.advantage < 0 and float((each.roll - each.lp.detach()).mean()) > threshold:
            term = 0 * term
        terms.append(term)
    return terms


def policy_loss(loss: Any, arguments: dict[str, float], x: Response, selected: Tensor) -> Tensor:
    """Return the loss [T] of the tokens of a response, by the table of policy losses."""
    a, lp, d = x.advantage, x.lp, x.lp - x.old
    low, high, bound = loss.clip_low, loss.clip_high, loss.log_ratio_clamp
    rho = (d if bound is None else d.clamp(-bound, bound)).exp()
    fixed = rho.detach()
    if loss.name == "ppo_clip":
        term = clipped(a, rho, low, high, loss.delta)
        return term.clamp(max=-loss.dual_clip * a) if loss.dual_clip is not None and a < 0 else term
    if loss.name == "gspo":
        return clipped(a, (d.mean().detach() + lp - lp.detach()).clamp(max=10).exp(), low, high, loss.delta)
    if loss.name == "cispo":
        return -fixed.clamp(1 - low, 1 + high) * a * lp
    if loss.name == "sapo":
        tau = loss.tau_pos if a > 0 else loss.tau_neg
        return -a * torch.sigmoid(tau * (rho - 1)) * 4 / tau
    if loss.name == "gpg":
        return -a * lp
    if loss.name == "gmpo":
        e = d if a == 0 else d.clamp(max=high) if a > 0 else d.clamp(min=-low)
        return -a * (e.mean().detach() + e - e.detach()).exp()
    if loss.name == "vespo":
        w = fixed.log().sum().clamp(math.log(1e-8), 20).exp()
        k, slope = (arguments[f"{name}_{'pos' if a >= 0 else 'neg'}"] for name in ("k", "lambda"))
        return -(w**k * (slope * (1 - w)).exp()) * a * lp
    if loss.name == "topr":
        return -a * lp if a > 0 else -fixed.clamp(max=1) * a * lp
    if loss.name in ("dppo_tv", "dppo_kl"):
        new, old = lp.detach().exp(), x.old.exp()
        if loss.name == "dppo_tv":
            out = new - old > high if a > 0 else new - old < -low
        else:
            kl = old * (old / new).log() + (1 - old) * ((1 - old + 1e-8) / (1 - new + 1e-8)).log()
            out = (kl > high) & (new > old) if a > 0 else (kl > low) & (new < old)
        return -fixed.clamp(max=arguments["cap"]) * a * lp * (~out)
    if loss.name == "kl_cov":
        return -a * d.exp() + arguments["coef"] * selected * d.abs()
    if loss.name == "clip_cov":
        return clipped(a, d.exp(), low, high, None) * (1 - selected)
    assert loss.name == "dro", f"{loss.name} is not in the table of policy losses"
    return -a * lp + arguments["beta"] / 2 * d**2


def clipped(a: float, rho: Tensor, low: float, high: float, delta: float | None) -> Tensor:
    """Return max(-A rho, -A clamp(rho, 1 - low, 1 + high)), the first ratio capped at `delta`."""
    free = rho if delta is None else rho.clamp(max=delta)
    return torch.maximum(-a * free, -a * rho.clamp(1 - low, 1 + high))


def kl_term(kl: Any, each: Response) -> Tensor:
    """Return the KL [T] of a response, by the table of estimators."""
    if kl.estimator == "exact":
        return each.full_kl
    lp, x = each.lp, each.ref - each.lp
    bounded = x if kl.input_clamp is None else x.clamp(-kl.input_clamp, kl.input_clamp)
    k3 = bounded.exp() - bounded - 1
    k3 = k3 if kl.output_clamp is None else k3.clamp(-kl.output_clamp, kl.output_clamp)
    value = {"k1": -x, "abs": x.abs(), "k2": x**2 / 2, "k3": k3}[kl.estimator.rstrip("+")]
    if kl.estimator.endswith("+"):
        value = value.detach() - x.detach() * (lp - lp.detach())  # the gradient is -x
    return value * (lp - each.old).exp() if kl.times_ratio else value


def correction(algorithm: Any, each: Response) -> Tensor:
    """Return the importance weight [T] of the tokens of a response, 0 where `reject` leaves them out."""
    settings = algorithm.correction
    x = (each.old - each.roll).detach()
    over, _, how = settings.name.partition("_")
    x_weight = {"token": x, "sequence": x.sum().expand(len(x)), "geometric": x.mean().expand(len(x))}.get(over)
    if x_weight is None:
        weight = torch.ones_like(x)
    else:
        ratio = x_weight.clamp(-20, 20).exp()
        low, high = settings.low or 0.0, math.inf if settings.high is None else settings.high
        inside = (ratio >= low) & (ratio <= high)
        weight = ratio.clamp(low, high) if how == "truncate" else ratio * inside
        if algorithm.loss.name == "gmpo" and len(weight):
            weight = (weight + 1e-10).log().mean().exp().expand(len(x))
    for name, bounds in settings.reject.items():
        weight = weight * within(name, bounds, x.clamp(-20, 20))
    return weight


def within(name: str, bounds: Any, x: Tensor) -> Tensor:
    """Return [T] whether a statistic of `reject` is within its bounds."""
    if name == "veto":
        return (x.exp().min() >= bounds).expand(len(x))
    over, k = name.rsplit("_", 1)
    values = {"k1": -x, "k2": x**2 / 2, "k3": x.exp() - 1 - x}[k]
    reduced = {"token": lambda v: v, "seq_sum": Tensor.sum, "seq_mean": Tensor.mean, "seq_max": Tensor.max}[over](
        values
    )
    least, most = (math.log(each) for each in bounds) if k == "k1" else (-math.inf, bounds)
    return ((reduced >= least) & (reduced <= most)).expand(len(x))


def chosen_tokens(algorithm: Any, arguments: dict[str, float], responses: list[Response]) -> list[Tensor]:
    """Return [T] of each response: 1 at the tokens that kl_cov or clip_cov treats apart.

    Of clip_cov all candidates are, since chance selects a smaller share: give it `share=1`.
    """
    lengths = [len(each.lp) for each in responses]
    a, lp, old = joined([replace(each, lp=each.lp.detach()) for each in responses])
    found = torch.zeros_like(lp)
    if algorithm.loss.name in ("kl_cov", "clip_cov") and len(lp):
        covariance = (a - a.mean()) * (lp - lp.mean())
        if algorithm.loss.name == "kl_cov":
            count = max(1, int(len(lp) * arguments["share"]))
            found[sorted(range(len(lp)), key=lambda i: (-float(covariance[i]), i))[:count]] = 1
        else:
            rho = (lp - old).exp()
            out = ((a > 0) & (rho > 1 + algorithm.loss.clip_high)) | ((a < 0) & (rho < 1 - algorithm.loss.clip_low))
            found[(covariance > arguments["low"]) & (covariance < arguments["high"]) & ~out] = 1
    return list(found.split(lengths))


def kept_tokens(algorithm: Any, responses: list[Response]) -> list[Tensor]:
    """Return [T] of each response: 1 where neither `top_entropy_share` nor `m2po_threshold` leaves a token out."""
    lengths = [len(each.lp) for each in responses]
    entropy = torch.cat([torch.zeros(0, dtype=torch.float64), *(each.entropy.detach() for each in responses)])
    kept = torch.ones_like(entropy)
    if algorithm.top_entropy_share < 1 and len(entropy):
        kept = uncertain(entropy, algorithm.top_entropy_share)
    if algorithm.m2po_threshold is not None and len(entropy):
        squares = torch.cat([(each.old - each.roll).detach() ** 2 for each in responses])
        for i in squares.argsort(descending=True, stable=True)[:-1].tolist():
            if float(squares.mean() if not squares.isnan().any() else squares.nanmean()) < algorithm.m2po_threshold:
                break
            kept[i], squares[i] = 0, math.nan
    return list(kept.split(lengths))


def uncertain(entropy: Tensor, share: float) -> Tensor:
    """Return 1 for the share of tokens with the highest entropy, else 0."""
    quantile = torch.quantile(entropy, 1 - share)
    return (entropy >= quantile - 1e-5).double()  # the first tokens of a group are equal but for rounding


def bonus_weights(algorithm: Any, responses: list[Response]) -> list[Tensor]:
    """Return the weight of the entropy bonus, [T] of each response: its mean is 1."""
    lengths = [len(each.lp) for each in responses]
    entropy = torch.cat([torch.zeros(0, dtype=torch.float64), *(each.entropy.detach() for each in responses)])
    weight = torch.ones_like(entropy)
    if algorithm.top_entropy_share < 1 and len(entropy):
        weight = uncertain(entropy, algorithm.top_entropy_share)
    return list((weight / weight.mean()).split(lengths))


def joined(responses: list[Response]) -> tuple[Tensor, Tensor, Tensor]:
    """Return advantage, log-prob and old log-prob of all tokens."""
    none = torch.zeros(0, dtype=torch.float64)
    a = torch.cat([none, *(torch.full_like(each.lp, each.advantage) for each in responses)])
    return a, torch.cat([none, *(each.lp for each in responses)]), torch.cat([none, *(each.old for each in responses)])


def token_weights(aggregation: Any, responses: list[Response], max_response_tokens: int) -> list[float]:
    """Return the weight of every token of each response, by the table of aggregation modes."""
    lengths = [len(each.lp) for each in responses]
    tokens, sequences = sum(lengths), len(lengths)
    of_prompt = {each.prompt: 0 for each in responses}
    for each in responses:
        of_prompt[each.prompt] += len(each.lp)
    norm = aggregation.norm_length or max_response_tokens
    weight = {
        "token-mean": lambda each: 1 / tokens,
        "token-sum": lambda each: 1.0,
        "seq-mean-token-mean": lambda each: 1 / (len(each.lp) * sequences),
        "seq-mean-token-sum": lambda each: 1 / sequences,
        "seq-mean-token-sum-norm": lambda each: 1 / (sequences * norm),
        "prompt-mean": lambda each: 1 / (len(of_prompt) * of_prompt[each.prompt]),
    }[aggregation.name]
    return [weight(each) for each in responses]
