"""Probes that show whether the rollout engine samples with the weights that it was sent.

A few fixed sequences, after a prompt with an image where the model reads images, are scored by engine and trainer after
weights were sent. Their log-probs may differ by rounding alone, and must change alike from one probe to the next: an
engine that has kept older weights, or applies another adapter, repeats its own or changes by something else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from hwgrpo.config import Config
from hwgrpo.config.schema import LoraConfig, RolloutConfig
from hwgrpo.errors import RunError
from hwgrpo.models.layer_values import largest_value
from hwgrpo.models.lora import uses_lora
from hwgrpo.models.placeholders import reads_images
from hwgrpo.models.router import has_experts
from hwgrpo.models.tower_work import tower_layers
from hwgrpo.rollout.engine import Engine
from hwgrpo.rollout.engine_kind import engine_kind
from hwgrpo.training.feed.response_source import ResponseSource
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.reference_model import Reference
from hwgrpo.training.strategies.strategy import raise_on_all_ranks
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.values import Prompt, TrainBatch, image_columns

SEQUENCES, LENGTH = 4, 16
"""Number of probes, and their length in tokens."""
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
CONFIDENCE = 4.0
"""Standard deviations of rounding by which log-probs may differ."""
NOTICEABLE = 12.0
"""Multiple of the noise from which on a change of the log-probs is compared."""
SHARE = 1 / 3
"""Share of such a change by which engine and trainer may differ. The noise of both probes is sqrt(2) / 12 of it."""
FLIPS = 32
"""Logits that a change must have moved by their last bit, so that an engine with new weights cannot repeat its own."""


@dataclass(frozen=True)
class Scores:
    """Log-probs of the probes' tokens."""

    weights: str
    """The weights that trainer and engine should have, for messages."""
    trainer: torch.Tensor
    """[S, T] fp64."""
    engine: torch.Tensor
    """[S, T] fp64."""

    @property
    def gap(self) -> torch.Tensor:
        """Mean difference per probe, [S] in nats per token."""
        return (self.engine - self.trainer).abs().mean(1)


@dataclass(frozen=True)
class Precision:
    """Bounds of what rounding explains."""

    dtype: torch.dtype
    """The less exact of the dtypes of trainer and engine."""
    layers: int
    width: int
    """Terms of the longest sum."""
    vocabulary: int

    def rounding(self, spread: float, dtype: torch.dtype | None = None) -> float:
        """Return the standard deviation of a log-prob's rounding error between two computations.

        A logit has passed 13 sums or elementwise steps per layer and 6 around them. A step rounds by at most
        u = eps / 2 of its value, u / sqrt(3) in the mean square, and a sum of n terms in fp32 does so n times;
        products of 16 bits sum in fp32 and round once. The errors are as good as independent, so that their squares add
        up (Higham and Mary, 2019), and both computations have theirs.

        Args:
            spread: standard deviation of the logits.
            dtype: None: `dtype`.
        """
        dtype = dtype or self.dtype
        terms = 1 if dtype.itemsize == 2 else self.width
        return math.sqrt(2 * terms * (13 * self.layers + 6) / 3) * torch.finfo(dtype).eps / 2 * max(spread, 1.0)


