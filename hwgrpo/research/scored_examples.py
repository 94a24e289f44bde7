"""Rows -> examples of a reward model: responses with a score, or pairs of a chosen and a rejected one.

Prompt and response are tokenized as `rewards/models/scored_text.py` does when the trained model scores.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hwgrpo.config import Config
from hwgrpo.data.chat_template import apply_template, conversation, few_shot_messages, render
from hwgrpo.data.examples import read_response
from hwgrpo.data.prompt_findings import findings_of
from hwgrpo.data.prompts import PromptDataset, row_bytes
from hwgrpo.data.row_filter import are_logged, kept_rows
from hwgrpo.data.row_schema import Message, message_text, missing_column
from hwgrpo.data.sources import Rows, open_all, sources_of
from hwgrpo.errors import ConfigError, DataError, quoted
from hwgrpo.rewards.models.pretrained import longest_input
from hwgrpo.rewards.models.scored_text import ScoredText, TooLong
from hwgrpo.values import Prompt

PAIRS = "bradley_terry"
"""The loss of pairs."""
CUT = {"truncate_left": "left", "truncate_right": "right"}
"""`data.overlong` -> what `ScoredText` does with a long text; else it fails."""


@dataclass(frozen=True)
class ScoredExample(Prompt):
    """One or two tokenized texts, with what their scores are trained for."""

    rows: tuple[tuple[int, ...], ...] = ()
    """Tokens of prompt and response; of a pair those of the chosen, then of the rejected response."""
    target: float = 0.0
    """The response's score or label; of a pair the margin."""

    @property
    def length(self) -> int:
        """Tokens of all rows."""
        return sum(map(len, self.rows))


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoredDataset(PromptDataset):
    """Tokenized responses with scores, or pairs of responses."""

    tokens: Sequence[tuple[tuple[int, ...], ...]]
    """[len(self)] rows of each example."""
    targets: Sequence[float]
    """[len(self)] see `ScoredExample`."""

    def prompt(self, row: int, epoch: int) -> ScoredExample:
        """Return one example; see `PromptDataset.prompt`."""
        index = self.kept[row]
        return ScoredExample(
            uid=f"{epoch}:{row}",
            text=self.texts[row],
            token_ids=tuple(self.token_ids[row].tolist()),
            ground_truth=None,
            columns=self.rows[index],
            source=self.rows.source(index),
            place=self.rows.place(index),
            rows=self.tokens[row],
            target=self.targets[row],
        )


def longest_text(config: Config, model_config: Any, tokenizer: Any) -> int:
    """Return the most tokens of prompt and response: the settings' limits together, and what the model reads."""
    limit = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return min(limit, longest_input(model_config, tokenizer) or limit)


