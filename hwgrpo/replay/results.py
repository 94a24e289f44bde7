"""What the model's passes compute of a captured step: log-probs, loss and gradients, from the captured values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import torch

from hwgrpo.algorithms.token_advantages import takes
from hwgrpo.config.derived import has_exact_kl
from hwgrpo.errors import ConfigError
from hwgrpo.observe.timing import Stopwatch
from hwgrpo.replay.replayed_model import ReplayedModel, restore_update
from hwgrpo.training.checkpoint import rng_state
from hwgrpo.training.stages.capture import RNG
from hwgrpo.training.strategies.optimizer import learning_rate
from hwgrpo.training.update.advantage_inputs import advantage_inputs
from hwgrpo.values import TrainBatch

PROBABILITIES, SQUARE_SUMS = "log-probs before advantages", "sums of squared probabilities"
KL, OLD, REFERENCE = "KL in the reward", "old log-probs", "reference log-probs"
LOGPROBS, LOSS, NORM = "log-probs", "loss", "norm of the gradient"


def gradient_of(parameter: str) -> str:
    """Return the name of a parameter's gradient in a comparison."""
    return f"gradient of {parameter}"


def norm_of(parameter: str) -> str:
    """Return the name of the norm of a parameter's gradient in a comparison."""
    return f"norm of the gradient of {parameter}"


