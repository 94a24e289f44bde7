"""Stages that capture a step for `hwgrpo replay` (`trainer.capture_steps`); they change nothing of the step."""

from __future__ import annotations

import copy
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import hwgrpo_kernels
import torch
import transformers
from hwgrpo_backends.device import Device
from safetensors import SafetensorError
from torch.linalg import vector_norm

import hwgrpo
from hwgrpo.config import Config
from hwgrpo.config.load import to_yaml
from hwgrpo.support.jsonlines import jsonable
from hwgrpo.training.captured_files import FOLDER, SCHEMA, TENSORS
from hwgrpo.training.captured_step import StepWriter, entries_of
from hwgrpo.training.checkpoint import rng_state, shard_files
from hwgrpo.training.code_files import checksums
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.reference_model import Reference
from hwgrpo.training.stages.stage import StepState
from hwgrpo.training.strategies.single import Single
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.values import PromptBatch

RNG = "rng."
"""Prefix of the random states before the update."""
REFERENCE = "reference.before"
"""Entries of the reference model's parameters, where it is a copy of the policy's."""


@dataclass
class StepCapture:
    """What the stages of a capture share: the step in writing, and the first update's results.

    Its size is bounded by the step's tokens, about 50 bytes each, its prompts' data, and 64 entries of each parameter.
    """

    config: Config
    """With absolute paths."""
    written: Config
    """With the user's own paths, for the record."""
    device: Device
    strategy: Single
    update: PolicyUpdate
    reference: Reference | None
    total_steps: int
    """Steps of the run, over which the learning rate may fall."""
    machine: Mapping[str, Any]
    _writer: StepWriter | None = field(default=None, init=False)
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    _facts: dict[str, Any] = field(default_factory=dict, init=False)
    _step: int = field(default=0, init=False)
    _notes: list[str] = field(default_factory=list, init=False)
    """The step's notes for the user."""

    def begin(self, state: StepState) -> None:
        """Keep what is before the update; write the weights, where the settings ask for them."""
        trainer = self.config.trainer
        if state.step not in trainer.capture_steps:
            return

        def work() -> None:
            self._writer = StepWriter(Path(trainer.output_dir) / FOLDER, state.step)
            self._tensors = {RNG + name: values for name, values in rng_state.capture(self.device).items()}
            self._tensors["weights.before"] = _joined(map(entries_of, self._named().values()))
            if self.reference is not None and self.reference.kind == "copy":
                self._tensors[REFERENCE] = _joined(map(entries_of, number_parameters(self.reference.policy).values()))
            self._facts = {
                "before": self.update.state(),
                "total_steps": self.total_steps,
                "correction": self._forced_correction(),
                "weights": self._write_weights(self._writer) if trainer.capture_weights else None,
            }
            self.update.watch(self)

        self._notes = state.notes
        self._guarded(state.step, work)

    def close(self) -> None:
        """Remove what was written of a step whose update has ended the run."""
        if self._writer is not None:
            self._writer.give_up()

    def gradients_ready(self, loss: float, sequences: Sequence[int], logprobs: torch.Tensor) -> None:
        """Keep the results of the first update's passes; see `UpdateWatcher`."""
        self._guarded(self._step, lambda: self._keep_gradients(loss, sequences, logprobs))

    def _keep_gradients(self, loss: float, sequences: Sequence[int], logprobs: torch.Tensor) -> None:
        if self._writer is None:
            return
        gradients = [self.strategy.gradient(p) for p in self._named().values() if p.requires_grad]
        shapes = [p for p in self._named().values() if p.requires_grad]
        kept = [torch.zeros_like(entries_of(p)) if g is None else entries_of(g) for g, p in zip(gradients, shapes)]
        norms = [0.0 if g is None else float(vector_norm(g.detach(), dtype=torch.float32)) for g in gradients]
        self._tensors["gradients"] = _joined(kept)
        self._tensors["gradient_norms"] = torch.tensor(norms, dtype=torch.float64)
        self._tensors["update.logprobs"] = logprobs.clone()
        self._tensors["update.sequences"] = torch.tensor(list(sequences), dtype=torch.int64)
        self._facts["loss"] = loss

    def updated(self, norm: float, lr: float | None) -> None:
        """Keep the weights after the first update; see `UpdateWatcher`."""

        def work() -> None:
            self._tensors["weights.after"] = _joined(entries_of(p) for p in self._named().values() if p.requires_grad)
            self._facts["update"] = {"norm": norm, "lr": lr}

        if self._writer is not None:
            self._guarded(self._step, work)

    def end(self, state: StepState) -> None:
        """Write the step."""
        if self._writer is None:
            return

        def work() -> None:
            assert self._writer is not None
            values, tensors = self._values(state)
            self._writer.add_tensors(TENSORS, self._tensors | tensors)
            self._writer.finish(self._record(state, values))
            size = self._writer.bytes / 2**20
            state.notes.append(f"captured step {state.step}: {size:,.3g} MiB in {self._writer.folder}")

        self._guarded(state.step, work)
        self._writer, self._tensors, self._facts = None, {}, {}

    def _guarded(self, step: int, work: Callable[[], None]) -> None:
        """Write; no disk or no memory costs the capture and not the run, whose results do not depend on it."""
        self._step = step
        try:
            work()
        except (OSError, SafetensorError, RuntimeError) as error:  # torch's errors, out of memory among them
            if self._writer is not None:
                self._writer.give_up()
            self._writer = None
            reason = getattr(error, "strerror", None) or error
            self._notes.append(f"warning: step {step} could not be captured: {reason}; the run continues")

    def _named(self) -> dict[str, torch.nn.Parameter]:
        return number_parameters(self.update.policy)

    def _settings(self) -> str:
        """Return the settings as YAML, without secrets and without the place of the run's results."""
        placeless = copy.deepcopy(self.written)
        placeless.trainer.output_dir = type(placeless.trainer)().output_dir
        return to_yaml(placeless, shown=True)

    def _forced_correction(self) -> dict[str, Any] | None:
        """Return the correction that the guard has put in force in place of the settings'; None: theirs is."""
        correction = self.update.loss_fn.algorithm.correction
        return None if correction == self.config.algorithm.correction else asdict(correction)

    def _write_weights(self, writer: StepWriter) -> shard_files.Table:
        shards = self.strategy.owned_shards()
        for name, tensors in shard_files.files_of(shards, 0).items():
            writer.add_tensors(name, tensors)
        return shard_files.table_of(shards, 0)

    def _values(self, state: StepState) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        values: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {"trained": state.trained, "advantages": state.advantages}
        for prefix, value in (
            ("completions.", replace(state.completions, token_extras={})),  # those that losses read are in the batch
            ("rewards.", state.rewards),
            ("batch.", state.batch),
        ):
            of_value, values[prefix] = value.to_tensors(prefix)
            tensors |= of_value
        inputs = state.inputs
        probs = inputs.token_probs
        for name, each in (
            ("token_advantages", state.token_advantages),
            ("inputs.total", inputs.rewards.total),
            ("inputs.kl", inputs.kl_R),
            ("inputs.logprobs", None if probs is None else probs.logprobs),
            ("inputs.square_sums", None if probs is None else probs.square_sums),
        ):
            if each is not None:
                tensors[name] = each
        return values, {name: each.clone() for name, each in tensors.items()}  # safetensors refuses shared memory

    def _record(self, state: StepState, values: Mapping[str, Any]) -> dict[str, Any]:
        prompts, converted = _prompts(state.prompts)
        return {
            "schema": SCHEMA,
            "step": state.step,
            "weight_version": state.completions.weight_version,
            "versions": {
                "hwgrpo": hwgrpo.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            "machine": {**self.machine, "kernels": hwgrpo_kernels.choices()},
            "micro_batch_tokens": self.update.budget.tokens if self.update.budget else None,
            "config": self._settings(),
            "template_date": self.config.data.template_date,
            "code": checksums(self.config),
            "converted_columns": converted,
            **self._facts,
            "values": values,
            "vocabulary": getattr(self.update.policy.base.config.get_text_config(), "vocab_size", None),
            "parameters": [
                {
                    "name": name,
                    "shape": list(p.shape),
                    "dtype": str(p.dtype).removeprefix("torch."),
                    "trained": p.requires_grad,
                }
                for name, p in self._named().items()
            ],
            "prompts": prompts,
        }


@dataclass
class BeginCapture:
    """Keeps what is before the update of a step to be captured."""

    timed = "save"
    capture: StepCapture

    def __call__(self, state: StepState) -> None:
        self.capture.begin(state)


@dataclass
class EndCapture:
    """Writes a captured step."""

    timed = "save"
    capture: StepCapture

    def __call__(self, state: StepState) -> None:
        self.capture.end(state)


def number_parameters(policy: PolicyModel) -> dict[str, torch.nn.Parameter]:
    """Return name -> parameter of those whose values are numbers, not codes of a quantization."""
    named = policy.model.named_parameters()
    return {name: parameter for name, parameter in named if parameter.is_floating_point()}


def _joined(tensors: Iterator[torch.Tensor] | Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.zeros(0), *tensors])


def _prompts(batch: PromptBatch) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the prompts as JSON values, and the names of columns that JSON does not hold as they are."""
    converted: set[str] = set()
    found = []
    for prompt in batch.prompts:
        each = {
            "uid": prompt.uid,
            "text": prompt.text,
            "token_ids": list(prompt.token_ids),
            "ground_truth": jsonable(prompt.ground_truth),
            "columns": jsonable(prompt.columns),
            "source": prompt.source,
            "messages": None if prompt.messages is None else jsonable(prompt.messages),
        }
        values = {**prompt.columns, "ground_truth": prompt.ground_truth}
        kept = {**each["columns"], "ground_truth": each["ground_truth"]}
        converted |= {name for name, value in values.items() if json.loads(json.dumps(kept.get(str(name)))) != value}
        found.append(each)
    return found, sorted(map(str, converted))
