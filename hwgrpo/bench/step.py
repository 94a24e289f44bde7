"""One training step of a recipe, stage by stage, and its update in every layout, all within the same rounds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from hwgrpo_backends.device import Device

from hwgrpo.bench.layout_comparison import checked_layouts, tolerance
from hwgrpo.bench.machine import machine_facts
from hwgrpo.bench.step_result import BatchShape, LayoutBench, StepBench, model_facts
from hwgrpo.bench.times import Times, total, turns
from hwgrpo.bench.work import counted_tokens, update_flops
from hwgrpo.observe.timing import Stopwatch
from hwgrpo.rollout.engine import Engine
from hwgrpo.training.feed.on_demand import OnDemand
from hwgrpo.training.feed.response_source import Batch
from hwgrpo.training.feed.scored_groups import NO_GROUPS
from hwgrpo.training.policy.auto_settings import micro_batch_tokens
from hwgrpo.training.policy.layouts import PADDED
from hwgrpo.training.run_parts import Run
from hwgrpo.training.stages.make_batch import ScoreBefore
from hwgrpo.training.stages.stage import Stages, StepState
from hwgrpo.training.step_stages import build_stages
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.values import PromptBatch, Sampling, TrainBatch

NO_ADVANTAGES = (
    "all groups have equal rewards, so no response has an advantage; "
    "the updates measured are of the same responses with advantages of 1 and -1 in turn"
)


def measure_step(
    run: Run,
    device: Device,
    names: Sequence[str],
    repeat: int,
    report: Callable[[str], None] = lambda _: None,
) -> StepBench:
    """Measure a step of a run that was not trained yet, and leave its weights and optimizer as they were.

    Every round generates the same responses from the same weights, runs the other stages, and then the update in each
    layout in turn, each from the same weights and optimizer states. One round before the others is not timed.

    Args:
        run: in one process.
        device: the device.
        names: layouts to compare. Padded is the reference and the run's own is part of the step, so
            both are measured in any case.
        repeat: rounds that are timed.
        report: called with the name of the next measurement.

    Raises:
        ConfigError: there is no layout of a name.
        RunError: the batch does not fit in padded rows, or its gradient is not finite.
    """
    update = run.update
    facts = machine_facts(device)  # before we add to the machine's load
    report("a first batch of responses")
    watch = RoundTimes(device.synchronize)
    step = repeatable_step(run, watch)
    first = before_update(step)
    batch = first.batch
    notes = list(run.engine.notes)
    if not batch.advantages_R.any():
        batch = replace(batch, advantages=1.0 - 2.0 * (torch.arange(len(batch)) % 2), token_advantages=None)
        notes.append(NO_ADVANTAGES)

    report("layouts compared with padded rows")
    chosen = update.layout.name
    checked = checked_layouts(update, device, batch, list(dict.fromkeys(("padded", *names, chosen))))
    timed = [(bench, layout) for bench, layout in checked if layout is not None]

    stages: dict[str, Times] = {}
    idle = _idle_stages(run, step)
    start = Start(update, batch)
    try:
        for number in range(repeat + 1):
            report(f"round {number} of {repeat}" if number else "a round to warm up")
            if number:  # the first batch was their warm-up
                before_update(step)
            for bench, layout in turns(timed, number):
                _update(replace(update, layout=layout), batch, device, bench, warm_up=number == 0)
                start.restore()
            step.sync(StepState(1))
            for stage, (wall, cpu) in watch.end_round().items() if number else ():
                if stage not in idle:
                    times = stages.setdefault(stage, Times())
                    times.wall_s.append(wall)
                    times.cpu_s.append(cpu)
    finally:
        start.forget()

    layouts = [bench for bench, _ in checked]
    padded = layouts[0].times.median
    for bench in layouts:
        bench.ratio = padded / bench.times.median if padded and bench.times.median else None
    own = next(bench for bench in layouts if bench.name == chosen)
    return StepBench(
        machine=facts | {"threads": torch.get_num_threads()},
        model=model_facts(run.config, update.policy, device),
        batch=BatchShape(
            prompts=len(first.prompts),
            samples=run.sampling.n,
            prompt_tokens=float(batch.prompt_offsets.diff().double().mean()),
            response_tokens=len(batch.tokens),
            trained_tokens=int(
                batch.loss_lengths[torch.tensor(update.trained_sequences(batch, range(len(batch))))].sum()
            ),
            micro_batch_tokens=micro_batch_tokens(run.config, update.device),
        ),
        chosen=chosen,
        tolerance=tolerance(update.policy.compute_dtype),
        notes=notes,
        stages=stages,
        layouts=layouts,
        step=total([*stages.values(), own.times]) if own.state == "timed" else None,
    )


@dataclass
class SamePrompts:
    """Collector that samples anew to the same prompts in every round; see `Collector` for the methods."""

    prompts: PromptBatch
    engine: Engine
    sampling: Sampling
    exchanges = False
    kept = NO_GROUPS

    def collect(self, step: int) -> Batch:
        return Batch(self.prompts, self.engine.generate(self.prompts, self.sampling), {})

    def resample(self, step: int, batch: Batch) -> Batch | None:
        return None


class FirstWeights(OnDemand):
    """Source of responses by the run's first weights."""

    def update_weights(self, version: int) -> None:
        self.engine.update_weights(0)


