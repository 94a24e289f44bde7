"""`process_reward_model`: a score for each step of a response, read at a separator token after the step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hwgrpo.errors import ConfigError, quoted
from hwgrpo.rewards.checked_kwargs import Kwargs
from hwgrpo.rewards.models.padded_batches import batches, padded
from hwgrpo.rewards.models.placement import PlacedModel, check_placement
from hwgrpo.rewards.models.pretrained import PROCESS_KINDS, Pretrained, longest_input
from hwgrpo.rewards.models.scored_text import ScoredText, TooLong
from hwgrpo.rewards.response_steps import StepFinder, separated
from hwgrpo.values import Completions, Prompt, PromptBatch

REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "product": math.prod,
    "mean": lambda scores: math.fsum(scores) / len(scores),
    "last": lambda scores: scores[-1],
}


class SeparatorMismatch(ValueError):
    """A text has another number of separator tokens than the response has steps."""


class ProcessRewardModel:
    """The probability that a step is right, or a logit, for each step.

    Args:
        device: the run's device; passed by the trainer.
        steps: finds the steps as `algorithm.process` says; None: the estimator reads no rewards of steps. Passed by the
            trainer.
        key: the setting, for messages; passed by the trainer.
        template_date: the run's date for chat templates with a clock; passed by the trainer.
        path: folder or hub name.
        kind: token_classification; label_tokens: a language model, whose logits of two tokens are compared; custom:
            `AutoModel` with code of its own, whose first output are logits [B, T, labels].
        separator: the token after each step at which the score is read.
        step_format: how a step is written, with {step} and the separator; white space around a step is dropped.
        right: index of the label of a right step, of one or two labels; or, of label_tokens, its token.
        wrong: the token of a wrong step, of label_tokens.
        delimiter: what steps end with, where `algorithm.process` does not say.
        reduce: min, product, mean or last: one number per response; None: a list with a number for each step.
        dtype, place, offload, tokens_per_batch, max_length, chat_template, revision, trust_remote_code: as for
            `reward_model`. A longer text is a failure: its steps would lose their separators.

    Raises:
        ConfigError: no such model, a separator of several tokens, no steps for a list, or a wrong argument.
    """

    def __init__(
        self,
        device: torch.device,
        steps: StepFinder | None,
        key: str,
        path: str,
        kind: str = "token_classification",
        separator: str = "<extra_0>",
        step_format: str = "{step}<extra_0>",
        right: int | str = 1,
        wrong: str | None = None,
        delimiter: str | None = None,
        reduce: str | None = None,
        dtype: str = "auto",
        place: str = "run",
        offload: bool = False,
        tokens_per_batch: int = 16384,
        max_length: int | None = None,
        chat_template: bool | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        template_date: str | None = None,
    ) -> None:
        checks = Kwargs(key)
        check_placement(checks, place, offload, tokens_per_batch, max_length)
        checks.choice("kind", kind, PROCESS_KINDS)
        if reduce is not None:
            checks.choice("reduce", reduce, REDUCTIONS)
        if step_format.count("{step}") != 1 or separator not in step_format:
            raise checks.error("step_format", step_format, f"must have {{step}} once, and the separator {separator!r}")
        self._ends = _step_ends(checks, steps, delimiter, reduce)
        self._reduce = None if reduce is None else REDUCTIONS[reduce]
        self._format = step_format
        pretrained = Pretrained(checks, path, revision, trust_remote_code)
        config, tokenizer = pretrained.config(), pretrained.tokenizer()
        limit = max_length or longest_input(config, tokenizer)
        self._text = ScoredText(tokenizer, chat_template, limit, template_date=template_date)
        self._separator = _one_token(checks, tokenizer, "separator", separator)
        if kind == "label_tokens":
            pair = [_one_token(checks, tokenizer, name, text) for name, text in (("wrong", wrong), ("right", right))]
            self._labels, self._keeps_logits = pair, True
        else:
            self._labels, self._keeps_logits = _labels(checks, config, kind, right, wrong), False
        self._pad = tokenizer.pad_token_id or 0
        self._placed = PlacedModel(pretrained.model(PROCESS_KINDS[kind], dtype), device, place, offload)
        self._tokens = tokens_per_batch

    def __call__(self, batch: PromptBatch, completions: Completions) -> list[Any]:
        """Return the scores of each response, [S] lists or numbers; an exception stands for what has no score."""
        results: list[Any] = [None] * len(completions)
        rows: dict[int, tuple[list[int], list[int]]] = {}
        for sample, (index, text) in enumerate(zip(completions.prompt_index.tolist(), completions.texts, strict=True)):
            try:
                rows[sample] = self._row(batch.prompts[index], text)
            except (TooLong, SeparatorMismatch) as error:
                results[sample] = error
        samples = list(rows)
        with self._placed.loaded() as model:
            for chosen in batches([len(rows[sample][0]) for sample in samples], self._tokens):
                members = [samples[each] for each in chosen]
                for sample, scores in zip(members, self._scores(model, [rows[each] for each in members]), strict=True):
                    results[sample] = scores if self._reduce is None else self._reduce(scores)
        return results

    def close(self) -> None:
        """Free the model."""
        self._placed.close()

    def _row(self, prompt: Prompt, text: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a response with separators, and the positions of these."""
        ends = self._ends(text)
        steps = [text[first:end].strip() for first, end in zip([0, *ends[:-1]], ends, strict=True)]
        written = "".join(self._format.replace("{step}", step) for step in steps)
        tokens = self._text.tokens(prompt, written)
        positions = [position for position, token in enumerate(tokens) if token == self._separator]
        if len(positions) != len(steps):
            raise SeparatorMismatch(
                f"a response of {len(steps)} steps has {len(positions)} separator tokens: the prompt or the response "
                "has the separator in its own text, or the tokenizer merges it with its neighbours"
            )
        return tokens, positions

    def _scores(self, model: Any, rows: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        """Return the scores at the separators of each row of a batch."""
        ids, mask = padded([tokens for tokens, _ in rows], self._pad)
        arguments = {"input_ids": ids.to(self._placed.device), "attention_mask": mask.to(self._placed.device)}
        kept = sorted({position for _, positions in rows for position in positions})
        if self._keeps_logits:  # a vocabulary's logits of all tokens would be large
            arguments["logits_to_keep"] = torch.tensor(kept, device=self._placed.device)
        logits = model(**arguments)[0]
        if not self._keeps_logits:
            if logits.ndim != 3 or logits.shape[-1] != len(self._labels):
                raise ConfigError(
                    f"process_reward_model: the first output of {type(model).__name__} has shape {list(logits.shape)}; "
                    f"kind=custom needs logits of {len(self._labels)} labels [B, T, {len(self._labels)}]"
                )
            logits = logits[:, torch.tensor(kept, device=logits.device)]
        chosen = logits[:, :, self._labels].float().cpu()
        values = chosen[..., 0] if len(self._labels) == 1 else chosen.softmax(-1)[..., 1]
        place = {position: number for number, position in enumerate(kept)}
        return [
            [float(row[place[position]]) for position in positions]
            for row, (_, positions) in zip(values, rows, strict=True)
        ]


def _step_ends(
    checks: Kwargs, steps: StepFinder | None, delimiter: str | None, reduce: str | None
) -> Callable[[str], list[int]]:
    if steps is not None:
        if delimiter is not None:
            raise checks.error("delimiter", delimiter, "has no effect: algorithm.process finds the steps; remove it")
        return steps.ends
    if reduce is None:
        raise checks.error(
            "reduce",
            None,
            "returns a list with a number for each step, which only algorithm.advantage.name=process reads; set that, "
            f"or reduce to one of {', '.join(REDUCTIONS)}",
        )
    pattern = re.compile(re.escape("\n\n" if delimiter is None else delimiter))
    return lambda text: separated(text, pattern)


def _one_token(checks: Kwargs, tokenizer: Any, name: str, text: Any) -> int:
    """Return the id of a text that is one token, by itself or after a space."""
    checks.text(name, text)
    for written in (text, f" {text}"):
        ids = tokenizer(written, add_special_tokens=False)["input_ids"]
        if len(ids) == 1 and ids[0] != tokenizer.unk_token_id:
            return ids[0]
    if len(ids) == 2 and tokenizer.convert_ids_to_tokens(ids[1]) == text:  # SentencePiece: a token of the space itself
        return ids[1]
    raise checks.error(
        name, text, f"is not one token of the model's but {quoted(tokenizer.convert_ids_to_tokens(ids))}"
    )


def _labels(checks: Kwargs, config: Any, kind: str, right: int | str, wrong: str | None) -> list[int]:
    """Return the logits that are compared: [wrong, right], or [right] if the model has no other."""
    if wrong is not None:
        raise checks.error("wrong", wrong, f"has no effect with kind={kind}: remove it")
    checks.number("right", right, at_least=0, whole=True)
    right = int(right)
    count = 2 if kind == "custom" else config.num_labels
    if count > 2:
        raise checks.error("kind", kind, f"needs a model of one or two labels, and this one has {count}")
    if count == 1:
        return [0]
    if right > 1:
        raise checks.error("right", right, "must be 0 or 1, the index of one of two labels")
    return [1 - right, right]
