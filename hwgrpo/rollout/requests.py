"""What engines outside this project's own code are asked for, and how their answers become completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hwgrpo.errors import ConfigError, DataError
from hwgrpo.rollout.counter_rng import stream_keys
from hwgrpo.rollout.stopping import StopWatch
from hwgrpo.values import Completions, PromptBatch, Sampling

ROUNDING = 1e-3
"""How far above 0 a log-prob may be: sums of probabilities in half precision exceed 1 by as much."""
LOWEST = torch.finfo(torch.float32).min
"""Lowest log-prob that float32 holds; JSON has integers beyond every float."""


@dataclass(frozen=True)
class Request:
    """A prompt and how many samples of it are wanted."""

    tokens: tuple[int, ...]
    n: int
    """Samples; 1 where the likeliest token is taken."""
    seed: int
    """Of the first sample; the next ones have the numbers after it."""


@dataclass(frozen=True)
class Answer:
    """One sample as an engine returned it."""

    tokens: Sequence[int]
    """Stop token included."""
    logprobs: Sequence[float]
    """Of each token, under the distribution it was drawn from."""
    stopped: bool
    """Whether the engine says that a stop token or string ended it."""


def check_batch(batch: PromptBatch, sampling: Sampling, config: Any) -> None:
    """Check that prompts and responses fit the model.

    Args:
        batch: the prompts.
        sampling: how long responses may be, and what ends them.
        config: the model's transformers configuration.

    Raises:
        ConfigError: prompt and response exceed the model's positions, or a stop token is not in its vocabulary.
        DataError: a prompt has no tokens.
    """
    text = config.get_text_config()
    empty = next((prompt for prompt in batch.prompts if not prompt.token_ids), None)
    if empty is not None:
        raise DataError(f"prompt {empty.uid!r} has no tokens: a response needs a prompt")
    longest = max(len(prompt.token_ids) for prompt in batch.prompts)
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and longest + sampling.max_response_tokens > limit:
        raise ConfigError(
            f"rollout.max_response_tokens={sampling.max_response_tokens} and the longest prompt, {longest} tokens, "
            f"exceed the model's {limit} positions (max_position_embeddings): lower it or data.max_prompt_tokens"
        )
    unknown = [token for token in sampling.stop_token_ids if token >= text.vocab_size]
    if unknown:
        raise ConfigError(
            f"rollout.stop_token_ids={unknown} are not in the model's vocabulary of {text.vocab_size} tokens"
        )


def requests_of(batch: PromptBatch, sampling: Sampling) -> list[Request]:
    """Return one request per prompt; its seed depends on the run's seed and the prompt's uid alone."""
    keys = stream_keys(sampling.seed, [prompt.uid for prompt in batch.prompts], [0] * len(batch))
    seeds = (keys >> np.uint64(2)).tolist()  # int64, with room for the samples' own numbers
    n = 1 if sampling.greedy else sampling.n
    return [Request(prompt.token_ids, n, seed) for prompt, seed in zip(batch.prompts, seeds, strict=True)]


def problem_of(answers: Sequence[Answer], request: Request, sampling: Sampling, vocabulary: int) -> str | None:
    """Say what is wrong with the answers to a request, or return None."""
    if len(answers) != request.n:
        return f"{len(answers)} samples came where {request.n} were asked for"
    for answer in answers:
        if not 1 <= len(answer.tokens) <= sampling.max_response_tokens:
            return f"a sample has {len(answer.tokens)} tokens; it may have 1 to {sampling.max_response_tokens}"
        if len(answer.tokens) != len(answer.logprobs):
            return f"a sample of {len(answer.tokens)} tokens has {len(answer.logprobs)} log-probs"
        if not all(type(token) is int and 0 <= token < vocabulary for token in answer.tokens):
            return f"a sample has tokens that are not in the vocabulary of {vocabulary}"
        if not all(type(value) in (int, float) and LOWEST <= value <= -LOWEST for value in answer.logprobs):
            return "a sample has log-probs that are not finite"
        if max(answer.logprobs) > ROUNDING:
            return f"a sample has a log-prob of {max(answer.logprobs):g}, above 0"
    return None


def completions_of(
    answers: Sequence[Sequence[Answer]],
    sampling: Sampling,
    tokenizer: Any,
    end_ids: Sequence[int],
    version: int,
) -> Completions:
    """Return the completions of a batch, which end and read as those of the local engine do.

    Args:
        answers: of each prompt its samples, which have no problem; one sample stands for all where n is more.
        sampling: as they were drawn.
        tokenizer: decodes them.
        end_ids: token ids that end a response.
        version: of the weights they were drawn with.
    """
    lengths: list[int] = []
    tokens: list[int] = []
    logprobs: list[float] = []
    finished: list[bool] = []
    texts: list[str] = []
    for group in answers:
        whole = [group[0]] * sampling.n if len(group) < sampling.n else group
        for answer in whole:
            end = _end(answer, StopWatch(tokenizer, end_ids, sampling.stop, 1))
            kept = [*answer.tokens[:end]]
            done = end is not None or answer.stopped
            lengths.append(len(kept))
            tokens += kept
            logprobs += answer.logprobs[:end]
            finished.append(done)
            texts.append(StopWatch(tokenizer, end_ids, sampling.stop, 0).text(kept, done))
    return Completions(
        prompt_index=torch.arange(len(answers)).repeat_interleave(sampling.n),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        offsets=torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)),
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
        finished=torch.tensor(finished),
        texts=tuple(texts),
        weight_version=version,
    )


def _end(answer: Answer, watch: StopWatch) -> int | None:
    """Return how many tokens there are up to the first that ends the response, or None where none does."""
    row = np.zeros(1, dtype=np.int64)
    for position, token in enumerate(answer.tokens, start=1):
        if watch.ended(row, np.array([token]))[0]:
            return position
    return None
