"""Texts and rewards from the tokens of a captured step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hwgrpo.config import Config
from hwgrpo.errors import ConfigError, RewardError
from hwgrpo.replay.replay_settings import ReplaySettings
from hwgrpo.rollout.stopping import StopDetector, end_token_ids
from hwgrpo.training.captured_step import CapturedStep
from hwgrpo.training.reward_setup import open_rewards
from hwgrpo.values import Completions, Rewards

OF_MODELS = (*("reward_model", "process_reward_model", "online_reward_model", "served_reward_model", "judge", "http"),)
"""Rewards that a model or a service computes: they are no functions of the text that every machine repeats."""


@dataclass(frozen=True)
class Recomputed:
    """Rewards computed again."""

    rewards: Rewards | None
    """None: no function was called."""
    complete: bool
    """Whether all functions were, so that total and validity are those of the step."""
    failure: str | None
    """Error of a function that fails here and did not in the run."""
    notes: tuple[str, ...]
    """What was not recomputed, and why."""


def decoded_texts(captured: CapturedStep, config: Config, tokenizer: Any, model: Any) -> tuple[str, ...] | None:
    """Return the responses' texts by this tokenizer; None where another engine or a workflow made them.

    Args:
        captured: the step.
        config: settings of the replay.
        tokenizer: the model's.
        model: has the generation config, whose end tokens have no text.
    """
    rollout, completions = config.rollout, captured.value("completions.")
    if rollout.engine not in ("auto", "local") or rollout.workflow != "single_turn":
        return None
    ends = end_token_ids(tokenizer, getattr(model, "generation_config", None), rollout.stop_token_ids)
    detector = StopDetector(tokenizer, ends, rollout.stop, rollout.skip_special_tokens)
    return tuple(
        detector.text(tokens, finished)
        for tokens, finished in zip(completions.token_lists(), completions.finished.tolist(), strict=True)
    )


def recompute(captured: CapturedStep, settings: ReplaySettings, completions: Completions, parts: Any) -> Recomputed:
    """Score the responses by the reward functions of the settings that are functions of the text.

    Args:
        captured: the step.
        settings: of the replay.
        completions: the responses, with the texts to score.
        parts: has `tokenizer` and `device`.
    """
    config = settings.config
    if config.reward.shuffle:
        return Recomputed(None, False, None, ("rewards are not recomputed: reward.shuffle permutes them",))
    notes, usable = [], []
    for number, function in enumerate(config.reward.functions):
        missing = [(key, why) for key, why in settings.missing.items() if key.startswith(f"reward.functions.{number}.")]
        if function.name in OF_MODELS:
            notes.append(f"reward {function.name} is not recomputed: it is computed by a model or a service")
        elif missing:
            notes.append(f"reward {function.name} is not recomputed: {missing[0][0]}: {missing[0][1]}")
        else:
            usable.append(number)
    if not usable:
        return Recomputed(None, False, None, tuple(notes))
    names = [*captured.value("rewards.").per_function]
    chosen = replace(config.reward, functions=[config.reward.functions[number] for number in usable])
    try:
        with open_rewards(replace(config, reward=chosen), None, 0, parts.tokenizer, parts.device) as pipeline:
            scored = pipeline.score(captured.prompts, completions, captured.step)
    except ConfigError as error:
        return Recomputed(None, False, None, (*notes, f"rewards are not recomputed: {error}"))
    except RewardError as error:
        return Recomputed(None, False, str(error), tuple(notes))
    renamed = [names[number] for number in usable]  # as in the run, also of a function of another name
    scored = replace(scored, per_function=dict(zip(renamed, scored.per_function.values(), strict=True)))
    return Recomputed(scored, len(usable) == len(config.reward.functions), None, tuple(notes))
