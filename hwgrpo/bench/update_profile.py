"""Passes of an update by layout and attention: the first, those after it, scoring, and batches of other lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from hwgrpo_backends.device import Device

from hwgrpo.bench.layout_comparison import possible_layout
from hwgrpo.bench.times import Times
from hwgrpo.observe.kernel_table import Kernel, longest_kernels, profiled
from hwgrpo.ragged import offsets_of
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.values import TrainBatch


@dataclass
class PassTimes:
    """Milliseconds of the passes over one batch, in one layout with one attention."""

    layout: str
    cudnn: bool
    """Whether torch's attention may choose cuDNN, which builds a plan for each new shape."""
    reason: str = ""
    """Why it could not be measured; empty: it was."""
    first_ms: float | None = None
    steady_ms: float | None = None
    score_first_ms: float | None = None
    score_ms: float | None = None
    ragged_new_ms: list[float] = field(default_factory=list)
    """The first pass over each of several batches with random lengths."""
    ragged_again_ms: list[float] = field(default_factory=list)
    """The second pass over each."""
    peak_gib: float | None = None
    kernels: list[Kernel] = field(default_factory=list)
    """Of one pass forward and backward over the first batch; empty: not profiled."""


WARM_UP = 2**20
"""Seed of a batch that is not measured."""


def profile_update(
    update: PolicyUpdate,
    device: Device,
    *,
    layouts: Sequence[str],
    cudnn: Sequence[bool] = (True, False),
    groups: int = 3,
    prompt_tokens: int = 9,
    response_tokens: int = 512,
    repeat: int = 3,
    ragged: int = 4,
    report: Callable[[list[PassTimes]], None] = lambda _: None,
) -> list[PassTimes]:
    """Measure gradients and log-probs of a run's update; its weights stay as they are.

    Wall time from an idle device to an idle device, with the host's own work, as a training step has it.

    Args:
        update: of a run in one process.
        device: the device.
        layouts: names of layouts.
        cudnn: whether cuDNN's attention is allowed, one round each.
        groups: prompts of a batch; `rollout.n` responses each.
        prompt_tokens: tokens of each prompt, of the batch with equal lengths.
        response_tokens: tokens of each response, of that batch; the longest of the others.
        repeat: passes after the first.
        ragged: batches with random lengths.
        report: called with the results so far after each layout.
    """
    samples = update.config.rollout.n
    vocabulary = update.policy.base.config.get_text_config().vocab_size
    sizes = (groups, samples, prompt_tokens, response_tokens, vocabulary)
    found: list[PassTimes] = []
    for number, allowed in enumerate(cudnn):
        seeds = range(1 + number * ragged, 1 + (number + 1) * ragged)  # new lengths in each round
        batches = [random_batch(*sizes, WARM_UP), random_batch(*sizes), *(random_batch(*sizes, seed) for seed in seeds)]
        for name in layouts:
            times = PassTimes(name, allowed)
            found.append(times)
            layout, times.reason = possible_layout(update, device, name)
            if layout is not None:
                try:
                    with cudnn_attention(allowed):
                        _measure(replace(update, layout=layout), device, batches, repeat, times, allowed == cudnn[-1])
                except RuntimeError as error:  # out of memory, or an operation that the device lacks
                    times.reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                    update.strategy.discard_gradients()
                    device.empty_cache()
            report(found)
    return found


def _measure(
    update: PolicyUpdate, device: Device, batches: Sequence[TrainBatch], repeat: int, times: PassTimes, profile: bool
) -> None:
    """Measure one layout: passes over the second batch, then over the others; with `profile` its kernels, too."""

    def gradient(batch: TrainBatch) -> None:
        update.accumulate_gradients(batch, range(len(batch)))
        update.strategy.discard_gradients()

    def milliseconds(work: Callable[[TrainBatch], Any], batch: TrainBatch) -> float:
        taken = Times()
        with taken.measure(device.synchronize):
            work(batch)
        return taken.wall_s[0] * 1e3

    warm_up, equal, *ragged = batches
    with cudnn_attention(False):
        gradient(warm_up)  # compiles and allocates what all rounds share
    device.reset_peak()
    times.first_ms = milliseconds(gradient, equal)
    times.steady_ms = median(milliseconds(gradient, equal) for _ in range(repeat))
    times.score_first_ms = milliseconds(update.score, equal)
    times.score_ms = median(milliseconds(update.score, equal) for _ in range(repeat))
    peak = device.memory().peak
    times.peak_gib = None if peak is None else peak / 2**30
    for batch in ragged:
        times.ragged_new_ms.append(milliseconds(gradient, batch))
        times.ragged_again_ms.append(milliseconds(gradient, batch))
    if profile:
        with profiled(device.synchronize) as profiler:
            gradient(equal)
        times.kernels = longest_kernels(profiler)


def random_batch(
    groups: int, samples: int, prompt_tokens: int, response_tokens: int, vocabulary: int, seed: int | None = None
) -> TrainBatch:
    """Return a batch of random tokens with advantages of 1 and -1 in turn.

    Args:
        groups: prompts.
        samples: responses to each.
        prompt_tokens: tokens of each prompt; with a seed, between half of it and 40 more.
        response_tokens: tokens of each response; with a seed, between a third of it and all.
        vocabulary: number of token ids.
        seed: of the lengths; None: all are equal.
    """
    draw = torch.Generator().manual_seed(seed or 0)
    count = groups * samples
    lengths, prompts = torch.full((count,), response_tokens), torch.full((groups,), prompt_tokens)
    if seed is not None:
        lengths = torch.randint(max(response_tokens // 3, 1), response_tokens + 1, (count,), generator=draw)
        prompts = torch.randint(max(prompt_tokens // 2, 1), prompt_tokens + 40, (groups,), generator=draw)
    return TrainBatch(
        prompt_index=torch.arange(groups).repeat_interleave(samples),
        tokens=torch.randint(vocabulary, (int(lengths.sum()),), generator=draw),
        offsets=offsets_of(lengths),
        logprobs=torch.zeros(int(lengths.sum())),
        prompt_tokens=torch.randint(vocabulary, (int(prompts.sum()),), generator=draw),
        prompt_offsets=offsets_of(prompts),
        advantages=1.0 - 2.0 * (torch.arange(count) % 2),
    )


@contextmanager
def cudnn_attention(allowed: bool) -> Iterator[None]:
    """Allow or forbid cuDNN in torch's attention, which has an effect on NVIDIA's devices only."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