class RoundTimes(Stopwatch):
    """Times the stages of a round on both clocks.

    Args:
        synchronize: called at both ends of a stage.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        super().__init__(synchronize)
        self._times: dict[str, Times] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        with self._times.setdefault(stage, Times()).measure(self._synchronize):
            yield

    def end_round(self) -> dict[str, tuple[float, float]]:
        """Return the seconds of each stage, on the clock and of the processor, since the last call."""
        times, self._times = self._times, {}
        return {stage: (sum(each.wall_s), sum(each.cpu_s)) for stage, each in times.items()}


def repeatable_step(run: Run, watch: Stopwatch) -> Stages:
    """Return the stages of a run's steps, of which each has the first one's prompts."""
    collector = SamePrompts(run.prompts.next(), run.engine, run.sampling)
    responses = FirstWeights(collector, run.prompts, run.engine)
    return build_stages(replace(run, responses=responses, watch=watch, probes=None, profile=None))


def before_update(stages: Stages) -> StepState:
    """Run the stages of the first step before its update; return their state."""
    state = StepState(1)
    for slot in (stages.collect, stages.score, stages.advantages, stages.log_probs):
        slot(state)
    return state


def _idle_stages(run: Run, stages: Stages) -> set[str]:
    """Return the names of the stages that have nothing to do with these settings."""
    scores = run.update.needs_old_logprobs or any(isinstance(each, ScoreBefore) for each in stages.advantages.stages)
    return {name for name, works in (("old_log_prob", scores), ("ref", run.reference is not None)) if not works}


def _update(update: PolicyUpdate, batch: TrainBatch, device: Device, bench: LayoutBench, *, warm_up: bool) -> None:
    """Run a step's updates: count their work in the warm-up, else time them."""
    if warm_up:
        with counted_tokens(update.policy) as tokens:
            update(batch)
        bench.fed_tokens, bench.trained_tokens = tokens.fed, tokens.trained
        bench.flops = update_flops(update.policy, tokens)
        return
    device.reset_peak()
    with bench.times.measure(device.synchronize):
        update(batch)
    peak = device.memory().peak
    bench.peak_bytes = peak if peak is None else max(peak, bench.peak_bytes or 0)


class Start:
    """Weights and optimizer state that every update begins with: those of the run, and optimizer states of one update.

    AdamW makes its optimizer states in its first update, which would cost only that one.

    Args:
        update: what will be measured.
        batch: batch of the first update.
    """

    def __init__(self, update: PolicyUpdate, batch: TrainBatch) -> None:
        self._optimizer = update.strategy.optimizer
        self._fresh = copy.deepcopy(update.strategy.optimizer.state_dict())
        self._weights = [parameter for parameter in update.policy.parameters() if parameter.requires_grad]
        # on the host, so that the peak of the device's memory stays that of training
        self._saved_weights = [_on_host(weight) for weight in self._weights]
        replace(update, layout=PADDED)(batch)
        self._optimizer_states = [
            value
            for values in self._optimizer.state.values()
            for value in values.values()
            if isinstance(value, torch.Tensor)
        ]
        self._saved_optimizer_states = [_on_host(moment) for moment in self._optimizer_states]
        self.restore()

    def restore(self) -> None:
        """Put weights and optimizer state back."""
        _copy(self._saved_weights, self._weights)
        _copy(self._saved_optimizer_states, self._optimizer_states)

    def forget(self) -> None:
        """Put everything back as it was before the first update."""
        _copy(self._saved_weights, self._weights)
        self._optimizer.load_state_dict(self._fresh)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


@torch.no_grad()
def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
