"""`served_reward_model`: a reward model on a server of vLLM or SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwgrpo.errors import ConfigError, error_text
from hwgrpo.rewards.checked_kwargs import Kwargs
from hwgrpo.rewards.conversation import conversation, prompt_text
from hwgrpo.rewards.services.concurrent_requests import InvalidReply, Request, Service
from hwgrpo.rewards.services.connection import Connection
from hwgrpo.rewards.services.judge_replies import as_float
from hwgrpo.values import Completions, Prompt, PromptBatch

PATHS = {
    "vllm_classify": "/classify",
    "vllm_pooling": "/pooling",
    "vllm_score": "/score",
    "sglang_classify": "/classify",
}
"""Name of an API -> its path."""
CHAT_APIS = ("vllm_classify", "vllm_pooling")
"""APIs that accept chat messages, to which the server applies the model's chat template."""


class ServedRewardModel:
    """A score of each response by a model that another process serves; one request per response.

    Args:
        key: the setting, for messages; passed by the trainer.
        template_date: the run's date for chat templates with a clock, with a tokenizer; passed by the trainer.
        api: vllm_classify, vllm_pooling, vllm_score (a cross-encoder of prompt and response) or sglang_classify.
        model: its name on the server; None: the only one.
        label: index of the score in the reply of classify and pooling.
        activation: vLLM: whether scores are after the model's activation (sigmoid, softmax) or logits.
        tokenizer: folder or hub name of the model's tokenizer: its chat template is applied here and tokens are sent.
            None: the server has messages of conversations, and the text of plain prompts.
        chat_template: with a tokenizer, whether its chat template is applied; None: if it has one.
        connection: `Connection`'s.

    Raises:
        ConfigError: an argument is unknown, missing or wrong, or there is no such tokenizer.
    """

    def __init__(
        self,
        key: str,
        api: str = "vllm_classify",
        model: str | None = None,
        label: int = 0,
        activation: bool = False,
        tokenizer: str | None = None,
        chat_template: bool | None = None,
        template_date: str | None = None,
        **connection: Any,
    ) -> None:
        checks = Kwargs(key)
        checks.choice("api", api, PATHS)
        checks.number("label", label, at_least=0, whole=True)
        checks.boolean("activation", activation)
        if tokenizer is not None and api == "vllm_score":
            raise checks.error("tokenizer", tokenizer, "has no effect with api=vllm_score: remove it")
        if chat_template is not None and tokenizer is None:
            raise checks.error("chat_template", chat_template, "needs a tokenizer: set that, or remove it")
        self._api, self._label, self._key = api, label, key
        self._common: dict[str, Any] = {} if model is None else {"model": model}
        if api != "sglang_classify":
            self._common["use_activation"] = activation
        elif activation:
            raise checks.error("activation", activation, "has no effect with api=sglang_classify: remove it")
        self._text = None if tokenizer is None else _scored_text(checks, tokenizer, chat_template, template_date)
        self._service = Service(Connection.of(type(self), key, connection), key)

    def __call__(self, batch: PromptBatch, completions: Completions) -> list[float | Exception]:
        """Return the score of each response, [S]; an exception stands for one without a score."""
        requests = [
            Request(PATHS[self._api], {**self._common, **self._input(batch.prompts[index], text)}, self._read)
            for index, text in zip(completions.prompt_index.tolist(), completions.texts, strict=True)
        ]
        return self._service.call_all(requests)

    def _input(self, prompt: Prompt, text: str) -> dict[str, Any]:
        """Return the part of a request that depends on the response."""
        if self._api == "vllm_score":
            return {"text_1": prompt_text(prompt), "text_2": text}
        if self._api == "vllm_pooling":
            return {"task": "classify", **self._model_input(prompt, text)}
        return self._model_input(prompt, text)

    def _model_input(self, prompt: Prompt, text: str) -> dict[str, Any]:
        sglang = self._api == "sglang_classify"
        if self._text is not None:
            return {"input_ids" if sglang else "input": self._text.tokens(prompt, text)}
        if prompt.messages is None:
            return {"text" if sglang else "input": prompt.text + text}
        if sglang:
            raise ConfigError(
                f"{self._key}: prompts are conversations, and SGLang's /classify applies no chat template: set "
                f"{self._key}.kwargs.tokenizer to the folder or hub name of the reward model's tokenizer"
            )
        return {"messages": conversation(prompt, text)}

    def _read(self, reply: Any) -> float:
        """Return the score in a reply.

        Raises:
            InvalidReply: it has none.
        """
        try:
            if self._api == "sglang_classify":
                value = (reply[0] if isinstance(reply, list) else reply)["embedding"][self._label]
            else:
                [entry] = reply["data"]
                value = {
                    "vllm_classify": lambda: entry["probs"][self._label],
                    "vllm_pooling": lambda: entry["data"][self._label],
                    "vllm_score": lambda: entry["score"],
                }[self._api]()
        except (KeyError, IndexError, TypeError, ValueError) as error:
            has = ", ".join(map(str, reply)) if isinstance(reply, Mapping) else type(reply).__name__
            raise InvalidReply(f"no score {self._label} in the reply ({has}): {error_text(error)}") from error
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidReply(f"the score is no number but {type(value).__name__}")
        return as_float(value)


def _scored_text(checks: Kwargs, tokenizer: str, chat_template: bool | None, template_date: str | None) -> Any:
    from hwgrpo.rewards.models.scored_text import ScoredText
    from hwgrpo.support.pretrained_tokenizer import pretrained_tokenizer

    try:
        loaded = pretrained_tokenizer(tokenizer)
    except (OSError, ValueError) as error:
        raise checks.error("tokenizer", tokenizer, f"has no readable tokenizer: {error_text(error)}") from error
    if chat_template and not loaded.chat_template:
        raise checks.error("chat_template", True, "needs a tokenizer with a chat template: remove it")
    return ScoredText(loaded, chat_template, None, template_date=template_date)