def find_problem(
    now: Scores, earlier: Sequence[Scores], precision: Precision, noise: float | None = None, *, repeats: bool = False
) -> str | None:
    """Return what shows that the engine has other weights than the trainer, or None.

    Args:
        now: the newest scores.
        earlier: scores of other weights, by which the newest ones have changed.
        precision: bounds of rounding.
        noise: mean difference of the log-probs of equal weights, in nats; None: unknown, changes are not compared.
        repeats: whether the trainer scores equal weights alike to the last bit.
    """
    if not now.engine.isfinite().all():
        return "the engine's log-probs are not finite"
    limit = CONFIDENCE * precision.rounding(float(now.trainer.std()))
    worst = float(now.gap.max())
    if not worst <= limit:
        return (
            f"the engine's log-probs differ from the trainer's by {worst:.3g} nats per token, and rounding in "
            f"{str(precision.dtype).removeprefix('torch.')} explains {limit:.2g}"
        )
    for before in earlier:
        trainer, engine = now.trainer - before.trainer, now.engine - before.engine
        ours, theirs, apart = (float(change.abs().mean()) for change in (trainer, engine, engine - trainer))
        said = f"from {before.weights} on the trainer's log-probs have changed by {ours:.3g} nats per token"
        flips = trainer.numel() * precision.vocabulary * ours
        flips /= torch.finfo(precision.dtype).eps * max(1.0, float(now.trainer.abs().max()))
        if repeats and not engine.any() and flips >= FLIPS and trainer.ne(0).double().mean() > 0.5:
            return f"{said}, and the engine's by nothing at all"
        if noise is not None and max(ours, theirs) > NOTICEABLE * noise and apart > SHARE * max(ours, theirs):
            return f"{said} and the engine's by {theirs:.3g}, {apart:.3g} apart, where rounding explains {noise:.2g}"
    return None


def probe_sequences(tokenizer: Any, vocabulary: int, longest: int) -> list[list[int]]:
    """Return the probes: ordinary tokens, spread over the vocabulary by a counter.

    Args:
        tokenizer: tokens that it added to its vocabulary, as those of images, are left out.
        vocabulary: number of tokens that the model knows.
        longest: longest sequence that the engine takes.
    """
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    ordinary = [token for token in range(min(vocabulary, len(tokenizer))) if token not in special] or [0]
    length = max(2, min(LENGTH, longest))
    tokens = [ordinary[int(len(ordinary) * (i * GOLDEN_RATIO % 1))] for i in range(SEQUENCES * length)]
    return [tokens[i * length : (i + 1) * length] for i in range(SEQUENCES)]