def build_scored(config: Config, tokenizer: Any, max_tokens: int, which: str) -> ScoredDataset | None:
    """Read and tokenize the training or validation examples.

    Args:
        config: checked settings.
        tokenizer: the model's.
        max_tokens: most tokens of prompt and response; `data.overlong` says what becomes of longer texts.
        which: "train" or "validation".

    Returns:
        The examples; None for "validation" where none are configured, or those have no scores or pairs.

    Raises:
        ConfigError: settings contradict the data.
        DataError: data is missing or malformed; the message names file and row.
    """
    data = config.data
    spec, split, max_rows, keep = data.train, data.split, data.max_rows, data.keep
    if which == "validation":
        spec, split, max_rows, keep = data.validation, data.validation_split, data.validation_max_rows, None
        if not spec:
            return None
    rows, name = open_all(spec, split, which), ", ".join(sources_of(spec))
    reader = _Reader(rows, config, tokenizer, max_tokens)
    if which == "validation" and not reader.columns <= set(rows.columns):
        return None
    chosen = range(len(rows)) if keep is None else kept_rows(rows, keep, data.response_key)
    if are_logged(rows):  # a response that a reward failed for, or of a dropped group
        chosen = [each for each in chosen if rows[each]["response"] is not None and reader.score(each) is not None]
    available = len(chosen)
    chosen = chosen[:max_rows] if max_rows else chosen
    built: list[tuple[int, tuple[tuple[int, ...], ...], float]] = []
    digest, text_digest, too_long, most = hashlib.sha256(), hashlib.sha256(), 0, 0
    for index in chosen:
        digest.update(row_bytes(rows[index], rows.place(index)))
        try:
            texts = reader.texts(index)
        except TooLong as error:
            if data.overlong == "error":
                raise DataError(
                    f"{rows.place(index)}: {error}, the sum of data.max_prompt_tokens={data.max_prompt_tokens} and "
                    f"rollout.max_response_tokens={config.rollout.max_response_tokens}, or what the model reads; raise "
                    "the limits, or set data.overlong to filter, truncate_left or truncate_right"
                ) from error
            too_long += 1
            continue
        text_digest.update(repr(texts).encode())
        built.append((index, texts, reader.target(index)))
        most = max(most, *map(len, texts))
    if not built:
        why = f"all {too_long} examples have more than {max_tokens} tokens; raise data.max_prompt_tokens or "
        why += "rollout.max_response_tokens, or use a model that reads more"
        raise DataError(f"data.{which}={name!r}: {why if too_long else 'no row has a response with a score'}")
    kept, tokens, targets = zip(*built, strict=True)
    return ScoredDataset(
        name=name,
        rows=rows,
        kept=kept,
        texts=[""] * len(kept),
        token_ids=[np.asarray(each[0], np.int32) for each in tokens],
        filtered=too_long,
        truncated=reader.cut,
        config=data,
        fingerprint={
            "rows": len(chosen),
            "sha256": digest.hexdigest(),
            "text_sha256": text_digest.hexdigest(),
        },
        available=available,
        findings=reader.findings,
        tokens=tokens,
        targets=targets,
    )


