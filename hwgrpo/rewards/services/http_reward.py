"""`http`: POST of prompts, responses, ground truths and columns to a URL, which replies with rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hwgrpo.rewards.checked_kwargs import Kwargs
from hwgrpo.rewards.processes.messages import number_of
from hwgrpo.rewards.services.concurrent_requests import InvalidReply, Request, Service, ServiceError
from hwgrpo.rewards.services.connection import Connection
from hwgrpo.support.jsonlines import jsonable
from hwgrpo.values import Completions, Prompt, PromptBatch

FORMATS = ("hwgrpo", "openrlhf")


class HttpReward:
    """Rewards from a URL.

    Args:
        key: the setting, for messages; passed by the trainer.
        format: "hwgrpo" or "openrlhf": what is sent and what is replied (docs/reward-models.md).
        batch_size: most responses of a request; None: all of a batch in one.
        connection: `Connection`'s.

    Raises:
        ConfigError: an argument is unknown, missing or wrong.
    """

    def __init__(self, key: str, format: str = "hwgrpo", batch_size: int | None = None, **connection: Any) -> None:
        checks = Kwargs(key)
        checks.choice("format", format, FORMATS)
        if batch_size is not None:
            checks.number("batch_size", batch_size, at_least=1, whole=True)
        self._body = {"hwgrpo": _own_body, "openrlhf": _openrlhf_body}[format]
        self._batch_size = batch_size
        self._service = Service(Connection.of(type(self), key, connection), key)

    def __call__(self, batch: PromptBatch, completions: Completions) -> list[Any]:
        """Return the rewards of responses, [S]; an exception stands for each response of a failed request."""
        prompts = [batch.prompts[index] for index in completions.prompt_index.tolist()]
        texts, size = completions.texts, self._batch_size or len(completions)
        parts = [slice(first, first + size) for first in range(0, len(texts), size)]
        requests = [Request("", self._body(prompts[part], texts[part]), _reader(len(texts[part]))) for part in parts]
        rewards: list[Any] = []
        for part, result in zip(parts, self._service.call_all(requests), strict=True):
            rewards += [result] * len(texts[part]) if isinstance(result, Exception) else result
        return rewards


def _own_body(prompts: list[Prompt], texts: tuple[str, ...]) -> Mapping[str, Any]:
    return {
        "prompts": [prompt.text if prompt.messages is None else [*map(dict, prompt.messages)] for prompt in prompts],
        "responses": list(texts),
        "ground_truths": [jsonable(prompt.ground_truth) for prompt in prompts],
        "columns": [jsonable(prompt.columns) for prompt in prompts],
    }


def _openrlhf_body(prompts: list[Prompt], texts: tuple[str, ...]) -> Mapping[str, Any]:
    return {
        "query": [prompt.text + text for prompt, text in zip(prompts, texts, strict=True)],
        "prompts": [prompt.text for prompt in prompts],
        "labels": [jsonable(prompt.ground_truth) for prompt in prompts],
    }


def _reader(size: int) -> Callable[[Any], list[Any]]:
    """Return a function that reads the rewards of `size` responses from a reply."""

    def read(reply: Any) -> list[Any]:
        rewards = reply.get("rewards") if isinstance(reply, Mapping) else reply
        if not isinstance(rewards, list) or len(rewards) != size:
            has = f"a list of {len(rewards)}" if isinstance(rewards, list) else type(rewards).__name__
            raise InvalidReply(f"the reply must have a list of {size} rewards; it has {has}")
        return [_reward(each) for each in rewards]

    return read


def _reward(value: Any) -> Any:
    """Return one reward of a reply: a number, None, a list for steps, a dict with score; or an exception."""
    if isinstance(value, Mapping) and "error" in value and "score" not in value:
        return ServiceError(f"the service failed on this response: {value['error']}")
    score = value.get("score", "") if isinstance(value, Mapping) else value
    for each in score if isinstance(score, list) else [score]:
        if each is not None and number_of(each) is None:
            raise InvalidReply(
                f"a reward must be a number, null, a list of numbers or a dict with score; it is {value!r:.200}"
            )
    return value
