"""The comparison of a captured step with the same step on this machine, stage by stage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from hwgrpo.algorithms.token_advantages import TokenProbs
from hwgrpo.catalog import POLICY_LOSSES
from hwgrpo.config.schema import LossConfig
from hwgrpo.errors import ConfigError
from hwgrpo.models.layers import decoder_layers
from hwgrpo.models.rounding import unit_of_sum
from hwgrpo.replay.recomputed_rewards import decoded_texts, recompute
from hwgrpo.replay.replayed_model import ReplayedModel
from hwgrpo.replay.results import (
    KL,
    LOGPROBS,
    LOSS,
    NORM,
    OLD,
    PROBABILITIES,
    REFERENCE,
    SQUARE_SUMS,
    Passes,
    gradient_of,
    norm_of,
)
from hwgrpo.replay.rounding_effects import measure
from hwgrpo.support.stage_differences import Stage, compare_tensor, largest, least_tolerance, worst_of
from hwgrpo.training.captured_step import Parameter, entries_of, entry_places
from hwgrpo.training.code_files import checksums
from hwgrpo.training.strategies.muon import MuonAdamW
from hwgrpo.training.strategies.optimizer import total_norm
from hwgrpo.training.strategies.param_shard import adamw_state
from hwgrpo.training.update.train_batch import advantages_over_ranks, assemble
from hwgrpo.values import Rewards

OUTSIDE = "gradients, outside of layers"
WITHIN_BOUNDS = "ratios are within the clip bounds: clipping is not compared"
ADDED_LATER = ("old_logprobs", "ref_logprobs", "rollout_shares")
"""Columns of the batch that it gets after it was made."""


@dataclass(frozen=True)
class Comparison:
    """A captured step against the same step on this machine."""

    stages: tuple[Stage, ...]
    """In the order in which a step computes them; gradients from the last layer to the first."""
    notes: tuple[str, ...]
    """What was not compared, and why."""
    dtype: str
    layout: str


def compare(model: ReplayedModel) -> Comparison:
    """Run the step and compare each of its stages; the model's weights are updated at the end.

    Raises:
        ConfigError: the settings have another number of reward functions than the step.
    """
    functions, names = model.settings.config.reward.functions, [*model.captured.value("rewards.").per_function]
    if len(functions) != len(names):
        raise ConfigError(
            f"reward.functions has {len(functions)} functions, and the captured step has rewards of {len(names)}: "
            f"{', '.join(names)}; name as many"
        )
    saved, now = model.captured.facts["code"], checksums(model.settings.config)
    changed = [key for key, digest in saved.items() if key in now and now[key] != digest]
    notes = [*model.notes, *(f"the file of {key} has changed since the capture" for key in changed)]
    before = [*_texts_and_rewards(model, notes)]
    passes = Passes(model)
    notes += passes.notes
    results = passes.run()
    if passes.updates and not passes.clipped and _has_clip(model.settings.config.algorithm.loss):
        notes.append(WITHIN_BOUNDS)
    gradients = dict(passes.gradients()) if passes.updates else {}
    model.strategy.discard_gradients()
    policy = model.update.policy
    machine = model.captured.facts["machine"]
    there = machine.get("rounding") or unit_of_sum(getattr(torch, machine["dtype"]), policy.hidden_size)
    unit = max(unit_of_sum(policy.compute_dtype, policy.hidden_size), there)
    expected = passes.expected()
    effects = measure(passes, results, gradients, unit, _summands(passes, expected))
    tolerances = effects.tolerances

    def stage(name: str) -> Iterator[Stage]:
        if name in results:
            yield _compare(name, name, results[name], expected[name], tolerances[name])

    stages = [*before, *filter(None, (effects.repeatability,))]
    stages += [*stage(PROBABILITIES), *stage(SQUARE_SUMS), *stage(KL), *_advantages(model, notes)]
    stages += [*stage(OLD), *stage(REFERENCE), *stage(LOGPROBS), *stage(LOSS)]
    if passes.updates:
        stages += [*_gradients(model, gradients, tolerances), *_update(passes, tolerances, notes)]
    notes += model.update.pop_notes()
    return Comparison(
        tuple(stages), tuple(notes), str(policy.compute_dtype).removeprefix("torch."), model.update.layout.name
    )


def _has_clip(loss: LossConfig) -> bool:
    """Return whether a loss reads clip bounds; of one of the user's own that is not known."""
    built_in = POLICY_LOSSES.built_in.get(loss.name)
    return built_in is not None and "clip_high" in built_in.reads


