"""The local engine's session: requests that come in turns, decoded in the slots of one decoder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from hwgrpo.ragged import offsets_of
from hwgrpo.rollout.counter_rng import stream_keys
from hwgrpo.rollout.deadlines import GroupDeadlines
from hwgrpo.rollout.engine import TurnRequest
from hwgrpo.rollout.local.decode_rows import tokens_of
from hwgrpo.rollout.local.decoding import Decoded, Decoder, Settings
from hwgrpo.rollout.local.slot_scheduler import Request, most_prompts
from hwgrpo.values import Completions, PromptBatch, Sampling


@dataclass
class _Group:
    """A request of n responses."""

    first: int
    """The decoder's number of its first response; those of the others follow."""
    kind: int
    responses: list[Decoded | None]
    """[n]; None: not ended, or dropped."""
    missing: int
    """Responses that have not ended; 0 for a group that was dropped."""


class DecodeSession:
    """Requests of one `generate`, with or without workflows; see `Session` for the methods.

    Args:
        decoder: nothing is submitted yet.
        kinds: the decoder's, empty; those of the requests are appended.
        deadlines: of no groups yet; requests are its groups.
        slots: the decoder's.
        settings_of: makes the settings of a kind of sampling.
        check: raises ConfigError or DataError where prompts or settings do not fit the model.
        closed: called with the metrics at the end: perf/rollout_tokens_per_second (response tokens, without the time
            between calls of this session) and perf/rollout_live_rows (share of the drawn tokens that were kept); with
            requests that are kept, rollout/prefilled_tokens and rollout/continued_tokens, too.
        active: entered until the session is closed.
    """

    def __init__(
        self,
        decoder: Decoder,
        kinds: list[Settings],
        deadlines: GroupDeadlines,
        *,
        slots: int,
        settings_of: Callable[[Sampling], Settings],
        check: Callable[[PromptBatch, Sequence[Sampling]], None],
        closed: Callable[[Mapping[str, float]], None],
        active: AbstractContextManager[Any],
    ) -> None:
        self._decoder, self._kinds, self._deadlines = decoder, kinds, deadlines
        self._slots, self._settings_of, self._check, self._closed = slots, settings_of, check, closed
        self._kind_of: dict[Sampling, int] = {}
        self._groups: list[_Group] = []
        self._running = 0
        """Groups that have not ended."""
        self._least_n: int | None = None
        self._keeps = False
        self._tokens, self._seconds = 0, 0.0
        self._stack = ExitStack()
        self._stack.enter_context(active)
        self._stack.enter_context(deadlines.reported())

    @property
    def busy(self) -> bool:
        """Whether a submitted request has not ended."""
        return self._running > 0

    def submit(self, requests: Sequence[TurnRequest]) -> list[int]:
        """Queue requests of n responses each; return the number of each, counted from 0.

        Prompts with the same tokens share one prefill. A prompt whose first response gets its slot after an update of
        the weights is prefilled with the new ones; so is one of which some responses are decoded already, for the
        others.

        Raises:
            ConfigError: prompt and response do not fit the model, or a stop token is not in its vocabulary.
            DataError: a prompt has no tokens.
        """
        start = time.perf_counter()
        samplings = [each.sampling for each in requests]
        self._check(PromptBatch(tuple(each.prompt for each in requests)), samplings)
        self._keeps = self._keeps or any(each.kept for each in requests)
        n = min(sampling.n for sampling in samplings)
        if self._least_n is None or n < self._least_n:
            self._least_n = n
            self._decoder.limit_prompts(most_prompts(self._slots, n))
        keys = {
            seed: iter(
                stream_keys(
                    seed,
                    [r.prompt.uid for r in requests if r.sampling.seed == seed for _ in range(r.sampling.n)],
                    [sample for each in samplings if each.seed == seed for sample in range(each.n)],
                ).tolist()
            )
            for seed in {each.seed for each in samplings}
        }
        first_group = len(self._groups)
        for group, request in enumerate(requests, first_group):
            sampling, kind = request.sampling, self._kind(request.sampling)
            continues = None
            if request.continues is not None:
                earlier, sample = request.continues
                continues = self._groups[earlier].first + sample
            numbers = [
                self._decoder.submit(
                    Request(
                        tokens_of(request.prompt),
                        key,
                        sampling.max_response_tokens,
                        kind,
                        group,
                        kept=request.kept,
                        continues=continues,
                    )
                )
                for key in islice(keys[sampling.seed], sampling.n)
            ]
            self._groups.append(_Group(numbers[0], kind, [None] * sampling.n, sampling.n))
        self._running += len(requests)
        self._deadlines.expect(len(requests))
        self._seconds += time.perf_counter() - start
        return list(range(first_group, len(self._groups)))

    @torch.no_grad()
    def advance(self) -> list[int]:
        """Decode until drawn tokens are read; return the requests that have ended, or were dropped as too late.

        Raises:
            RunError: the model's logits are not finite.
        """
        start = time.perf_counter()
        ended = []
        for response in self._decoder.advance():
            group = self._groups[response.group]
            group.responses[response.number - group.first] = response
            group.missing -= 1
            self._tokens += len(response.per_token["tokens"])
            if not group.missing:
                self._deadlines.finish(response.group)
                ended.append(response.group)
        overdue = self._deadlines.overdue()
        for number in overdue:
            self._drop(number)
        self._running -= len(ended) + len(overdue)
        self._seconds += time.perf_counter() - start
        return ended + overdue

    def take(self, numbers: Sequence[int]) -> Completions:
        """Return the responses to requests that have ended, ordered by request, then by sample."""
        groups = [self._groups[number] for number in numbers]
        assert not any(group.missing for group in groups)
        texts = [
            "" if each is None else self._kinds[g.kind].watch.text(each.per_token["tokens"].tolist(), each.finished)
            for g in groups
            for each in g.responses
        ]
        counts = torch.tensor([len(group.responses) for group in groups])
        index = torch.arange(len(groups)).repeat_interleave(counts)
        responses = [each for group in groups for each in group.responses]
        completions = _completions(responses, texts, index, self._decoder.version)
        for group in groups:
            group.responses = [None] * len(group.responses)
        return self._deadlines.apply(completions, numbers)

    def release(self, responses: Sequence[tuple[int, int]]) -> None:
        """Keep some responses, each the number of a request and an index, no longer: no request continues them."""
        for number, sample in responses:
            self._decoder.release(self._groups[number].first + sample)

    def cancel(self, numbers: Sequence[int]) -> None:
        """End requests that have not ended; their responses are lost."""
        for number in numbers:
            self._drop(number)
            self._deadlines.finish(number)
        self._running -= len(numbers)

    def close(self) -> None:
        """End all requests, and report the metrics."""
        self._stack.close()
        decoder = self._decoder
        metrics = {
            "perf/rollout_tokens_per_second": self._tokens / max(self._seconds, 1e-9),
            "perf/rollout_live_rows": self._tokens / max(decoder.rows_drawn, 1),
        }
        if self._keeps:
            metrics["rollout/prefilled_tokens"] = float(decoder.prefilled_tokens)
            metrics["rollout/continued_tokens"] = float(decoder.continued_tokens)
        self._closed(metrics)

    def _drop(self, number: int) -> None:
        self._decoder.drop_group(number)
        group = self._groups[number]
        group.missing = 0
        self.release([(number, sample) for sample in range(len(group.responses))])

    def _kind(self, sampling: Sampling) -> int:
        common = replace(sampling, n=1, max_response_tokens=1, seed=0, group_timeout=None)
        if common not in self._kind_of:
            self._kind_of[common] = len(self._kinds)
            self._kinds.append(self._settings_of(common))
        return self._kind_of[common]