class WeightProbes:
    """Scores the probes by engine and trainer, and compares them.

    Args:
        config: the run's settings.
        engine: the rollout engine, or one of its replicas, with weights of this run.
        update: scores by the policy, on all ranks.
        tokenizer: knows the vocabulary.
    """

    def __init__(self, config: Config, engine: Any, update: PolicyUpdate, tokenizer: Any) -> None:
        self._score: Callable[..., list[list[float]] | None] | None = getattr(engine, "score", None)
        self._name = f"server at {engine.url}" if hasattr(engine, "url") else "engine"
        self._update, self._strategy = update, update.strategy
        self._adapted = uses_lora(config.model.lora)
        settings = update.policy.base.config
        text, vision = settings.get_text_config(), settings.vision_config if reads_images(settings) else None
        self._precision = Precision(
            _coarsest_dtype(update.policy, config.rollout, config.model.lora),
            layers=int(text.num_hidden_layers) + (tower_layers(vision) if vision is not None else 0),
            width=max(text.hidden_size, text.vocab_size, largest_value(text, "intermediate_size") or 0),
            vocabulary=int(text.vocab_size),
        )
        longest = config.rollout.max_model_len or config.data.max_prompt_tokens + config.rollout.max_response_tokens
        longest -= 1  # vLLM samples a token after them
        sample = None if update.policy.images is None else update.policy.images.sample
        self._shown = None if sample is None or len(sample.token_ids) + LENGTH > longest else sample
        self._sequences = probe_sequences(tokenizer, text.vocab_size, longest)
        self._batch = _as_batch(self._sequences, self._shown)
        self._noise: float | None = None
        self._repeats: bool | None = None
        self._base: Scores | None = None
        self._earlier: list[Scores] = []

    def check(self, version: int, ours: torch.Tensor | None = None) -> dict[str, float] | None:
        """Compare engine and trainer, which should have weights `version`; all ranks call it together.

        Args:
            version: version of the weights.
            ours: from `score_by_trainer`, of the same weights; None: they are scored now.

        Returns:
            Metrics; None where the engine samples with the policy's own weights, or cannot score.

        Raises:
            RunError: the engine of a rank has other weights.
        """
        start = time.perf_counter()
        theirs = self._by_engine()
        if not self._strategy.sum([theirs is not None])[0]:
            return None
        now = _scores(f"weights {version}", self.score_by_trainer() if ours is None else ours, theirs)
        if self._repeats is None:
            self._repeats = torch.equal(self.score_by_trainer(), self.score_by_trainer())
            self._base = self._without_adapter() if self._adapted else None
            self._noise = self._measure_noise(self._base or now)
        problem = None
        if now is not None:
            earlier = self._earlier + ([] if self._base is None else [self._base])
            problem = find_problem(now, earlier, self._precision, self._noise, repeats=self._repeats)
        if self._strategy.sum([problem is not None])[0]:
            self._raise(version, problem)
        if now is not None:
            self._earlier = [*self._earlier[:1], now]
        gap = max(self._strategy.gather_objects(0.0 if now is None else float(now.gap.mean())))
        return {"rollout/probe_logprob_diff": gap, "timing_s/probe": time.perf_counter() - start}

    def _raise(self, version: int, problem: str | None) -> None:
        """Raise RunError on all ranks; with adapters it says whether base model or adapter is wrong."""
        what = "weights"
        if self._adapted:
            base = self._without_adapter()
            wrong = base and find_problem(base, [self._base] if self._base else [], self._precision, self._noise)
            what = "base model" if wrong else "adapter"

        def fail() -> None:
            if problem is not None:
                raise RunError(
                    f"the rollout {self._name} does not sample with the policy's {what} of version {version}: on "
                    f"{len(self._sequences)} fixed sequences {problem}. They were sent, but not applied, or have been "
                    "replaced since: start the engine's server again, and the run from its newest checkpoint. "
                    "rollout.probe_every=0 turns this check off, for an engine that is meant to differ"
                )

        raise_on_all_ranks(self._strategy, fail)

    def _measure_noise(self, first: Scores | None) -> float | None:
        """Return how far the log-probs of equal weights differ, within what rounding to fp32 and `dtype` explains."""
        if first is None:
            return None
        spread = float(first.trainer.std())
        exact, coarse = (self._precision.rounding(spread, dtype) for dtype in (torch.float32, None))
        return min(max(float(first.gap.mean()), exact), coarse)

    def _without_adapter(self) -> Scores | None:
        theirs = self._by_engine(adapter=False)
        with Reference(self._update.policy, "adapters_off").active():
            ours = self.score_by_trainer()
        return _scores("the base model", ours, theirs)

    def _by_engine(self, *, adapter: bool = True) -> list[list[float]] | None:
        score, shown = self._score, self._shown
        if score is None:
            return None
        if shown is None:
            return raise_on_all_ranks(self._strategy, lambda: score(self._sequences, adapter=adapter))
        sequences = [[*shown.token_ids, *sequence] for sequence in self._sequences]
        scores = raise_on_all_ranks(self._strategy, lambda: score(sequences, adapter=adapter, images=shown.images))
        return scores and [each[len(shown.token_ids) - 1 :] for each in scores]

    def score_by_trainer(self) -> torch.Tensor:
        """Return the policy's log-probs [S, T] fp64 at temperature 1, which engines score at; all ranks call it."""
        policy = self._update.policy
        own, policy.head = policy.head, replace(policy.head, banned=())  # engines score all tokens
        try:
            scores = self._update.score(self._batch).double().view(len(self._sequences), -1)
        finally:
            policy.head = own
        if isinstance(policy, FSDPModule):
            policy.reshard()  # the head stays gathered after a forward, for a backward that does not follow
        return scores


