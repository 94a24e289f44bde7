"""`reward_model`: the score of each response by a sequence-classification model in the trainer's process."""

from __future__ import annotations

from typing import Any

import torch

from hwgrpo.rewards.checked_kwargs import Kwargs
from hwgrpo.rewards.models.padded_batches import batches
from hwgrpo.rewards.models.placement import PlacedModel, check_placement
from hwgrpo.rewards.models.pretrained import Pretrained, longest_input
from hwgrpo.rewards.models.scored_text import TOO_LONG, ScoredText, TooLong
from hwgrpo.rewards.models.sequence_logits import padding_id, sequence_logits
from hwgrpo.values import Completions, PromptBatch


class RewardModel:
    """A logit of a sequence-classification model, fp32, as the reward.

    Args:
        device: the run's device; passed by the trainer.
        key: the setting, for messages; passed by the trainer.
        template_date: the run's date for chat templates with a clock; passed by the trainer.
        path: folder or hub name of a model for `AutoModelForSequenceClassification`.
        label: number or name of the label whose logit is the reward; not needed by a model with one label.
        dtype: of the weights: auto (as stored), float32, bfloat16 or float16.
        place: "run": on the run's device; "cpu".
        offload: keep the weights on the CPU between batches.
        tokens_per_batch: most tokens of a forward pass, padding included.
        max_length: most tokens of prompt and response; None: as many as the model's configuration or tokenizer says.
        too_long: "fail": a longer one is a failure under `on_error`; "left" or "right": its first or last tokens are
            cut off.
        chat_template: whether the tokenizer's chat template is applied to prompt and response; None: if it has one.
        chat_template_kwargs: options of the chat template.
        special_tokens: whether the tokenizer adds its own to text without a chat template.
        revision: commit, branch or tag on the hub.
        trust_remote_code: run code that comes with the model.

    Raises:
        ConfigError: no such model, one of several labels without `label`, or a wrong argument.
    """

    def __init__(
        self,
        device: torch.device,
        key: str,
        path: str,
        label: int | str | None = None,
        dtype: str = "auto",
        place: str = "run",
        offload: bool = False,
        tokens_per_batch: int = 16384,
        max_length: int | None = None,
        too_long: str = "fail",
        chat_template: bool | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        special_tokens: bool = True,
        revision: str | None = None,
        trust_remote_code: bool = False,
        template_date: str | None = None,
    ) -> None:
        checks = Kwargs(key)
        check_placement(checks, place, offload, tokens_per_batch, max_length)
        checks.choice("too_long", too_long, TOO_LONG)
        pretrained = Pretrained(checks, path, revision, trust_remote_code)
        config = pretrained.config()
        self._label = _label_number(checks, config, path, label)
        tokenizer = pretrained.tokenizer()
        if chat_template and not tokenizer.chat_template:
            raise checks.error("chat_template", True, "needs a tokenizer with a chat template: remove it")
        checks.boolean("special_tokens", special_tokens)
        self._text = ScoredText(
            tokenizer,
            chat_template,
            max_length or longest_input(config, tokenizer),
            too_long,
            options=chat_template_kwargs,
            special_tokens=special_tokens,
            template_date=template_date,
        )
        model = pretrained.model("AutoModelForSequenceClassification", dtype)
        self._pad = padding_id(model)
        self._placed = PlacedModel(model, device, place, offload)
        self._tokens = tokens_per_batch

    def __call__(self, batch: PromptBatch, completions: Completions) -> list[float | Exception]:
        """Return the score of each response, [S]; an exception stands for one that is too long."""
        scores: list[float | Exception] = [TooLong()] * len(completions)
        rows: dict[int, list[int]] = {}
        for sample, (index, text) in enumerate(zip(completions.prompt_index.tolist(), completions.texts, strict=True)):
            try:
                rows[sample] = self._text.tokens(batch.prompts[index], text)
            except TooLong as error:
                scores[sample] = error
        samples = list(rows)
        with self._placed.loaded() as model:
            for chosen in batches([len(rows[sample]) for sample in samples], self._tokens):
                members = [samples[each] for each in chosen]
                logits = sequence_logits(model, [rows[each] for each in members], self._pad, self._placed.device)
                for sample, value in zip(members, logits[:, self._label].tolist(), strict=True):
                    scores[sample] = value
        return scores

    def close(self) -> None:
        """Free the model."""
        self._placed.close()


def _label_number(checks: Kwargs, config: Any, path: str, label: int | str | None) -> int:
    """Return the index of the logit that is the reward."""
    names = {int(number): str(name) for number, name in config.id2label.items()}
    if label is None:
        if config.num_labels != 1:
            raise checks.error(
                "path",
                path,
                f"has {config.num_labels} labels, not one: name the one whose logit is the reward with label, one of "
                f"{', '.join(f'{number} ({name})' for number, name in sorted(names.items()))}",
            )
        return 0
    numbers = [number for number, name in names.items() if label in (number, name) and not isinstance(label, bool)]
    if not numbers:
        checks.choice("label", label, [*map(str, names), *names.values()])
        return int(label)
    return numbers[0]
