"""The training loop: prompts -> generate -> rewards -> advantages -> update -> new weights -> observe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

from hwgrpo.observe.completions import dropped_records, pick_sample
from hwgrpo.observe.custom_metrics import over_ranks
from hwgrpo.training.evaluate import validate
from hwgrpo.training.feed.difficulty_report import report_batch
from hwgrpo.training.greedy_baseline import sample_greedy, with_greedy_rewards
from hwgrpo.training.moving_reference import move_reference
from hwgrpo.training.online_rewards import train_reward_models
from hwgrpo.training.out_of_memory import explain_out_of_memory
from hwgrpo.training.reward_setup import reward_metrics
from hwgrpo.training.run_folder import raise_if_moved
from hwgrpo.training.run_parts import Run, TrainingRun
from hwgrpo.training.strategies.lost_ranks import name_lost_ranks
from hwgrpo.training.strategies.strategy import raise_on_all_ranks
from hwgrpo.training.temperature import set_temperature
from hwgrpo.training.update.advantage_inputs import advantage_inputs
from hwgrpo.training.update.failure_notes import failure_notes
from hwgrpo.training.update.old_policy import with_rollout_shares
from hwgrpo.training.update.reward_shuffle import shuffle_rewards
from hwgrpo.training.update.step_metrics import sample_metrics, utilisation
from hwgrpo.training.update.train_batch import advantages_over_ranks, assemble
from hwgrpo.values import StepMetrics

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
            validate(run, 0)
        for step in range(run.start_step + 1, run.total_steps + 1):
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
    """Generate responses to one batch of prompts, score them, and update the policy."""
    config, watch = run.config, run.watch
    with watch("step"):
        with watch("gen"):
            generated = raise_on_all_ranks(run.strategy, lambda: run.responses.next(step))
            greedy = sample_greedy(run, generated.prompts)
            if run.engine_sleeps:
                raise_on_all_ranks(run.strategy, run.engine.sleep)
        temperature = set_temperature(run, step)
        prompts, completions = generated.prompts, generated.completions
        with watch("reward"):
            rewards = generated.rewards
            if rewards is None:
                rewards = raise_on_all_ranks(run.strategy, lambda: run.rewards.score(prompts, completions, step))
                if config.reward.shuffle:
                    rewards = shuffle_rewards(rewards, config.trainer.seed, step, run.strategy.rank)
                report_batch(run.prompts, run.strategy, prompts, completions, rewards)
            rewards = with_greedy_rewards(run, rewards, generated, greedy, step)
        inputs = advantage_inputs(run.update, run.reference, prompts, completions, rewards, watch)
        with watch("adv"):
            given = config, completions, inputs.rewards, run.strategy, inputs.token_probs, inputs.kl_R
            advantages, of_tokens = raise_on_all_ranks(run.strategy, lambda: advantages_over_ranks(*given))
            trained = rewards.valid & completions.finished if config.algorithm.mask_truncated else rewards.valid
            batch = assemble(prompts, completions, advantages, trained, of_tokens)
            batch = inputs.add_old_logprobs(batch, trained, completions.lengths)
        with watch("old_log_prob"):
            batch = run.update.with_old_logprobs(with_rollout_shares(batch, config, completions, trained, step))
        with watch("ref"):
            batch = run.update.with_ref_logprobs(batch, run.reference)
        with watch("update_actor"):
            updated = run.update(batch)
            updated |= run.guard.judge(step, updated)
            move_reference(run.reference, run.update.policy, config.algorithm.kl, step)
        train_reward_models(run.rewards, run.strategy, run.device.torch_device, watch, step)
        with watch("sync"):
            run.responses.update_weights(step)
    samples = (prompts, completions, rewards, advantages)
    values = sample_metrics(*samples, run.strategy.gather_objects, of_tokens) | inputs.metrics
    if run.metrics:
        measured = raise_on_all_ranks(run.strategy, lambda: run.metrics.measure(*samples))
        values |= over_ranks(run.strategy.gather_objects(measured), values | updated)
    values |= reward_metrics(run.rewards, run.strategy)
    times = watch.take()
    speed = {"perf/throughput": values["perf/total_num_tokens"] / max(times["timing_s/step"], 1e-9)}
    flops = run.strategy.sum([run.update.flops])[0]
    speed |= utilisation(flops, times["timing_s/update_actor"], run.peak, run.strategy.world_size)
    values |= updated | times | speed | dict(generated.metrics) | temperature | run.memory()
    raise_if_moved(run.lock, run.strategy)  # before writing to the run's folder
    dropped = [*generated.dropped, *dropped_records(prompts, completions)]
    if values.get("rollout/groups_dropped"):
        dropped = [record for records in run.strategy.gather_objects(dropped) for record in records]
    failures = failure_notes(values, dropped, rewards, step, run.reported_failures)
    for note in (*generated.notes, *run.update.pop_notes(), *failures):
        run.observer.note(note)
    run.observer.step(StepMetrics(step, values), pick_sample(step, prompts, completions, rewards))
    run.observer.completions(step, *samples, dropped)


def validate_now(run: Run, step: int) -> None:
    """Evaluate the policy on the validation prompts, if there are any."""
    if run.validation is None:
        return
    with run.watch("testing"), run.responses.exclusive_engine():
        values = validate(run.engine, run.validation, run.rewards, run.config, run.strategy, step)
    raise_if_moved(run.lock, run.strategy)
    run.observer.validation(step, values | run.watch.take() | reward_metrics(run.rewards, run.strategy))
