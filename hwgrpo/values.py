"""The values that flow through one step, in order: PromptBatch, Completions, Rewards, TrainBatch, StepMetrics.

Shapes: G prompts, S sequences (completions), P prompt tokens in total, R response tokens in total. Sequences are stored
ragged: the tokens of sequence i are `tokens[offsets[i]:offsets[i + 1]]`. All tensors are on the CPU; only micro-batches
are moved to the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hwgrpo.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from hwgrpo.step_rewards import StepRewards


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Raises:
        ConfigError: a value is out of range.
    """

    n: int
    """Samples per prompt."""
    max_response_tokens: int
    """Longest response, in tokens, the stop token included."""
    temperature: float = 1.0
    """Divisor of the logits."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together have this probability; 1 is off."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the likeliest; 0 is off."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, in addition to the end-of-sequence ids of tokenizer and generation config."""
    skip_special_tokens: bool = False
    """Leave all special tokens out of responses' texts; False: only those of end, padding, beginning and unknown."""
    greedy: bool = False
    """Select the likeliest token; temperature and filters are ignored, log-probs are those of the raw logits."""
    seed: int = 0
    """Seed; with (prompt uid, sample index, position) it determines every sampled token."""
    group_timeout: float | None = None
    """Seconds for the responses to a prompt, twice, before they are dropped (`hwgrpo.rollout.deadlines`); None: any."""

    def __post_init__(self) -> None:
        rules = (
            ("n", self.n >= 1, "at least 1"),
            ("max_response_tokens", self.max_response_tokens >= 1, "at least 1"),
            ("temperature", 0 < self.temperature < math.inf, "above 0 (greedy=True for the likeliest token)"),
            ("top_k", self.top_k >= 0, "at least 0 (0 is off)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (1 is off)"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 and below 1 (0 is off)"),
            ("stop", not isinstance(self.stop, str), "a list of strings, not one string"),
            ("stop", all(self.stop), "a list of strings that are not empty"),
            ("stop_token_ids", all(token >= 0 for token in self.stop_token_ids), "a list of ids of at least 0"),
            ("seed", self.seed >= 0, "at least 0"),
            ("group_timeout", self.group_timeout is None or self.group_timeout > 0, "above 0, or null for none"),
        )
        for key, fulfilled, allowed in rules:
            if not fulfilled:
                raise ConfigError(f"rollout.{key}={getattr(self, key)!r} is out of range: it must be {allowed}")


@dataclass(frozen=True)
class Prompt:
    """One tokenized prompt, with its data row."""

    uid: str
    """Unique within a run: the same row in another epoch has another uid. Groups are formed by it."""
    text: str
    """The model's input text, after the chat template."""
    token_ids: tuple[int, ...]
    ground_truth: Any
    """The answer that rewards compare with; None if the data has no such column."""
    columns: Mapping[str, Any]
    """Column -> value of the data row, unchanged; passed on to reward functions."""
    source: str = ""
    """Source of the row (verl's `data_source` column, else the file name)."""
    place: str = ""
    """File and row, for error messages."""
    messages: tuple[Mapping[str, str], ...] | None = None
    """The chat messages when the prompt is a conversation, else None."""


@dataclass(frozen=True)
class PromptBatch:
    """The G prompts of one step on this rank."""

    prompts: tuple[Prompt, ...]

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class Completions:
    """S sampled responses, ragged, with their log-probs under the sampling distribution."""

    prompt_index: torch.Tensor
    """[S] int64: index of each response's prompt in the batch; ascending."""
    tokens: torch.Tensor
    """[R] int64: response tokens, the stop token included when one was sampled."""
    offsets: torch.Tensor
    """[S + 1] int64."""
    logprobs: torch.Tensor
    """[R] fp32: log-prob of each token under the distribution it was sampled from (temperature, top-k/p, min-p)."""
    finished: torch.Tensor
    """[S] bool: True if the response ended with a stop token or string, False if it was truncated at the limit."""
    texts: tuple[str, ...]
    """S decoded responses (`Sampling.skip_special_tokens`), without the stop string."""
    weight_version: int = 0
    """Policy version that sampled the responses; the oldest, if there are several."""
    versions: torch.Tensor | None = None
    """[R] int64: policy version that sampled each token, if weights changed in between; None: all `weight_version`."""
    floors: torch.Tensor | None = None
    """[R] fp32: log-prob under the full distribution below which the filters dropped tokens; None: not reported."""
    late: int | None = None
    """Groups that missed `Sampling.group_timeout`; None: there is none."""
    dropped: Mapping[int, str] = field(default_factory=dict)
    """Index of each prompt whose group was dropped, so that it has no responses here -> reason."""

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def lengths(self) -> torch.Tensor:
        """[S] int64: response lengths in tokens."""
        return self.offsets.diff()

    @property
    def newest_version(self) -> int:
        """The newest policy version that sampled a token."""
        return self.weight_version if self.versions is None else int(self.versions.max())


@dataclass(frozen=True)
class Rewards:
    """The reward of each response, and its components."""

    total: torch.Tensor
    """[S] fp64: the weighted sum; meaningless where `valid` is False."""
    valid: torch.Tensor
    """[S] bool: False for a sample removed by a failure policy (`mask_sample`, `drop_group`)."""
    per_function: Mapping[str, torch.Tensor]
    """name -> [S] fp64, NaN where the function returned no value."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """`errors/<name>`, `nans/<name>`, `timeouts/<name>` -> count in this batch."""
    first_failures: Mapping[str, str] = field(default_factory=dict)
    """The same keys -> the first failed sample and its error, as text."""
    extras: tuple[Mapping[str, Any], ...] = ()
    """S dicts of extra fields that reward functions returned with the score; may be empty."""
    steps: StepRewards | None = None
    """The rewards of the responses' steps, whose sums are `total`; None: the estimator reads none."""
    greedy: torch.Tensor | None = None
    """[S] fp64: reward of the greedy response to the same prompt, NaN: none; None: the estimator reads none."""


@dataclass(frozen=True)
class TrainBatch:
    """The batch of a step's policy updates: ragged sequences and their per-sequence and per-token signals."""

    prompt_tokens: torch.Tensor
    """[P] int64: each prompt once."""
    prompt_offsets: torch.Tensor
    """[G + 1] int64."""
    prompt_index: torch.Tensor
    """[S] int64: the prompt of each sequence; ascending."""
    tokens: torch.Tensor
    """[R] int64: response tokens."""
    offsets: torch.Tensor
    """[S + 1] int64."""
    advantages: torch.Tensor
    """[S] fp32; with `token_advantages` their mean over the tokens of each sequence."""
    rollout_logprobs: torch.Tensor
    """[R] fp32: log-probs that the rollout engine reported."""
    floors: torch.Tensor | None = None
    """[R] fp32: as in `Completions`; the trainer's log-probs are then those of the same tokens."""
    old_logprobs: torch.Tensor | None = None
    """[R] fp32: log-probs of the policy at the start of the update; None on policy, where the ratio is 1."""
    ref_logprobs: torch.Tensor | None = None
    """[R] fp32: log-probs of the reference model; None when no KL term needs them."""
    rollout_shares: torch.Tensor | None = None
    """[R] fp32: weight of the rollout's log-prob in the old one, the rest is the current; None: `old_logprobs`."""
    token_advantages: torch.Tensor | None = None
    """[R] fp32: the advantage of each token; None: every token has the advantage of its sequence."""

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @property
    def lengths(self) -> torch.Tensor:
        """[S] int64: response lengths in tokens."""
        return self.offsets.diff()

    @property
    def advantages_R(self) -> torch.Tensor:
        """[R] fp32: the advantage of each token."""
        if self.token_advantages is None:
            return self.advantages.repeat_interleave(self.lengths)
        return self.token_advantages


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one finished step, under verl's and TRL's names."""

    step: int
    values: Mapping[str, float]