class Passes:
    """The passes of a captured step. Each starts from captured values, so that a stage is judged by itself.

    Args:
        model: with the weights before the step.
    """

    def __init__(self, model: ReplayedModel) -> None:
        self.model = model
        captured, config = model.captured, model.settings.config
        self.batch: TrainBatch = captured.value("batch.")
        self.sequences: list[int] = captured.tensors["update.sequences"].tolist()
        self.notes: list[str] = []
        tensors, algorithm, missing = captured.tensors, config.algorithm, model.weights.reference
        has_kl, has_probs = "inputs.kl" in tensors, "inputs.logprobs" in tensors
        self._inputs = has_kl or has_probs
        if has_kl and (missing or algorithm.kl.target is not None):
            self._inputs = False
            self.notes.append(f"{KL} is not compared: {missing or 'its coefficient adapts within the step'}")
        self._check_captured(has_probs)
        old = self.batch.old_logprobs
        self._old = old is not None and algorithm.old_logprobs == "trainer" and self.batch.rollout_shares is None
        self._scores_all = algorithm.kl.in_reward or takes(algorithm.advantage, "token_probs")
        self._reference = self.batch.ref_logprobs is not None and model.reference is not None and not missing
        if self.batch.ref_logprobs is not None and not self._reference:
            self.notes.append(f"{REFERENCE} are not compared: {missing or 'these settings have no reference'}")
        self.updates = True
        self.clipped = False
        """Whether a ratio was beyond the clip bounds in the last passes of the update."""
        if not model.update.trained_sequences(self.batch, self.sequences):
            self.updates = False
            self.notes.append("passes of the update are not compared: no response has an advantage")
        other = self._other_dropout() if model.update.has_dropout else None
        if other is not None:
            self.updates = False
            self.notes.append(f"passes of the update are not compared: dropout draws other numbers {other}")
        if has_exact_kl(config) and missing:
            self.updates = False
            self.notes.append(f"passes of the update are not compared: the loss reads the reference, and {missing}")

    def _check_captured(self, has_probs: bool) -> None:
        """Check that the step has what the settings need.

        Raises:
            ConfigError: an override asks for more.
        """
        config = self.model.settings.config
        kl, estimator = config.algorithm.kl, config.algorithm.advantage
        needs_reference = kl.coef > 0 and not kl.in_reward and not has_exact_kl(config)
        for key, value, what, is_missing in (
            ("kl.coef", kl.coef, "reference log-probs", needs_reference and self.batch.ref_logprobs is None),
            ("advantage.name", estimator.name, "probabilities", takes(estimator, "token_probs") and not has_probs),
        ):
            if is_missing:
                raise ConfigError(
                    f"algorithm.{key}={value}: it needs {what} of each token, which the captured step lacks; leave it "
                    "as it was captured"
                )

    def run(self) -> dict[str, torch.Tensor]:
        """Run all passes; return the results by stage, on the host. The gradients are in the parameters."""
        model, batch, results = self.model, self.batch, {}
        update = model.update
        restore_update(model.captured, update)
        if self._inputs:
            results |= self._advantage_inputs()
            restore_update(model.captured, update)
        if self._old:
            scored = range(len(batch)) if self._scores_all else update.trained_sequences(batch, range(len(batch)))
            results[OLD] = update.score(batch, sequences=scored)
        if self._reference and model.reference is not None:
            with model.reference.active():
                results[REFERENCE] = update.score(batch, model.reference.policy)
        return results | (self.accumulate_gradients() if self.updates else {})

    def accumulate_gradients(self) -> dict[str, torch.Tensor]:
        """Run the passes of the update; return its results, with the gradients in the parameters."""
        model, logprobs = self.model, torch.zeros(len(self.batch.tokens))
        rng_state.restore(self._generators(), model.device, model.settings.config.trainer.seed)
        loss, sums = model.update.accumulate_gradients(self.batch, self.sequences, logprobs)
        self.clipped = any(value for name, value in sums.items() if name.startswith(("pg_clipfrac", "clip_ratio")))
        return {LOGPROBS: logprobs, LOSS: torch.tensor([loss], dtype=torch.float64)}

    def expected(self) -> dict[str, torch.Tensor]:
        """Return the captured results by the names of `run`."""
        captured, batch = self.model.captured, self.batch
        found = {
            PROBABILITIES: captured.tensors.get("inputs.logprobs"),
            SQUARE_SUMS: captured.tensors.get("inputs.square_sums"),
            KL: captured.tensors.get("inputs.kl"),
            OLD: batch.old_logprobs,
            REFERENCE: batch.ref_logprobs,
            LOGPROBS: captured.tensors["update.logprobs"],
            LOSS: torch.tensor([float(captured.facts["loss"])], dtype=torch.float64),
        }
        return {name: values for name, values in found.items() if values is not None}

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and gradient, an fp32 copy on the host, of each trained parameter; zeros for none."""
        for name, parameter in self.model.parameters().items():
            if parameter.requires_grad:
                gradient = self.model.strategy.gradient(parameter)
                if gradient is None:
                    yield name, torch.zeros(parameter.shape)
                else:  # a copy: gradients in host memory are summed in place
                    yield name, gradient.detach().to("cpu", torch.float32, copy=True)

    def step(self) -> float:
        """Clip the gradients and update the weights, as the run does; return the gradient's norm."""
        update, config = self.model.update, self.model.settings.config
        norm = float(self.model.strategy.clip_gradients(config.optim.grad_clip))
        if math.isfinite(norm):
            self.model.strategy.step(learning_rate(config.optim, update.updates_done, update.total_updates))
        else:
            self.model.strategy.discard_gradients()
        return norm

    def _advantage_inputs(self) -> dict[str, torch.Tensor]:
        captured, model = self.model.captured, self.model
        values = captured.prompts, captured.value("completions."), captured.value("rewards.")
        found = advantage_inputs(model.update, model.reference, *values, Stopwatch(), self.batch.temperature)
        results = {} if found.kl_R is None else {KL: found.kl_R}
        if found.token_probs is not None:
            results |= {PROBABILITIES: found.token_probs.logprobs, SQUARE_SUMS: found.token_probs.square_sums}
        return results

    def _generators(self) -> dict[str, torch.Tensor]:
        tensors = self.model.captured.tensors
        return {name.removeprefix(RNG): values for name, values in tensors.items() if name.startswith(RNG)}

    def _other_dropout(self) -> str | None:
        """Return where the random numbers of dropout are others than in the run; None: they are the same."""
        facts, update = self.model.captured.facts, self.model.update
        family = json.loads(bytes(self._generators()["family"].tolist()))
        tokens = None if update.budget is None else update.budget.tokens
        for what, there, here in (
            ("on this device family", family, self.model.device.backend.name),
            ("of one process", facts["machine"].get("ranks", 1), 1),
            ("in this layout", facts["machine"]["layout"], update.layout.name),
            ("in micro-batches of this size", facts.get("micro_batch_tokens", tokens), tokens),
        ):
            if there != here:
                return f"{what} ({here}; the run: {there})"
        return None
