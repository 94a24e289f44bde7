"""Rows -> examples of supervised training: tokenized prompts with the responses to train."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hwgrpo.data.chat_targets import Targets, chat_targets, text_targets, token_targets
from hwgrpo.data.chat_template import conversation, render
from hwgrpo.data.prompt_findings import findings_of
from hwgrpo.data.prompts import PromptDataset, row_bytes
from hwgrpo.data.row_filter import are_logged, kept_rows
from hwgrpo.data.row_schema import missing_column, read_prompt, read_tools
from hwgrpo.data.sources import Rows, is_generated, open_rows, sources_of, validation_source
from hwgrpo.data.tasks import PREFIX
from hwgrpo.errors import ConfigError, DataError
from hwgrpo.rewards.response_text import ResponseDecoder
from hwgrpo.values import Prompt

MESSAGES = "messages"
"""Column with conversations, of rows without a prompt."""


@dataclass(frozen=True)
class Example(Prompt):
    """One tokenized prompt, with its response."""

    response_ids: tuple[int, ...] = ()
    """The tokens after the prompt, up to the last trained one."""
    trained: tuple[bool, ...] = ()
    """Which of them are trained: all, except in a conversation of several turns."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ExampleDataset(PromptDataset):
    """Tokenized prompts with their responses."""

    responses: Sequence[np.ndarray]
    """[len(self)] int32 arrays."""
    trained: Sequence[np.ndarray]
    """[len(self)] bool arrays."""
    long_responses: int
    """Number of rows whose response is longer than `rollout.max_response_tokens`: dropped, or cut."""

    def prompt(self, row: int, epoch: int) -> Example:
        """Return one example; see `PromptDataset.prompt`."""
        index = self.kept[row]
        return Example(
            uid=f"{epoch}:{row}",
            text=self.texts[row],
            token_ids=tuple(self.token_ids[row].tolist()),
            ground_truth=None,
            columns=self.rows[index],
            source=self.rows.source(index),
            place=self.rows.place(index),
            response_ids=tuple(self.responses[row].tolist()),
            trained=tuple(self.trained[row].tolist()),
        )