class _Reader:
    """Reads the texts and the target of a row."""

    def __init__(self, rows: Rows, config: Config, tokenizer: Any, max_tokens: int) -> None:
        self._rows, self._data, self._settings = rows, config.data, config.reward_model
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self._text = ScoredText(tokenizer, None, None, template_date=config.data.template_date)
        self._pairs = self._settings.loss == PAIRS
        self._logged = are_logged(rows)
        self.cut = 0
        """Number of rows that were cut."""
        self.findings: Counter[str] = Counter()
        """Kind of `prompt_findings` -> rows."""
        if self._pairs and self._logged:
            raise ConfigError(
                f"reward_model.loss={PAIRS} needs pairs of a chosen and a rejected response, and {rows.parts[0].name} "
                "has single responses with a reward: set reward_model.loss=classification, or mse"
            )

    @property
    def columns(self) -> set[str]:
        """Columns that every row must have."""
        settings = self._settings
        if self._pairs:
            return {settings.chosen_key, settings.rejected_key, *filter(None, [settings.margin_key])}
        return {self._data.response_key, settings.score_key}

    def texts(self, index: int) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of a row's texts: one, or those of a pair.

        Raises:
            TooLong: one is too long, and `data.overlong` does not cut it.
        """
        settings = self._settings
        keys = [("reward_model.chosen_key", settings.chosen_key), ("reward_model.rejected_key", settings.rejected_key)]
        if not self._pairs:
            keys = [("data.response_key", self._data.response_key)]
        prompts = [self._logged_prompt(index)] if self._logged else [self._prompt(index, *key) for key in keys]
        self.findings.update(findings_of(prompts[0][0].messages or prompts[0][0].text))
        ids = [self._text.tokens(*each) for each in prompts]
        if self._pairs and ids[0] == ids[1]:
            raise DataError(f"{self._rows.place(index)}: the chosen and the rejected response have the same tokens")
        longest = max(map(len, ids))
        if longest > self._max_tokens:
            side = CUT.get(self._data.overlong)
            if side is None:
                raise TooLong(f"prompt and response have {longest} tokens, above {self._max_tokens}")
            self.cut += 1
            ids = [each[-self._max_tokens :] if side == "left" else each[: self._max_tokens] for each in ids]
            if self._pairs and ids[0] == ids[1]:
                self.cut -= 1
                raise TooLong(f"cut to {self._max_tokens} tokens the two responses are equal")
        return tuple(map(tuple, ids))

    def target(self, index: int) -> float:
        """Return a row's score, or the margin of a pair."""
        settings, place = self._settings, self._rows.place(index)
        if self._pairs:
            if settings.margin_key is None:
                return 0.0
            return self._number(index, "reward_model.margin_key", settings.margin_key)
        value = self._number(index, "reward_model.score_key", settings.score_key)
        if settings.loss == "classification" and not 0 <= value <= 1:
            raise DataError(
                f"{place}: {settings.score_key}={value:g} is no label from 0 to 1, which reward_model.loss="
                "classification needs; set reward_model.loss=mse, or reward_model.score_key to another column"
            )
        return value

    def score(self, index: int) -> Any:
        """Return what the column of scores has."""
        return self._rows[index].get(self._settings.score_key)

    def _number(self, index: int, setting: str, key: str) -> float:
        row, place = self._rows[index], self._rows.place(index)
        if key not in row:
            error = missing_column(setting, key, row, place)
            pairs = not self._pairs and {self._settings.chosen_key, self._settings.rejected_key} <= set(row)
            raise DataError(f"{error} For pairs set reward_model.loss={PAIRS}.") if pairs else error
        value = row[key]
        if isinstance(value, str):  # all that a .csv file has
            try:
                value = float(value)
            except ValueError:
                value = math.nan
        if not isinstance(value, bool | int | float) or not math.isfinite(value):
            raise DataError(
                f"{place}: column {key!r} is {quoted(row[key])}, no finite number; correct or leave out the row, or "
                f"name another column with {setting}"
            )
        return float(value)

    def _prompt(self, index: int, setting: str, key: str) -> tuple[Prompt, str]:
        """Return a row's prompt and one of its responses, as a reward model gets them."""
        row, place, data = self._rows[index], self._rows.place(index), self._data
        if row.get(key) is None:
            self._number(index, "reward_model.score_key", self._settings.score_key) if not self._pairs else None
            raise missing_column(setting, key, {name: each for name, each in row.items() if each is not None}, place)
        response = read_response(row, key, place)
        if data.prompt_key not in row and not isinstance(response, str):
            prompt: str | tuple[Message, ...] = ()  # the column has the whole conversation
        else:
            prompt = conversation(row, data, place)
        if isinstance(response, str):
            messages, text = prompt, response
        else:
            before = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
            messages, text = (*before, *response[:-1]), message_text(response[-1])
            if response[-1]["role"] != "assistant" or not messages:
                raise DataError(f"{place}: column {key!r} must end with a message of the assistant, after a prompt")
        if isinstance(messages, str):
            return _prompt_of(messages, None), text
        if self._tokenizer.chat_template:
            return _prompt_of("", messages), text
        if not isinstance(response, str) and (len(response) > 1 or not prompt):
            raise ConfigError(
                f"{place}: column {key!r} is a conversation, and the tokenizer has no chat template; set "
                "model.chat_template to a file with one"
            )
        return _prompt_of(render(self._rows, index, data, self._tokenizer).text, None), text

    def _logged_prompt(self, index: int) -> tuple[Prompt, str]:
        """Return prompt and response of a row that a run has logged, whose prompt is the model's input text."""
        row, data = self._rows[index], self._data
        question = row["question"]
        if question is None or not self._tokenizer.chat_template:
            return _prompt_of(row["prompt"], None), row["response"]
        user: tuple[Message, ...] = (*few_shot_messages(data), {"role": "user", "content": question})
        system = ({"role": "system", "content": data.system_prompt or ""},)
        place = self._rows.place(index)
        for messages in (user, (*system, *user)):
            text = apply_template(messages, data, self._tokenizer, place, add_generation_prompt=True)
            if text == row["prompt"]:
                return _prompt_of("", messages), row["response"]
        raise DataError(
            f"{place}: the log has only the last message of this prompt's conversation, which a reward model reads in "
            "full; give rows with the chat messages in the column data.prompt_key instead of --from-run"
        )


def _prompt_of(text: str, messages: Sequence[Message] | None) -> Prompt:
    given: Any = None if messages is None else tuple(messages)
    return Prompt(uid="", text=text, token_ids=(), ground_truth=None, columns={}, messages=given)
