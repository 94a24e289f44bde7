"""`judge`: scores by a chat model behind an OpenAI-compatible API."""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hwgrpo.errors import DataError
from hwgrpo.rewards.checked_kwargs import Kwargs
from hwgrpo.rewards.services.concurrent_requests import InvalidReply, Request, Service
from hwgrpo.rewards.services.connection import Connection
from hwgrpo.rewards.services.judge_replies import ScoreReader, Template, template_text
from hwgrpo.rewards.services.pacing import RateLimit
from hwgrpo.rewards.services.reply_cache import ReplyCache, cache_name
from hwgrpo.support.launched_ranks import launched_rank
from hwgrpo.values import Completions, Prompt, PromptBatch

PATH = "/chat/completions"
OWN_FIELDS = ("model", "messages", "n", "stream")
"""Fields of a request that `body` cannot set."""
MOST_TOKENS = 10**9
"""Tokens that a reply may count: no model reads or writes more."""


@dataclass(frozen=True)
class Reply:
    """What a judge wrote, and its cost."""

    text: str
    prompt_tokens: int
    completion_tokens: int


def token_count(value: Any) -> int:
    """Return the number of tokens in a reply's usage; 0 for what is no number of tokens, as the server may send any."""
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else 0


class Judge:
    """The score that a chat model gives each response; a request per response, and one for equal ones.

    Args:
        key, name: the setting and the name in metrics; passed by the trainer.
        model: its name on the server.
        template: prompt with {prompt}, {response}, {ground_truth} and {column}; None: `TEMPLATE`.
        template_file: a file with it.
        system: system message, with the same placeholders.
        pattern: regular expression; the first group of its last match is the score. None: `score: <number>`.
        json_field: the reply has a JSON object, whose field this is; the pattern is not used.
        score_range: [lowest, highest]; a score outside is no valid reply.
        temperature, max_tokens: sampling of the judge; null leaves them to the server.
        body: further fields of the request, e.g. {"seed": 1, "response_format": {"type": "json_object"}}.
        cache: folder of replies, shared by ranks and runs; None: none.
        requests_per_minute: of all ranks together, retries included; None: no limit.
        prompt_price, completion_price: cost of a million tokens.
        connection: `Connection`'s.

    Raises:
        ConfigError: an argument is unknown, missing or wrong.
    """

    def __init__(
        self,
        key: str,
        name: str,
        model: str,
        template: str | None = None,
        template_file: str | None = None,
        system: str | None = None,
        pattern: str | None = None,
        json_field: str | None = None,
        score_range: Any = None,
        temperature: float | None = 0.0,
        max_tokens: int | None = 512,
        body: Mapping[str, Any] | None = None,
        cache: str | None = None,
        requests_per_minute: float | None = None,
        prompt_price: float | None = None,
        completion_price: float | None = None,
        **connection: Any,
    ) -> None:
        checks = Kwargs(key)
        checks.text("model", model)
        text, source = template_text(checks, template, template_file)
        self._template = Template(text, checks, source, needs_response=True)
        self._system = None if system is None else Template(system, checks, "system", needs_response=False)
        self._reader = ScoreReader(checks, pattern, json_field, score_range)
        for each, value in (
            ("temperature", temperature),
            ("prompt_price", prompt_price),
            ("completion_price", completion_price),
        ):
            if value is not None:
                checks.number(each, value, at_least=0)
        if max_tokens is not None:
            checks.number("max_tokens", max_tokens, at_least=1, whole=True)
        if requests_per_minute is not None:
            checks.number("requests_per_minute", requests_per_minute, above=0)
            requests_per_minute /= launched_rank().world_size
        for each in body or {}:
            if each in OWN_FIELDS:
                raise checks.error("body", dict(body or {}), f"sets {each!r}, which the judge sets itself: remove it")
        sampling = {"temperature": temperature, "max_tokens": max_tokens}
        self._parameters = {
            "model": model,
            **{each: value for each, value in sampling.items() if value is not None},
            **(body or {}),
        }
        self._name = name
        priced = prompt_price is not None or completion_price is not None
        self._prices = (prompt_price or 0, completion_price or 0) if priced else None
        connected = Connection.of(type(self), key, connection)
        self._service = Service(connected, key, RateLimit(requests_per_minute))
        self._cache = None if cache is None else ReplyCache(cache, key)
        self._counts = collections.Counter[str]()
        self._counting = threading.Lock()  # replies are read in threads

    def __call__(self, batch: PromptBatch, completions: Completions) -> list[Any]:
        """Return a dict per response with score and cost, [S]; an exception stands for one without a score."""
        names: list[str | DataError] = []
        bodies: dict[str, dict[str, Any]] = {}
        for index, text in zip(completions.prompt_index.tolist(), completions.texts, strict=True):
            try:
                body = self._body(batch.prompts[index], text)
            except DataError as error:  # of this row alone
                names.append(error)
                continue
            name = cache_name(body)
            names.append(name)
            bodies[name] = body
        results: dict[str, Any] = {name: self._cached(name) for name in bodies}
        missing = [name for name, found in results.items() if found is None]
        self._count(requests=len(missing), cache_hits=len(bodies) - len(missing))
        replies = self._service.call_all([Request(PATH, bodies[name], self._asked(name)) for name in missing])
        results.update(zip(missing, replies, strict=True))
        paid = set(missing)
        rewards: list[Any] = []
        for name in names:
            if isinstance(name, DataError):
                rewards.append(name)
                continue
            result = results[name]
            rewards.append(result if isinstance(result, Exception) else self._reward(*result, paid=name in paid))
            paid.discard(name)  # equal responses share one reply, which is paid for once
        return rewards

    def _body(self, prompt: Prompt, text: str) -> dict[str, Any]:
        """Return the request for a response."""
        messages = [{"role": "user", "content": self._template.fill(prompt, text)}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system.fill(prompt, text)})
        return {**self._parameters, "messages": messages}

    def counts(self) -> dict[str, float]:
        """Return requests, replies from the cache, tokens and, with a price, their cost since the last call.

        Tokens of replies without a valid score count, too. Further attempts of a request are the same request.
        """
        with self._counting:
            counts, self._counts = self._counts, collections.Counter[str]()
        names = ("requests", "cache_hits", "prompt_tokens", "completion_tokens")
        numbers = {name: float(counts[name]) for name in names}
        cost = self._cost(counts["prompt_tokens"], counts["completion_tokens"])
        return numbers if cost is None else {**numbers, "cost": cost}

    def _count(self, **numbers: int) -> None:
        with self._counting:
            self._counts.update(numbers)

    def _cost(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        if self._prices is None:
            return None
        return (prompt_tokens * self._prices[0] + completion_tokens * self._prices[1]) / 1e6

    def _reward(self, score: float, reply: Reply, *, paid: bool) -> dict[str, Any]:
        prompt_tokens, completion_tokens = (reply.prompt_tokens, reply.completion_tokens) if paid else (0, 0)
        reward = {
            "score": score,
            f"{self._name}_prompt_tokens": prompt_tokens,
            f"{self._name}_completion_tokens": completion_tokens,
            f"{self._name}_reply": reply.text,
        }
        cost = self._cost(prompt_tokens, completion_tokens)
        if cost is not None:
            reward[f"{self._name}_cost"] = cost
        return reward

    def _cached(self, name: str) -> tuple[float, Reply] | None:
        """Return score and reply from the cache; None if there is no valid one."""
        stored = None if self._cache is None else self._cache.read(name)
        if not isinstance(stored, Mapping) or not isinstance(stored.get("text"), str):
            return None
        with suppress(InvalidReply):
            return self._reader.score(stored["text"]), Reply(stored["text"], 0, 0)
        return None

    def _asked(self, name: str) -> Any:
        """Return a function that reads the reply to one request; tokens of its invalid replies count, too."""
        spent = [0, 0]

        def read(answer: Any) -> tuple[float, Reply]:
            for place, field in enumerate(("prompt_tokens", "completion_tokens")):
                usage = answer.get("usage") if isinstance(answer, Mapping) else None
                tokens = token_count(usage.get(field) if isinstance(usage, Mapping) else None)
                spent[place] += tokens
                self._count(**{field: tokens})
            try:
                text = answer["choices"][0]["message"]["content"]
            except (KeyError, IndexError, TypeError) as error:
                raise InvalidReply("the reply has no choices[0].message.content") from error
            if not isinstance(text, str):
                raise InvalidReply(f"the reply's content is no text but {type(text).__name__}")
            score = self._reader.score(text)
            if self._cache is not None:
                self._cache.write(name, {"text": text, "prompt_tokens": spent[0], "completion_tokens": spent[1]})
            return score, Reply(text, *spent)

        return read