def _completions(
    responses: Sequence[Decoded | None], texts: Sequence[str], prompt_index: torch.Tensor, version: int
) -> Completions:
    """Return responses as columns; None, of a group that was dropped, has no tokens.

    Without any tokens they are of the present `version`.
    """
    ended = [each.per_token for each in responses if each is not None]
    lengths = torch.tensor([0 if each is None else len(each.per_token["tokens"]) for each in responses])
    columns: dict[str, Any] = {
        name: torch.from_numpy(np.concatenate([each[name] for each in ended] or [np.empty(0, dtype)]))
        for name, dtype in (("tokens", np.int64), ("logprobs", np.float32), ("versions", np.int64))
    }
    if any("floors" in each for each in ended):
        unfiltered = [np.full(len(each["tokens"]), -np.inf, np.float32) for each in ended]
        columns["floors"] = torch.from_numpy(
            np.concatenate([each.get("floors", none) for each, none in zip(ended, unfiltered, strict=True)])
        )
    versions = columns["versions"]
    oldest, newest = (int(version) for version in versions.aminmax()) if len(versions) else (version, version)
    if oldest == newest:
        del columns["versions"]
    return Completions(
        prompt_index=prompt_index,
        offsets=offsets_of(lengths),
        finished=torch.tensor([each is not None and each.finished for each in responses]),
        texts=tuple(texts),
        weight_version=oldest,
        **columns,
    )
