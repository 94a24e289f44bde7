"""The steps of supervised training, for `loop.run_steps`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from hwgrpo.config.derived import prompts_per_update
from hwgrpo.data.examples import Example
from hwgrpo.training.run_folder import raise_if_moved
from hwgrpo.training.run_parts import TrainingRun
from hwgrpo.training.strategies.strategy import raise_on_all_ranks
from hwgrpo.training.supervised.example_batch import assemble_examples, mean_over_trained
from hwgrpo.training.update.step_metrics import utilisation
from hwgrpo.values import StepMetrics

OF_UPDATE = (
    *("actor/loss", "actor/entropy", "entropy", "actor/grad_norm", "actor/lr"),
    *("actor/skipped_updates", "perf/oom_restarts", "actor/router_loss"),
)
"""Metrics of the policy update that supervised training logs; the others compare with rollouts."""
EXAMPLES_AT_ONCE = 256


def supervised_step(run: TrainingRun, step: int) -> None:
    """Update the model on one batch of examples: the loss is -log-prob, averaged over trained tokens."""
    config, watch, strategy = run.config, run.watch, run.strategy
    with watch("step"):
        examples = cast(Sequence[Example], raise_on_all_ranks(strategy, run.prompts.next).prompts)
        batch = assemble_examples(examples)
        with watch("update_actor"):
            local = prompts_per_update(config) // strategy.world_size
            updated = run.update(mean_over_trained(batch, local, strategy))
    times = watch.take()
    values = {name: updated[name] for name in OF_UPDATE if name in updated}
    ranks = strategy.gather_objects((batch.lengths, batch.prompt_offsets.diff(), sum(sum(e.trained) for e in examples)))
    responses, prompts = (torch.cat([each[i] for each in ranks]).double() for i in range(2))
    total = float(responses.sum() + prompts.sum())
    values |= {
        "response_length/mean": float(responses.mean()),
        "response_length/max": float(responses.max()),
        "response_length/min": float(responses.min()),
        "prompt_length/mean": float(prompts.mean()),
        "prompt_length/max": float(prompts.max()),
        "prompt_length/min": float(prompts.min()),
        "perf/response_tokens": float(sum(trained for *_, trained in ranks)),
        "perf/total_num_tokens": total,
        "perf/throughput": total / max(times["timing_s/step"], 1e-9),
        "data/epoch": step * config.trainer.prompts_per_step / run.prompts.sampler.size,
    }
    flops = strategy.sum([run.update.flops])[0]
    values |= utilisation(flops, times["timing_s/update_actor"], run.peak, strategy.world_size) | times | run.machine()
    raise_if_moved(run.lock, strategy)
    for note in run.update.pop_notes():
        run.observer.note(note)
    run.observer.step(StepMetrics(step, values))


def validate_examples(run: TrainingRun, step: int) -> None:
    """Log the loss on the validation examples, if there are any: the mean over their trained tokens."""
    data, strategy = run.validation, run.strategy
    if data is None:
        return
    with run.watch("testing"):
        sums = [0.0, 0.0, 0.0]
        for start in range(0, len(data), EXAMPLES_AT_ONCE):
            rows = range(start, min(start + EXAMPLES_AT_ONCE, len(data)))[strategy.rank :: strategy.world_size]
            # ranks score together: one without a row left scores none of another's
            batch = assemble_examples([cast(Example, data.prompt(row, -1)) for row in rows or [start]])
            logprobs = run.update.score(batch, sequences=range(len(rows))).double()
            assert batch.token_advantages is not None
            trained = batch.token_advantages.bool() if rows else torch.zeros_like(logprobs, dtype=torch.bool)
            chosen = logprobs[trained]
            sums = [a + b for a, b in zip(sums, (float(-chosen.sum()), float(chosen.exp().sum()), len(chosen)))]
        loss, probability, tokens = strategy.sum(sums)
    values = {"val/loss": loss / tokens, "val/mean_token_prob": probability / tokens}
    raise_if_moved(run.lock, strategy)
    run.observer.validation(step, values | data.row_counts | run.watch.take())
