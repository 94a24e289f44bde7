"""`online_reward_model`: a reward model that is trained during the run on outcomes of a rule.

The rule verifies a share of the responses. Their outcomes are their rewards, and train the model every few steps; it
scores the other responses. Source: iterative training of the reward model with a replay buffer, as in GRPO
(Shao et al. 2024, section 4.1.4).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from hwgrpo.errors import ConfigError, RewardError, quoted
from hwgrpo.research.outcome_metrics import calibration_error, ranking_accuracy
from hwgrpo.research.outcomes import Outcome, ReplayBuffer, from_tensors, to_tensors, verified
from hwgrpo.research.reward_training import LOSSES, RewardTraining
from hwgrpo.rewards.checked_kwargs import Kwargs
from hwgrpo.rewards.models.padded_batches import batches
from hwgrpo.rewards.models.placement import PlacedModel, check_placement
from hwgrpo.rewards.models.pretrained import Pretrained, longest_input
from hwgrpo.rewards.models.score_head import is_classifier
from hwgrpo.rewards.models.scored_text import TOO_LONG, ScoredText, TooLong
from hwgrpo.rewards.models.sequence_logits import padding_id, sequence_logits
from hwgrpo.rewards.models.trained_reward import TrainedReward
from hwgrpo.rewards.processes.messages import is_listed, number_of
from hwgrpo.rewards.processes.reward_process import open_reward
from hwgrpo.rewards.response_steps import StepFinder
from hwgrpo.values import Completions, Prompt, PromptBatch

DTYPES = ("float32", "bfloat16")
DRIFT_ROWS = 64
"""Most outcomes whose scores before and after a training are compared."""


class OnlineRewardModel(TrainedReward):
    """The rule's outcome for verified responses, the trained model's score for the others.

    Each rank has the whole model. All train it on the outcomes of all ranks, in the same order.

    Args:
        device, steps, key, max_response_tokens, sandbox_level, template_date: passed by the trainer.
        policy_path: folder or hub name of the run's model; passed by the trainer.
        training_seed: the run's seed; passed by the trainer.
        samples_per_prompt: `rollout.n`; passed by the trainer.
        verifier: the rule: a registered reward function, or `path/to/file.py:function`.
        verifier_kwargs: its arguments.
        verifier_timeout, verifier_workers: as `timeout` and `workers` of a reward function.
        path: folder or hub name of the model at the start: a language model, which gets a new head, or a
            sequence-classification model with one label. None: the run's own model.
        verify: share of the responses of a group that the rule verifies. Which ones depends on seed and prompt.
        warmup_steps: first steps in which it verifies all.
        every: steps between two trainings.
        loss: classification: outcomes in [0, 1], the score is the probability; mse: any outcomes, the score is the
            model's output; bradley_terry: pairs of verified responses to a prompt, the score is the model's output, for
            verified responses, too.
        history: old outcomes per new one in a training.
        buffer_size: most old outcomes that are kept.
        epochs: passes over the outcomes of a training.
        batch_size: outcomes, or pairs, per update.
        lr: learning rate of AdamW.
        dtype: of matrix products: float32, or bfloat16 by autocast. Weights and optimizer states are fp32.
        place, tokens_per_batch, max_length, too_long, chat_template, revision, trust_remote_code: as for
            `reward_model`.

    Raises:
        ConfigError: no such model or verifier, or a wrong argument.
    """

    def __init__(
        self,
        device: torch.device,
        steps: StepFinder | None,
        key: str,
        policy_path: str,
        training_seed: int,
        samples_per_prompt: int,
        max_response_tokens: int,
        sandbox_level: str,
        verifier: str,
        verifier_kwargs: Mapping[str, Any] | None = None,
        verifier_timeout: float | None = None,
        verifier_workers: int = 0,
        path: str | None = None,
        verify: float = 0.125,
        warmup_steps: int = 0,
        every: int = 1,
        loss: str = "classification",
        history: float = 0.1,
        buffer_size: int = 4096,
        epochs: int = 1,
        batch_size: int = 32,
        lr: float = 1e-5,
        dtype: str = "float32",
        place: str = "run",
        tokens_per_batch: int = 16384,
        max_length: int | None = None,
        too_long: str = "fail",
        chat_template: bool | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        template_date: str | None = None,
    ) -> None:
        checks = Kwargs(key)
        check_placement(checks, place, False, tokens_per_batch, max_length)
        checks.choice("too_long", too_long, TOO_LONG)
        checks.choice("loss", loss, LOSSES)
        checks.choice("dtype", dtype, DTYPES)
        checks.number("verify", verify, above=0)
        if verify > 1:
            raise checks.error("verify", verify, "is a share: it must be at most 1")
        if loss == "bradley_terry" and int(verify * samples_per_prompt) < 2:
            raise checks.error(
                "verify",
                verify,
                f"of rollout.n={samples_per_prompt} gives no pairs: loss=bradley_terry compares two or "
                f"more verified responses to a prompt, so it must be at least {2 / samples_per_prompt:g}",
            )
        checks.number("history", history, at_least=0)
        checks.number("lr", lr, above=0)
        checks.number("warmup_steps", warmup_steps, at_least=0, whole=True)
        sizes = {"every": every, "buffer_size": buffer_size, "epochs": epochs, "batch_size": batch_size}
        for name, value in sizes.items():
            checks.number(name, value, at_least=1, whole=True)
        checks.text("verifier", verifier)
        context = {
            "max_response_tokens": max_response_tokens,
            "sandbox_level": sandbox_level,
            "template_date": template_date,
        }
        if verifier == "online_reward_model":
            raise checks.error("verifier", verifier, "is this reward itself: name a rule")
        if verifier_timeout is not None:
            checks.number("verifier_timeout", verifier_timeout, above=0)
        checks.number("verifier_workers", verifier_workers, at_least=0, whole=True)
        rule = SimpleNamespace(
            name=verifier, kwargs=verifier_kwargs or {}, timeout=verifier_timeout, workers=verifier_workers
        )
        services = {"device": device, "steps": steps}
        self._verifier = open_reward(rule, context, f"{key}.kwargs.verifier", services=services)
        pretrained = Pretrained(checks, policy_path if path is None else path, revision, trust_remote_code)
        self.source, self.revision = pretrained.source, revision
        """Folder or hub name of the model at the start, and its revision there."""
        config = pretrained.config()
        if is_classifier(config) and config.num_labels != 1:
            raise checks.error(
                "path", path, f"has {config.num_labels} labels: use a model with one, or a language model"
            )
        tokenizer = pretrained.tokenizer()
        self._tokenizer = tokenizer
        limit = max_length or longest_input(config, tokenizer)
        self._text = ScoredText(tokenizer, chat_template, limit, too_long, template_date=template_date)
        model = pretrained.model("AutoModelForSequenceClassification", "float32", head_seed=training_seed)
        self._placed = PlacedModel(model.requires_grad_(True), device, place, offload=False)
        self._pad, self._tokens, self._casts = padding_id(model), tokens_per_batch, dtype == "bfloat16"
        self._training = RewardTraining(model, self._logits, loss, lr, batch_size, epochs, tokens_per_batch)
        self._steps, self._checks, self._loss, self._seed = steps, checks, loss, training_seed
        self._share, self._warmup, self._every, self._history = verify, warmup_steps, every, history
        self._buffer = ReplayBuffer(buffer_size)
        self._own: list[Outcome] = []
        """This rank's outcomes of the step."""
        self._new: list[Outcome] = []
        """All ranks' outcomes since the last training."""
        self._counts = {"verifier_calls": 0, "validation_verifier_calls": 0}
        self._metrics: dict[str, float] = {}
        self._watched: list[Outcome] = []
        self._before: list[float] = []

    def __call__(self, batch: PromptBatch, completions: Completions, step: int | None = None) -> list[Any]:
        """Return the reward of each response, or the rewards of its steps, [S]; an exception stands for none.

        Args:
            batch: G prompts.
            completions: S responses.
            step: the training step; None outside of training, where the rule verifies all responses.
        """
        if step is None:
            self._counts["validation_verifier_calls"] += len(completions)
            return list(self._verified(batch, completions, range(len(completions)), step))
        texts: list[Sequence[tuple[int, list[int]]] | TooLong] = [
            self._rows(batch.prompts[index], text)
            for index, text in zip(completions.prompt_index.tolist(), completions.texts, strict=True)
        ]
        scores = self._scores([tokens for rows in texts if not isinstance(rows, TooLong) for _, tokens in rows])
        found = iter(scores)
        rewards: list[Any] = []
        by_text: list[list[float]] = []
        for rows in texts:
            by_text.append([] if isinstance(rows, TooLong) else [next(found) for _ in rows])
            values = self._values(by_text[-1])
            rewards.append(rows if isinstance(rows, TooLong) else values if self._steps is not None else values[0])
        chosen, places = self._choose(batch, completions, step)
        self._counts["verifier_calls"] += len(chosen)
        for sample, result in zip(chosen, self._verified(batch, completions, chosen, step), strict=True):
            targets = self._targets(result)
            rows = texts[sample]
            fits = targets is not None and (isinstance(rows, TooLong) or len(targets) == len(rows))
            if self._loss != "bradley_terry" or not fits:
                rewards[sample] = result
            if targets is None or not fits or isinstance(rows, TooLong):
                continue
            uid = batch.prompts[int(completions.prompt_index[sample])].uid
            for (end, tokens), target, score in zip(rows, targets, by_text[sample], strict=True):
                self._own.append(Outcome(uid, places[sample], end, tuple(tokens), target, score))
        return rewards

    def collect(self) -> list[Outcome]:
        """Return this rank's outcomes since the last call."""
        own, self._own = self._own, []
        return own

    def add(self, ranks: Sequence[Sequence[Outcome]]) -> None:
        """Add what `collect` returned on all ranks, in an order that does not depend on their number."""
        self._new += sorted(row for rows in ranks for row in rows)

    def is_due(self, step: int) -> bool:
        """Return whether the model is trained after a step."""
        return bool(self._new) and step % self._every == 0

    def train(self, step: int) -> None:
        """Train the model after a step in which it is due. Ranks then need equal weights: `network` of rank 0.

        Raises:
            RunError: a loss or a gradient is not finite.
        """
        new, self._new = self._new, []
        self._watched = (self._buffer.rows or new)[-DRIFT_ROWS:]
        self._before = self._scores([row.tokens for row in self._watched])
        self._metrics = self._agreement(new)
        seed = f"{self._seed} {step}"
        loss = self._training.train(self._buffer.mixed(new, self._history, seed), seed)
        self._metrics |= {"buffer": float(len(self._buffer.rows))} | ({} if loss is None else {"loss": loss})

    def measure_drift(self) -> None:
        """Compare scores with those before `train`."""
        after = self._scores([row.tokens for row in self._watched])
        moved = zip(self._values(self._before), self._values(after), strict=True)
        self._metrics["drift"] = sum(abs(later - earlier) for earlier, later in moved) / len(self._watched)

    @property
    def network(self) -> torch.nn.Module:
        """The model, of transformers."""
        return self._placed.model

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the training since the last call, equal on all ranks; empty if there was none."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def counts(self) -> dict[str, float]:
        """Return the number of responses that the rule verified on this rank since the last call."""
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return {name: float(count) for name, count in counts.items()}

    def missing_columns(self, columns: Collection[str]) -> list[str]:
        """Return the data columns that the rule needs and `columns` lacks."""
        return self._verifier.missing_columns(columns)

    def state(self) -> dict[str, torch.Tensor]:
        """Return model, optimizer, outcomes and replay buffer, equal on all ranks, as copies on the CPU."""
        return self._training.state() | to_tensors(self._buffer.rows, "buffer") | to_tensors(self._new, "new")

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether a state is of a model of these parameters and shapes."""
        own = {f"model.{name}": parameter.shape for name, parameter in self._placed.model.named_parameters()}
        return own == {name: value.shape for name, value in tensors.items() if name.startswith("model.")}

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restore what `state` returned."""
        self._training.restore(tensors)
        self._buffer.rows, self._new = from_tensors(tensors, "buffer"), from_tensors(tensors, "new")

    def save_pretrained(self, folder: Path) -> None:
        """Write the fp32 model and its tokenizer in Hugging Face format, for `reward_model`."""
        self._placed.model.config.get_text_config().pad_token_id = self._pad
        self._placed.model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)

    def close(self) -> None:
        """Free the model."""
        self._verifier.close()
        self._placed.close()

    def _rows(self, prompt: Prompt, text: str) -> list[tuple[int, list[int]]] | TooLong:
        """Return (end, tokens) of a response up to the end of each of its steps; of all of it without steps."""
        ends = [len(text)] if self._steps is None else self._steps.ends(text)
        try:
            return [(end, self._text.tokens(prompt, text[:end])) for end in ends]
        except TooLong as error:
            return error

    def _choose(self, batch: PromptBatch, completions: Completions, step: int) -> tuple[list[int], list[int]]:
        """Return the verified responses, and the place of each response in its group."""
        chosen: list[int] = []
        places: list[int] = []
        share = 1.0 if step <= self._warmup else self._share
        groups = torch.bincount(completions.prompt_index, minlength=len(batch)).tolist()
        for prompt, size in zip(batch.prompts, groups, strict=True):
            chosen += [len(places) + place for place in verified(prompt.uid, size, share, self._seed)]
            places += range(size)
        return chosen, places

    def _verified(
        self, batch: PromptBatch, completions: Completions, samples: Sequence[int], step: int | None
    ) -> Sequence[Any]:
        """Return what the rule returns for some responses: numbers, lists, dicts, None or exceptions."""
        if not samples:
            return []
        try:
            seed = ("verifier", self._seed, step, batch.prompts[0].uid)
            results, _ = self._verifier.values(batch, _selected(completions, samples), step, seed=seed)
        except (ConfigError, RewardError):
            raise
        except Exception as error:  # a call for all of them
            return [error] * len(samples)
        if not is_listed(results) or len(results) != len(samples):
            raise RewardError(
                f"the verifier {self._verifier.name} must return a list with one outcome per response; it returned "
                f"{quoted(results)} for {len(samples)}"
            )
        return results

    def _targets(self, result: Any) -> list[float] | None:
        """Return the outcomes in a result of the rule, one per step; None for a failure, which is the reward then."""
        score: Any = result.get("score") if isinstance(result, Mapping) else result
        listed = list(score) if self._steps is not None and is_listed(score) else [score]
        numbers = [number for each in listed if (number := number_of(each)) is not None and math.isfinite(number)]
        if len(numbers) < len(listed):
            return None
        if self._loss == "classification" and not all(0 <= number <= 1 for number in numbers):
            raise self._checks.error(
                "loss", self._loss, f"needs outcomes from 0 to 1, and {self._verifier.name} returned {score}: use mse"
            )
        return numbers

    def _logits(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        device = self._placed.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self._casts):
            return sequence_logits(self._placed.model, rows, self._pad, device)[:, 0]

    def _scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the model's output for rows of tokens, without gradients."""
        scores = [0.0] * len(rows)
        with torch.no_grad():
            for chosen in batches([len(row) for row in rows], self._tokens):
                for row, value in zip(chosen, self._logits([rows[each] for each in chosen]).tolist(), strict=True):
                    scores[row] = value
        return scores

    def _values(self, scores: Sequence[float]) -> list[float]:
        """Return the rewards of outputs of the model."""
        if self._loss != "classification":
            return list(scores)
        return torch.tensor(list(scores), dtype=torch.float64).sigmoid().tolist()

    def _agreement(self, rows: Sequence[Outcome]) -> dict[str, float]:
        """Return how well the scores that the responses got agree with the rule."""
        scores, targets = [row.score for row in rows], [row.target for row in rows]
        accuracy = ranking_accuracy(scores, targets)
        metrics = {} if accuracy is None else {"ranking_accuracy": accuracy}
        if self._loss == "classification":
            metrics["calibration_error"] = calibration_error(self._values(scores), targets)
        return metrics


def _selected(completions: Completions, samples: Sequence[int]) -> Completions:
    """Return some of the responses, ascending, without log-probs of other policies."""
    wanted = torch.zeros(len(completions), dtype=torch.bool)
    wanted[list(samples)] = True
    return replace(completions.select(wanted), versions=None, floors=None)