def build_examples(
    config: Any, tokenizer: Any, ends: Sequence[int], max_response_tokens: int, which: str
) -> ExampleDataset | None:
    """Read and tokenize the training or validation examples.

    A row has a prompt and a response (`data.response_key`: text, or the rest of the conversation), or a conversation
    alone, as its prompt or in the column `messages`. Tasks have the correct response; they train on prompts that are
    neither those of GRPO nor those of the validation.

    Args:
        config: the `data` settings (`DataConfig`).
        tokenizer: a transformers tokenizer.
        ends: ids of the tokens that end a response.
        max_response_tokens: most tokens from the first trained one on; longer ones are treated by `data.overlong`.
        which: "train" or "validation".

    Returns:
        The examples; None for "validation" where none are configured, or those have no responses.

    Raises:
        ConfigError: settings contradict the data.
        DataError: data is missing or malformed; the message names file and row.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no end-of-sequence token, with which a response ends; see model.tokenizer")
    spec, split, max_rows, keep = config.train, config.split, config.max_rows, config.keep
    if which == "validation":
        spec = validation_source(config)
        split, max_rows, keep = config.validation_split, config.validation_max_rows, None
        if spec is None:
            return None
    tasks = {"train": "warm", "validation": "validation"}
    parts = []
    for source in sources_of(spec):
        own = tasks[which] if source.startswith(PREFIX) else which
        parts += open_rows(source, own if is_generated(source) else split, f"data.{which}").parts
    rows, name = Rows(parts), ", ".join(sources_of(spec))
    if which == "validation" and not _has_responses(rows, config):
        return None
    chosen = kept_rows(rows, keep, config.response_key)
    available = len(chosen)
    chosen = chosen[:max_rows] if max_rows else chosen
    reader = _Reader(rows, config, tokenizer, ends)
    built: list[tuple[int, str, np.ndarray, np.ndarray, np.ndarray]] = []
    filtered = truncated = long_responses = 0
    digest, text_digest, findings = hashlib.sha256(), hashlib.sha256(), Counter[str]()
    for index in chosen:
        digest.update(row_bytes(rows[index], rows.place(index)))
        targets = reader.targets(index)
        text_digest.update(targets.text.encode() + b"\0")
        findings.update((*findings_of(targets.text), *targets.findings))
        first = targets.trained.index(True)
        prompt, response, trained = targets.ids[:first], targets.ids[first:], targets.trained[first:]
        if not prompt:
            raise DataError(f"{rows.place(index)}: the prompt has no tokens under this tokenizer")
        too_long = len(prompt) > config.max_prompt_tokens, len(response) > max_response_tokens
        if any(too_long) and config.overlong == "error":
            raise DataError(
                f"{rows.place(index)}: the prompt has {len(prompt)} tokens and the response {len(response)}, "
                f"data.max_prompt_tokens={config.max_prompt_tokens} and rollout.max_response_tokens="
                f"{max_response_tokens}; raise the limit, or set data.overlong to filter or truncate_right"
            )
        long_responses += too_long[1]
        if any(too_long) and config.overlong == "filter":
            filtered += too_long[0]
            continue
        truncated += too_long[0]
        limit = config.max_prompt_tokens
        prompt = prompt[-limit:] if config.overlong == "truncate_left" else prompt[:limit]
        arrays = np.asarray(prompt, np.int32), np.asarray(response[:max_response_tokens], np.int32)
        built.append((index, targets.text, *arrays, np.asarray(trained[:max_response_tokens])))
    if not built:
        raise DataError(
            f"data.{which}={name!r}: all {len(chosen)} examples are longer than data.max_prompt_tokens="
            f"{config.max_prompt_tokens} or rollout.max_response_tokens={max_response_tokens}; raise the limits"
        )
    kept, texts, prompts, responses, trained_arrays = zip(*built, strict=True)
    return ExampleDataset(
        name=name,
        rows=rows,
        kept=kept,
        texts=texts,
        token_ids=prompts,
        filtered=filtered,
        truncated=truncated,
        config=config,
        fingerprint={
            "rows": len(chosen),
            "sha256": digest.hexdigest(),
            "text_sha256": text_digest.hexdigest(),
        },
        available=available,
        findings=findings,
        responses=responses,
        trained=trained_arrays,
        long_responses=long_responses,
    )


def _has_responses(rows: Rows, config: Any) -> bool:
    task = all(part.source.startswith(PREFIX) for part in rows.parts)
    return task or bool({config.response_key, MESSAGES} & set(rows.columns))


class _Reader:
    """Reads the targets of rows of any form."""

    def __init__(self, rows: Rows, config: Any, tokenizer: Any, ends: Sequence[int]) -> None:
        self._rows, self._config, self._tokenizer, self._ends = rows, config, tokenizer, ends
        self._logged = are_logged(rows)

    def targets(self, index: int) -> Targets:
        """Return the tokens of a row, and which of them are trained."""
        row, place, config = self._rows[index], self._rows.place(index), self._config
        if self._logged:
            # the prompt is the model's input text already
            templated = row["question"] is not None and config.chat != "never"
            if row.get("outcome") or row.get("tokens") is not None:
                tokens, sampled = self._trajectory(row, place)
                texts = row["prompt"], row["response"]
                return token_targets(*texts, tokens, sampled, self._tokenizer, templated=templated)
            end = self._end_of_turn if templated else self._tokenizer.eos_token_id
            return text_targets(row["prompt"], row["response"], self._tokenizer, end, templated=templated)
        response = self._response(row, index, place)
        if response is None:  # a conversation alone
            key = config.prompt_key if config.prompt_key in row else MESSAGES
            messages = conversation({**row, config.prompt_key: row[key]}, config, place)
            return self._chat(messages, (), read_tools(row, place), place)
        prompt = conversation(row, config, place)
        if isinstance(prompt, str) and not isinstance(response, str):
            prompt = ({"role": "user", "content": prompt},)
        elif isinstance(prompt, str) or (config.chat == "never" and isinstance(response, str)):
            text = render(self._rows, index, config, self._tokenizer).text
            return text_targets(text, response, self._tokenizer, self._tokenizer.eos_token_id, templated=False)
        if isinstance(response, str) and not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
            text = render(self._rows, index, config, self._tokenizer).text  # the response continues this message
            return text_targets(text, response, self._tokenizer, self._end_of_turn, templated=True)
        if isinstance(response, str):
            response = ({"role": "assistant", "content": response},)
        return self._chat(prompt, response, read_tools(row, place), place)

    def _trajectory(self, row: Mapping[str, Any], place: str) -> tuple[list[int], list[list[int]]]:
        """Return the tokens of a logged trajectory, and start and stop of each run that was sampled.

        Raises:
            DataError: they are missing, or those of another tokenizer.
        """
        tokens, sampled = row.get("tokens"), row.get("sampled")
        if row.get("rows"):
            raise DataError(
                f"{place}: the trajectory forked into rows, as the chat template rewrites earlier turns; supervised "
                "training reads responses of one row: leave it out, or make a row of the data of each turn"
            )
        if not tokens or not sampled:
            raise DataError(
                f"{place}: a trajectory, logged without its tokens by an older version of hwgrpo: what was observed "
                "cannot be kept out of the training; log it anew with hwgrpo train"
            )
        if not self._is_text_of(tokens, sampled, row):
            raise DataError(
                f"{place}: the tokens of this trajectory are not those of its text under this tokenizer: train a model "
                "with the tokenizer of the run that logged it"
            )
        return tokens, sampled

    def _is_text_of(self, tokens: list[int], sampled: list[list[int]], row: Mapping[str, Any]) -> bool:
        """Return whether tokens have the text of a logged response, as far as it can be known."""
        text, decode = row["response"], self._tokenizer.decode
        bounds = [0, *(place for run in sampled for place in run), len(tokens)]
        observed = [tokens[start:stop] for start, stop in zip(bounds[::2], bounds[1::2], strict=True) if start < stop]
        if not observed:  # the text may be without a stop string
            decoders = (ResponseDecoder(self._tokenizer, skip, self._ends) for skip in (False, True))
            return any(decoder(tokens).startswith(text) for decoder in decoders)
        if max(map(max, observed)) >= len(self._tokenizer):
            return False
        # without an outcome it is of a workflow of the user's own, which says what the text is
        return not row.get("outcome") or all(decode(run, skip_special_tokens=True) in text for run in observed)

    def _response(self, row: Mapping[str, Any], index: int, place: str) -> Any:
        """Return a row's response, text or messages; None where the row is a conversation alone."""
        key = self._config.response_key
        if row.get(key) is not None:
            return read_response(row, key, place)
        if self._rows.source(index).startswith(PREFIX):
            return row["ground_truth"]
        own = row.get(self._config.prompt_key)
        if (own is None and row.get(MESSAGES) is not None) or (own is not None and not isinstance(own, str)):
            return None
        raise missing_column("data.response_key", key, row, place)

    def _chat(self, prompt: str | Sequence[Any], response: Sequence[Any], tools: Sequence[Any], place: str) -> Targets:
        config = self._config
        if isinstance(prompt, str):
            raise DataError(f"{place}: column {MESSAGES!r} is text; it must be a list of chat messages")
        if config.chat == "never" or self._tokenizer.chat_template is None:
            why = "data.chat=never" if config.chat == "never" else "the tokenizer has no chat template"
            raise ConfigError(
                f"{place}: a conversation is trained under a chat template, and {why}; set data.chat=auto and "
                "model.chat_template, or give prompts and responses as text"
            )
        first = len(prompt) if response else 0
        return chat_targets((*prompt, *response), first, config, self._tokenizer, self._ends, place, tools)

    @cached_property
    def _end_of_turn(self) -> int:
        """The token that ends a response under the chat template."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
        try:
            return chat_targets(messages, 0, self._config, self._tokenizer, self._ends, "the chat template").ids[-1]
        except DataError:  # a template that wants other roles
            return self._tokenizer.eos_token_id


def read_response(row: Mapping[str, Any], key: str, place: str) -> Any:
    """Return a row's response: text, which may be empty, or chat messages.

    Raises:
        DataError: it is neither.
    """
    return row[key] if row[key] == "" else read_prompt(row, key, place)