def _summands(passes: Passes, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what each tensor is a sum of, or the tensor itself."""
    found = {**expected, LOSS: torch.cat([expected[LOSS], passes.batch.advantages.double()])}
    for each in passes.model.captured.parameters:
        if each.gradient is not None:
            found[gradient_of(each.name)] = each.gradient
            found[norm_of(each.name)] = torch.tensor([each.norm], dtype=torch.float64)
    return found | {NORM: torch.tensor([float(passes.model.captured.facts["update"]["norm"])])}


def _compare(stage: str, name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> Stage:
    """Compare a tensor; NaN and infinity are equal to themselves."""
    if actual.shape != expected.shape:
        return Stage(stage, math.inf, tolerance, f"{name}, shape {[*actual.shape]} instead of {[*expected.shape]}")
    same = ~expected.isfinite() & ((actual == expected) | (actual.isnan() & expected.isnan()))
    found = compare_tensor(stage, name, actual.masked_fill(same, 0), expected.masked_fill(same, 0), tolerance)
    return replace(found, index=()) if expected.numel() == 1 else found


def _texts_and_rewards(model: ReplayedModel, notes: list[str]) -> Iterator[Stage]:
    captured, settings = model.captured, model.settings
    completions, rewards = captured.value("completions."), captured.value("rewards.")
    texts = decoded_texts(captured, settings.config, model.tokenizer, model.update.policy.base)
    if texts is None:
        notes.append("texts are not decoded again: another engine, or a workflow, made them")
    else:
        different = [i for i, pair in enumerate(zip(texts, completions.texts, strict=True)) if pair[0] != pair[1]]
        place = (f"text of response {different[0]}", (different[0],)) if different else ("", ())
        yield Stage("texts", float(len(different)), 0.0, *place)
        completions = replace(completions, texts=texts)
    if captured.facts["converted_columns"]:
        names = ", ".join(captured.facts["converted_columns"])
        notes.append(f"columns that JSON holds as text or lists: {names}; rewards that read them may differ")
    recomputed = recompute(captured, settings, completions, model)
    notes += recomputed.notes
    if recomputed.failure is not None:
        yield Stage("rewards", math.inf, 0.0, f"a reward function that fails here: {recomputed.failure}")
    if recomputed.rewards is not None:
        yield _rewards(recomputed.rewards, rewards, complete=recomputed.complete)


def _rewards(found: Rewards, expected: Rewards, *, complete: bool) -> Stage:
    pairs = {f"reward {name}": (values, expected.per_function[name]) for name, values in found.per_function.items()}
    if complete:
        pairs["valid"] = found.valid.double(), expected.valid.double()
        pairs["total"] = found.total.where(found.valid, 0.0), expected.total.where(expected.valid, 0.0)
    return worst_of(
        _compare("rewards", name, actual, values, least_tolerance(values)) for name, (actual, values) in pairs.items()
    )


def _advantages(model: ReplayedModel, notes: list[str]) -> Iterator[Stage]:
    """Compare advantages of the captured rewards, then the batch made of the captured advantages."""
    captured, config, tensors = model.captured, model.settings.config, model.captured.tensors
    completions, rewards, batch = (captured.value(prefix) for prefix in ("completions.", "rewards.", "batch."))
    probs = None
    if "inputs.logprobs" in tensors:
        probs = TokenProbs(tensors["inputs.logprobs"], tensors["inputs.square_sums"])
    if config.trainer.stages:
        notes.append("stages of your own (trainer.stages) are not run: what they change differs")
    advantages, token_advantages = advantages_over_ranks(
        config.algorithm.advantage,
        config.reward.functions,
        completions,
        replace(rewards, total=tensors["inputs.total"]),
        model.strategy,
        probs,
        tensors.get("inputs.kl"),
    )
    per_token = tensors.get("token_advantages")
    found = [("advantages", advantages, tensors["advantages"])]
    if per_token is not None and token_advantages is not None:
        found.append(("advantages of tokens", token_advantages, per_token))
    yield worst_of(
        _compare("advantages", name, actual, expected, least_tolerance(expected)) for name, actual, expected in found
    )
    made = assemble(
        captured.prompts,
        completions,
        tensors["advantages"],
        tensors["trained"],
        per_token,
        temperature=batch.temperature,
    )
    columns, expected = (value.to_tensors("")[0] for value in (made, batch))
    # columns of an engine's own are captured with the batch alone
    names = [name for name in {**expected, **columns} if not name.startswith((*ADDED_LATER, "token_extras."))]
    none = torch.zeros(0)
    yield worst_of(
        _compare("batch", name, columns.get(name, none).double(), expected.get(name, none).double(), 0.0)
        for name in names
    )


def _gradients(
    model: ReplayedModel, gradients: Mapping[str, torch.Tensor], tolerances: Mapping[str, float]
) -> Iterator[Stage]:
    layers = decoder_layers(model.update.policy.base)
    owner = {id(p): number for number, layer in enumerate(layers, start=1) for p in layer.parameters()}
    place = {name: owner.get(id(p), len(layers) + 1) for name, p in model.parameters().items()}
    trained = sorted((each for each in model.captured.parameters if each.trained), key=lambda each: -place[each.name])
    for number, group in groupby(trained, key=lambda each: place[each.name]):
        stage = OUTSIDE if number > len(layers) else f"gradients, layer {number}"
        yield worst_of(each for parameter in group for each in _gradient(stage, parameter, gradients, tolerances))


def _gradient(
    stage: str, parameter: Parameter, gradients: Mapping[str, torch.Tensor], tolerances: Mapping[str, float]
) -> Iterator[Stage]:
    gradient, expected = gradients[parameter.name], parameter.gradient
    entries, norm = gradient_of(parameter.name), norm_of(parameter.name)
    assert expected is not None, entries
    yield _at_place(_compare(stage, entries, entries_of(gradient), expected, tolerances[entries]), parameter)
    norms = [torch.tensor([each], dtype=torch.float64) for each in (float(total_norm([gradient])), parameter.norm)]
    yield _compare(stage, norm, norms[0], norms[1], tolerances[norm])


def _at_place(compared: Stage, parameter: Parameter) -> Stage:
    """Return a comparison of entries with the place in the parameter in place of that among the entries."""
    if not compared.index:
        return compared
    place = entry_places(math.prod(parameter.shape))[compared.index[0]]
    return replace(compared, index=tuple(int(axis) for axis in torch.unravel_index(place, parameter.shape)))


def _update(passes: Passes, tolerances: Mapping[str, float], notes: list[str]) -> Iterator[Stage]:
    """Compare the gradient's norm, and the weights after a step with the captured entries of the gradient."""
    model, facts = passes.model, passes.model.captured.facts
    passes.accumulate_gradients()
    named = model.parameters()
    trained = [each for each in model.captured.parameters if each.trained]
    for each in trained:
        _write_entries(model.strategy.gradient(named[each.name]), each.gradient)
    clip, captured_norm = model.settings.config.optim.grad_clip, float(facts["update"]["norm"])
    tolerance = tolerances[NORM]
    clips = clip > 0 and captured_norm > clip - tolerance
    share = tolerance / captured_norm if clips and captured_norm else 0.0
    optimizer = model.strategy.optimizer
    reason = None
    if isinstance(optimizer, MuonAdamW):
        reason = "Muon mixes the entries of a gradient, of which some are captured"
    elif not model.weights.has_states:
        reason = f"{model.weights.place} has no optimizer states; --checkpoint names a checkpoint, which does"
    of_weights = {}
    if reason is None:
        for each in trained:
            of_weights[each.name] = _step_tolerance(each, optimizer, named[each.name], share)
    norm = passes.step()
    pair = [torch.tensor([value], dtype=torch.float64) for value in (norm, captured_norm)]
    yield _compare("gradient norm", NORM, pair[0], pair[1], tolerance)
    if reason is not None:
        notes.append(f"updated weights are not compared: {reason}")
        return
    compared = []
    for each in trained:
        assert each.after is not None, each.name
        values = entries_of(named[each.name]), each.after
        stage = _compare("updated weights", f"updated {each.name}", *values, of_weights[each.name])
        compared.append(_at_place(stage, each))
    yield worst_of(compared)


def _write_entries(gradient: torch.Tensor | None, entries: torch.Tensor | None) -> None:
    if gradient is None or entries is None:
        return
    with torch.no_grad():
        if not gradient.ndim:
            gradient.copy_(entries[0])
            return
        places = torch.unravel_index(entry_places(gradient.numel()).to(gradient.device), gradient.shape)
        gradient[places] = entries.to(gradient)


def _step_tolerance(each: Parameter, optimizer: Any, parameter: torch.nn.Parameter, share: float) -> float:
    """Return the tolerance of updated entries: fp32's rounding, and what a clip by another norm changes.

    Args:
        each: has the entries.
        optimizer: AdamW, with the states before the step.
        parameter: the parameter.
        share: the gradient's norm may differ by this share of itself.
    """
    assert each.gradient is not None
    floor = least_tolerance(each.before)
    if not share:
        return floor
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    state = adamw_state(optimizer, parameter, read_only=True)
    first, second = (entries_of(state[key]).double() for key in ("exp_avg", "exp_avg_sq"))
    (beta1, beta2), count = group["betas"], float(state["step"]) + 1

    def change(factor: float) -> torch.Tensor:
        gradient = each.gradient.double() * factor  # type: ignore[union-attr]
        mean = (beta1 * first + (1 - beta1) * gradient) / (1 - beta1**count)
        square = (beta2 * second + (1 - beta2) * gradient.square()) / (1 - beta2**count)
        return group["lr"] * mean / (square.sqrt() + group["eps"])

    moved = max(largest(change(1 + sign * share) - change(1.0)) for sign in (1, -1))
    return max(floor, floor + moved)