class EngineProbes:
    """Sends weights to the engine, and probes it where that is due.

    Args:
        responses: the source, whose engine it is.
        probes: the comparison, for each replica of the engine.
        every: weight versions from one probe to the next.
        metrics: of the probe before the first step.
    """

    def __init__(
        self, responses: ResponseSource, probes: Sequence[WeightProbes], every: int, metrics: dict[str, float]
    ) -> None:
        self._responses, self._probes, self._every, self._metrics = responses, probes, every, metrics

    def pop_metrics(self) -> dict[str, float]:
        """Return and clear the metrics of the last probe."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def send_weights(self, version: int) -> None:
        """Send the policy's current weights, which are `version`; all ranks call it together.

        Raises:
            RunError: the engine of a rank has other weights.
        """
        if version % self._every:
            self._responses.update_weights(version)
            return
        # Before the weights are sent: an engine that sleeps on this device wakes up with them, and takes its memory.
        ours = self._probes[0].score_by_trainer()
        with self._responses.exclusive_engine():
            self._responses.update_weights(version)
            self._metrics = _worst([each.check(version, ours) for each in self._probes])


def _worst(checks: Sequence[dict[str, float] | None]) -> dict[str, float]:
    """Return the metrics of the replica with the largest difference, with the seconds of all; empty without any."""
    found = [metrics for metrics in checks if metrics is not None]
    worst = max(found, key=lambda metrics: metrics["rollout/probe_logprob_diff"], default={})
    return worst | ({"timing_s/probe": sum(metrics["timing_s/probe"] for metrics in found)} if found else {})


def probe_weights(
    config: Config, responses: ResponseSource, engine: Engine, update: PolicyUpdate, tokenizer: Any, version: int
) -> EngineProbes | None:
    """Probe the engine's first weights, and return what does so every `rollout.probe_every` versions.

    Args:
        config: the run's settings.
        responses: the source of responses.
        engine: its engine, with the weights of `version`.
        update: scores by the policy.
        tokenizer: knows the vocabulary.
        version: steps finished before this start.

    Returns:
        None where the engine has no weights of its own, or is meant to differ, and with a mixture of experts in 16
        bits.

    Raises:
        RunError: the engine has other weights.
    """
    every, quantized = config.rollout.probe_every, config.model.quantize != "none"
    if not every or (quantized and not engine_kind(config.rollout).samples_with_policy):
        return None
    mixture = has_experts(update.policy.base.config.get_text_config())
    if mixture and _coarsest_dtype(update.policy, config.rollout, config.model.lora).itemsize == 2:
        return None  # rounding sends tokens to other experts, by which log-probs differ without a bound
    probes = [WeightProbes(config, each, update, tokenizer) for each in getattr(engine, "replicas", (engine,))]
    with responses.exclusive_engine():
        metrics = _worst([each.check(version) for each in probes])
    if not metrics:
        return None
    # A resumed run logs what the run without a break logs.
    return EngineProbes(responses, probes, every, {} if version % every else metrics)


def _coarsest_dtype(policy: PolicyModel, rollout: RolloutConfig, lora: LoraConfig) -> torch.dtype:
    """Return the least exact dtype among those of the policy's products, the sampler's, and the frozen base's."""
    named = [name for name in (rollout.dtype, lora.base_dtype) if name != "auto"]
    return max((policy.compute_dtype, *(getattr(torch, name) for name in named)), key=lambda d: torch.finfo(d).eps)


def _scores(weights: str, ours: torch.Tensor, theirs: list[list[float]] | None) -> Scores | None:
    """Return a rank's scores; None where its engine has none."""
    return None if theirs is None else Scores(weights, ours, torch.tensor(theirs, dtype=torch.float64))


def _as_batch(sequences: Sequence[Sequence[int]], shown: Prompt | None) -> TrainBatch:
    """Return sequences as a batch that is scored at temperature 1.

    Args:
        sequences: all of one length.
        shown: a prompt with images that they respond to; None: the prompt of each is its first token.
    """
    count, tokens = len(sequences), torch.tensor(sequences, dtype=torch.int64)
    prompts, responses, prompt_index = tokens[:, :1], tokens[:, 1:], torch.arange(count)
    if shown is not None:
        prompts, responses, prompt_index = torch.tensor([shown.token_ids]), tokens, torch.zeros_like(prompt_index)
    return TrainBatch(
        prompt_tokens=prompts.flatten(),
        prompt_offsets=torch.arange(len(prompts) + 1) * prompts.shape[1],
        prompt_index=prompt_index,
        tokens=responses.flatten(),
        offsets=torch.arange(count + 1) * responses.shape[1],
        advantages=torch.ones(count),
        logprobs=torch.zeros(responses.numel()),
        temperature=1.0,
        **({} if shown is None else image_columns([shown])),
    )
