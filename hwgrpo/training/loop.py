"""The training loop: prompts -> generate -> rewards -> advantages -> update -> new weights -> observe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

from hwgrpo.training.evaluate import validate
from hwgrpo.training.out_of_memory import explain_out_of_memory
from hwgrpo.training.reward_setup import reward_metrics
from hwgrpo.training.run_folder import raise_if_moved
from hwgrpo.training.run_parts import Run, TrainingRun
from hwgrpo.training.stages.stage import StepState
from hwgrpo.training.strategies.lost_ranks import name_lost_ranks

Status = Literal["completed", "interrupted"]
R = TypeVar("R", bound=TrainingRun)


def train(run: Run) -> Status:
    """Run the remaining steps of GRPO; see `run_steps`."""
    return run_steps(run, train_step, validate_now)


def run_steps(run: R, train: Callable[[R, int], None], validate: Callable[[R, int], None]) -> Status:
    """Run the remaining steps, as `iterate_steps`; return "interrupted" when a signal ended the run early."""
    for _ in iterate_steps(run, train, validate):
        pass
    return "interrupted" if run.interrupted else "completed"


def iterate_steps(run: R, train: Callable[[R, int], None], validate: Callable[[R, int], None]) -> Iterator[int]:
    """Run the remaining steps, validate and save as configured; yield each finished step.

    When a signal ends the run early, its last finished step is in a checkpoint, and `run.interrupted` is set.

    Raises:
        RunError: memory ran out, a gradient is not finite, or a checkpoint cannot be written.
    """
    t = run.config.trainer
    oom = explain_out_of_memory(run.config, run.device, lambda: run.watch.failed)
    with run.interrupt as interrupt, name_lost_ranks(), oom, run.saver:
        if run.start_step == 0 and t.validate_at_start:
            run.update_threads()
            validate(run, 0)
        for step in range(run.start_step + 1, run.total_steps + 1):
            run.update_threads()
            train(run, step)
            if run.lock is not None:
                run.lock.keep()
            if step == run.start_step + 1:
                run.record_kernels()
            last = step == run.total_steps
            # all ranks must stop together, though the signal may have reached only one of them
            stopping = run.strategy.sum([interrupt.received is not None])[0] > 0
            if last or (t.validate_every and step % t.validate_every == 0):
                validate(run, step)
            with run.watch("save"):
                if last or stopping or (t.save_every and step % t.save_every == 0):
                    run.saver.save(step, last=last or stopping)
                else:
                    run.saver.poll()
            yield step
            if stopping and not last:
                run.observer.note(f"stopped by {interrupt.received or 'another rank'} after step {step}; it is saved")
                run.interrupted = True
                return


def train_step(run: Run, step: int) -> None:
    """Run the stages of one step: prompts -> generate -> rewards -> advantages -> update -> new weights -> observe."""
    stages, state = run.stages, StepState(step)
    with run.watch("step"):
        stages.collect(state)
        stages.score(state)
        stages.advantages(state)
        stages.log_probs(state)
        stages.update(state)
        stages.sync(state)
    stages.observe(state)


def validate_now(run: Run, step: int) -> None:
    """Evaluate the policy on the validation prompts, if there are any."""
    if run.validation is None:
        return
    with run.watch("testing"), run.responses.exclusive_engine():
        values = validate(run.engine, run.validation, run.rewards, run.config, run.strategy, step)
    raise_if_moved(run.lock, run.strategy)
    run.observer.validation(step, values | run.watch.take() | reward_metrics(run.rewards, run.strategy))
