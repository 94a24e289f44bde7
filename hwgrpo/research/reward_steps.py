"""The steps of a reward model's training, for `loop.run_steps`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from hwgrpo.research.reward_update import RewardUpdate
from hwgrpo.research.score_ranking import Ranking, rank_outcomes, rank_pairs
from hwgrpo.research.scored_examples import ScoredExample
from hwgrpo.training.run_folder import raise_if_moved
from hwgrpo.training.run_parts import TrainingRun
from hwgrpo.training.strategies.strategy import raise_on_all_ranks
from hwgrpo.values import StepMetrics

EXAMPLES_AT_ONCE = 256


def reward_step(run: TrainingRun, step: int) -> None:
    """Update the model on one batch of examples, and log how their scores order them before that."""
    config, watch, strategy = run.config, run.watch, run.strategy
    update = cast(RewardUpdate, run.update)
    with watch("step"):
        drawn = raise_on_all_ranks(strategy, run.prompts.next).prompts
        examples = cast(Sequence[ScoredExample], drawn)
        with watch("update_actor"):
            values = update(examples)
    times = watch.take()
    lengths = [len(row) for each in examples for row in each.rows]
    ranks = strategy.gather_objects((update.scores_BK, [each.target for each in examples], lengths))
    scores = torch.cat([each for each, *_ in ranks])
    targets = torch.tensor([target for _, each, _ in ranks for target in each], dtype=torch.float64)
    tokens = torch.tensor([length for *_, each in ranks for length in each], dtype=torch.float64)
    total = float(tokens.sum())
    values |= _ranked(scores, targets).metrics("reward_model")
    values |= {
        "reward_model/score_mean": float(scores.double().mean()),
        "reward_model/text_length/mean": float(tokens.mean()),
        "reward_model/text_length/max": float(tokens.max()),
        "perf/total_num_tokens": total,
        "perf/throughput": total / max(times["timing_s/step"], 1e-9),
        "data/epoch": step * config.trainer.prompts_per_step / run.prompts.sampler.size,
    }
    values |= times | run.machine()
    raise_if_moved(run.lock, strategy)
    for note in update.pop_notes():
        run.observer.note(note)
    run.observer.step(StepMetrics(step, values))


def validate_scores(run: TrainingRun, step: int) -> None:
    """Log loss, accuracy and margin on the validation examples, if there are any."""
    data, strategy = run.validation, run.strategy
    if data is None:
        return
    update = cast(RewardUpdate, run.update)
    with run.watch("testing"):
        total, parts, targets = 0.0, [], []
        for start in range(0, len(data), EXAMPLES_AT_ONCE):
            rows = range(start, min(start + EXAMPLES_AT_ONCE, len(data)))[strategy.rank :: strategy.world_size]
            # ranks score together: one without a row left scores one of another's, which does not count
            examples = [cast(ScoredExample, data.prompt(row, -1)) for row in rows or [start]]
            scores = update.score_examples(examples).double()
            if rows:
                total += float(update.losses(scores, examples).sum())
                parts.append(scores)
                targets += [each.target for each in examples]
        [loss] = strategy.sum([total])
        ranks = strategy.gather_objects((torch.cat(parts) if parts else None, targets))
    scores = torch.cat([each for each, _ in ranks if each is not None])
    wanted = torch.tensor([target for _, each in ranks for target in each], dtype=torch.float64)
    values = {"val/loss": loss / len(data)} | _ranked(scores, wanted).metrics("val")
    raise_if_moved(run.lock, strategy)
    run.observer.validation(step, values | data.row_counts | run.watch.take())


def _ranked(scores_BK: torch.Tensor, targets_B: torch.Tensor) -> Ranking:
    """Return how scores order examples: pairs each by itself, responses among each other."""
    if scores_BK.shape[1] == 2:
        return rank_pairs(*scores_BK.unbind(1))
    return rank_outcomes(scores_BK[:, 0], targets_B)
