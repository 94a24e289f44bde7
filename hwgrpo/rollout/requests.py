"""Requests to vLLM and SGLang, and the conversion of their samples into completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hwgrpo.errors import ConfigError, DataError
from hwgrpo.ragged import offsets_of
from hwgrpo.rollout.counter_rng import stream_keys
from hwgrpo.rollout.stopping import StopDetector
from hwgrpo.values import Completions, PromptBatch, PromptImages, Sampling

LOGPROB_TOLERANCE = 1e-3
"""Largest log-prob above 0 that is accepted: sums of probabilities in half precision exceed 1 by as much."""
LOWEST_LOGPROB = torch.finfo(torch.float32).min
"""Lowest log-prob in float32; JSON has integers beyond every float."""


@dataclass(frozen=True)
class Request:
    """A prompt and the number of samples to draw from it."""

    tokens: tuple[int, ...]
    n: int
    """Samples; 1 with greedy decoding."""
    seed: int
    """Seed of the first sample; sample i has seed + i."""
    sampling: Sampling
    images: PromptImages | None = None
    """Of the prompt; None: it is text."""


@dataclass(frozen=True)
class Sample:
    """One sample as an engine returned it."""

    tokens: Sequence[int]
    """Stop token included."""
    logprobs: Sequence[float]
    """Log-prob of each token, under the distribution it was drawn from."""
    stopped: bool
    """Whether the engine reports that a stop token or string ended it."""


def check_batch(batch: PromptBatch, samplings: Sequence[Sampling], config: Any) -> None:
    """Check that prompts and responses fit the model.

    Args:
        batch: the prompts.
        samplings: the length limit and the stop tokens of each.
        config: the model's transformers configuration.

    Raises:
        ConfigError: prompt and response exceed the model's positions, or a stop token is not in its vocabulary.
        DataError: a prompt has no tokens.
    """
    text = config.get_text_config()
    empty = next((prompt for prompt in batch.prompts if not prompt.token_ids), None)
    if empty is not None:
        raise DataError(f"prompt {empty.uid!r} has no tokens: a response needs a prompt")
    lengths = (
        (len(prompt.token_ids), each.max_response_tokens) for prompt, each in zip(batch.prompts, samplings, strict=True)
    )
    longest, most = max(lengths, key=sum)
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and longest + most > limit:
        raise ConfigError(
            f"rollout.max_response_tokens={most} and the longest prompt, {longest} tokens, exceed the model's {limit} "
            "positions (max_position_embeddings): lower it or data.max_prompt_tokens"
        )
    ends = dict.fromkeys(token for sampling in samplings for token in sampling.stop_token_ids)
    unknown = [token for token in ends if token >= text.vocab_size]
    if unknown:
        raise ConfigError(
            f"rollout.stop_token_ids={unknown} are not in the model's vocabulary of {text.vocab_size} tokens"
        )


def make_requests(batch: PromptBatch, samplings: Sequence[Sampling]) -> list[Request]:
    """Return one request per prompt; its seed depends on the run's seed and the prompt's uid alone.

    Args:
        batch: the prompts.
        samplings: of each; the seed of all is the run's.
    """
    keys = stream_keys(samplings[0].seed, [prompt.uid for prompt in batch.prompts], [0] * len(batch))
    seeds = (keys >> np.uint64(2)).tolist()  # int64, with room for the sample index
    return [
        Request(prompt.token_ids, 1 if sampling.greedy else sampling.n, seed, sampling, prompt.images)
        for prompt, seed, sampling in zip(batch.prompts, seeds, samplings, strict=True)
    ]


def find_problem(samples: Sequence[Sample], request: Request, vocabulary: int) -> str | None:
    """Return why the samples of a request are invalid, or None."""
    if len(samples) != request.n:
        return f"{len(samples)} samples were returned, {request.n} were requested"
    for sample in samples:
        most = request.sampling.max_response_tokens
        if not 1 <= len(sample.tokens) <= most:
            return f"a sample has {len(sample.tokens)} tokens; it may have 1 to {most}"
        if len(sample.tokens) != len(sample.logprobs):
            return f"a sample of {len(sample.tokens)} tokens has {len(sample.logprobs)} log-probs"
        if not all(type(token) is int and 0 <= token < vocabulary for token in sample.tokens):
            return f"a sample has tokens that are not in the vocabulary of {vocabulary}"
        if not all(
            type(value) in (int, float) and LOWEST_LOGPROB <= value <= -LOWEST_LOGPROB for value in sample.logprobs
        ):
            return "a sample has log-probs that are not finite"
        if max(sample.logprobs) > LOGPROB_TOLERANCE:
            return f"a sample has a log-prob of {max(sample.logprobs):g}, above 0"
    return None


def make_completions(
    samples: Sequence[Sequence[Sample] | None],
    samplings: Sequence[Sampling],
    tokenizer: Any,
    end_ids: Sequence[int],
    version: int,
) -> Completions:
    """Return the completions of a batch, cut and decoded as by the local engine.

    Args:
        samples: the valid samples of each prompt; with greedy decoding one, which is repeated n times. None: the prompt
            was dropped, and gets no responses.
        samplings: the settings that each prompt's were drawn with.
        tokenizer: decodes them.
        end_ids: token ids that end a response.
        version: version of the weights they were drawn with.
    """
    lengths: list[int] = []
    tokens: list[int] = []
    logprobs: list[float] = []
    finished: list[bool] = []
    texts: list[str] = []
    kept = [(prompt, group) for prompt, group in enumerate(samples) if group is not None]
    for prompt, group in kept:
        sampling = samplings[prompt]
        skips = sampling.skip_special_tokens
        repeated = [group[0]] * sampling.n if len(group) < sampling.n else group
        for sample in repeated:
            end = _end(sample, StopDetector(tokenizer, end_ids, sampling.stop, skips))
            response = [*sample.tokens[:end]]
            done = end is not None or sample.stopped
            lengths.append(len(response))
            tokens += response
            logprobs += sample.logprobs[:end]
            finished.append(done)
            texts.append(StopDetector(tokenizer, end_ids, sampling.stop, skips).text(response, done))
    return Completions(
        prompt_index=torch.tensor(
            [prompt for prompt, _ in kept for _ in range(samplings[prompt].n)], dtype=torch.int64
        ),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        offsets=offsets_of(torch.tensor(lengths, dtype=torch.int64)),
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
        finished=torch.tensor(finished, dtype=torch.bool),
        texts=tuple(texts),
        weight_version=version,
    )


def _end(sample: Sample, watch: StopDetector) -> int | None:
    """Return the number of tokens up to the first that ends the response, or None."""
    row = np.zeros(1, dtype=np.int64)
    for position, token in enumerate(sample.tokens, start=1):
        if watch.ended(row, np.array([token]))[0]:
            return position
    return None
