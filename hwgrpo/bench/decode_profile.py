"""Where a decode step's time goes: by rows and capacity, with and without device graphs, and its sampling alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from hwgrpo_backends.device import Device
from hwgrpo_backends.graphs import Recorder

from hwgrpo.bench.kernels.clock import Clock, Samples
from hwgrpo.bench.times import Times
from hwgrpo.observe.kernel_table import Kernel, longest_kernels, profiled
from hwgrpo.rollout.local.lean_step import LeanRows
from hwgrpo.rollout.local.token_sampling import draw

FILTERS: Mapping[str, Mapping[str, Any]] = {"all tokens": {}, "top_p": {"top_p": 0.95}, "top_k": {"top_k": 50}}
PROFILED = 3
"""Decode steps in the kernel table."""


@dataclass
class DecodeTimes:
    """Median milliseconds of a number of rows at a capacity of the response buffers."""

    rows: int
    capacity: int
    """Tokens per response, which the buffers hold; with device graphs and no kernel, attention reads all they hold."""
    prefill_ms: float
    launched_ms: float
    """A step whose kernels Python launches one by one, from an idle device to an idle device."""
    device_ms: float
    """The same step without the host's time: its kernels were launched behind other work."""
    record_ms: float | None = None
    replay_ms: float | None = None
    """A step as a device graph; None: this device has none."""


@dataclass
class DecodeProfile:
    """What was measured of a model's decode steps."""

    samples: int
    prompt_tokens: int
    steps: list[DecodeTimes] = field(default_factory=list)
    draw_ms: dict[str, float] = field(default_factory=dict)
    """Filter -> sampling of a token per row, of the largest number of rows."""
    kernels: list[Kernel] = field(default_factory=list)
    """Of `PROFILED` steps with their sampling, at the largest number of rows and capacity."""


def profile_decode(
    model: Any,
    device: Device,
    rows: Sequence[int],
    capacities: Sequence[int],
    *,
    samples: int = 8,
    prompt_tokens: int = 9,
    repeat: int = 20,
    recorder: Recorder | None = None,
    report: Callable[[DecodeProfile], None] = lambda _: None,
) -> DecodeProfile:
    """Measure decode steps.

    Args:
        model: a causal LM that the lean step supports, in evaluation mode, on the device.
        device: the device.
        rows: numbers of responses that are decoded together.
        capacities: response tokens.
        samples: responses per prompt.
        prompt_tokens: tokens of each prompt.
        repeat: timed steps; a few before them warm up.
        recorder: makes device graphs; None: none are measured.
        report: called with the results so far after each measurement.
    """
    found = DecodeProfile(samples, prompt_tokens)
    clock = Clock(device)

    def measured(work: Callable[[], Any], times: int = repeat) -> Samples:
        for _ in range(min(2, times)):
            work()
        taken = clock.samples()
        for _ in range(times):
            clock.measure(taken, work)
        return taken

    def once_ms(work: Callable[[], Any]) -> tuple[float, Any]:
        taken = Times()  # the clock runs its work twice
        with taken.measure(device.synchronize):
            result = work()
        return taken.wall_s[0] * 1e3, result

    with torch.no_grad():
        for count in sorted(rows):
            for capacity in sorted(capacities):
                decoded = LeanRows(model, device.torch_device, fixed=True)
                prompts = different_prompts(model, count // samples, prompt_tokens)
                decoded.free(decoded.prefill(prompts)[0])
                prefill_ms, (numbers, _) = once_ms(partial(decoded.prefill, prompts))
                fill(decoded, numbers, capacity, samples)
                token = torch.arange(count, device=device.torch_device) % prompt_tokens
                step = partial(decoded.compute, token)
                launched = measured(step, max(repeat // 4, 1))
                times = DecodeTimes(
                    count, capacity, prefill_ms, median(launched.times.wall_s) * 1e3, median(launched.seconds) * 1e3
                )
                found.steps.append(times)
                run, recording = step, None
                if recorder is not None:
                    times.record_ms, recording = once_ms(partial(recorder, step))
                    times.replay_ms = median(measured(recording.replay).seconds) * 1e3
                    run = recording.replay
                report(found)
                if count == max(rows) and capacity == max(capacities):
                    logits, uniform = step().clone(), torch.rand(count, device=device.torch_device)
                    for name, filters in FILTERS.items():
                        sample = partial(draw, logits, uniform, **filters)
                        found.draw_ms[name] = median(measured(sample, max(repeat // 4, 1)).seconds) * 1e3
                    with profiled(device.synchronize) as profiler:
                        for _ in range(PROFILED):
                            run()
                            draw(logits, uniform)
                    found.kernels = longest_kernels(profiler)
                    report(found)
                if recording is not None:
                    recording.release()
    return found


def different_prompts(model: Any, count: int, length: int) -> list[list[int]]:
    """Return different prompts of one length."""
    return [[(i * 7 + j) % model.config.vocab_size for j in range(length)] for i in range(count)]


def fill(decoded: LeanRows, prompts: Sequence[int], capacity: int, samples: int) -> None:
    """Advance the responses to the last token that their buffers hold, without computing the others' values."""
    source = ~np.array(prompts).repeat(samples)
    decoded.arrange(source, np.full(len(source), capacity))
    for _ in range(capacity):
        decoded.advance()
