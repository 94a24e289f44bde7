"""Stages that capture a step for `hwgrpo replay` (`trainer.capture_steps`); they change nothing of the step."""

from __future__ import annotations

import copy
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import hwgrpo_kernels
import torch
import transformers
from hwgrpo_backends.device import Device
from safetensors import SafetensorError

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
from hwgrpo.training.strategies.ddp import Ddp
from hwgrpo.training.strategies.optimizer import total_norm
from hwgrpo.training.strategies.param_shard import full_param_shards
from hwgrpo.training.strategies.single import Single
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.values import Completions, PromptBatch, Rewards, TrainBatch

RNG = "rng."
"""Prefix of the random states before the update."""
REFERENCE = "reference.before"
"""Entries of the reference model's parameters, where it is a copy of the policy's."""


@dataclass(frozen=True)
class RankShare:
    """A rank's sequences of a step."""

    prompts: PromptBatch
    completions: Completions
    rewards: Rewards
    batch: TrainBatch
    tensors: Mapping[str, torch.Tensor]
    """Further values per response or token."""
    sequences: list[int]
    """Those of the first update, by their place in the batch."""

    @classmethod
    def of(cls, state: StepState, sequences: list[int], logprobs: torch.Tensor) -> RankShare:
        """Return this rank's, with the log-probs of the first update."""
        probs = state.inputs.token_probs
        tensors = {
            "trained": state.trained,
            "advantages": state.advantages,
            "token_advantages": state.token_advantages,
            "inputs.total": state.inputs.rewards.total,
            "inputs.kl": state.inputs.kl_R,
            "inputs.logprobs": None if probs is None else probs.logprobs,
            "inputs.square_sums": None if probs is None else probs.square_sums,
            "update.logprobs": logprobs,
        }
        return cls(
            state.prompts,
            replace(state.completions, token_extras={}),  # those that losses read are in the batch
            state.rewards,
            state.batch,
            {name: each for name, each in tensors.items() if each is not None},
            sequences,
        )

    @classmethod
    def concat(cls, parts: Sequence[RankShare]) -> RankShare:
        """Return the sequences of all ranks as those of one."""
        if len(parts) == 1:
            return parts[0]
        counts = [len(each.prompts) for each in parts]
        first = accumulate((len(each.batch) for each in parts), initial=0)
        return cls(
            PromptBatch(tuple(chain.from_iterable(each.prompts.prompts for each in parts))),
            Completions.concat([each.completions for each in parts], counts),
            Rewards.concat([each.rewards for each in parts]),
            TrainBatch.concat([each.batch for each in parts]),
            {name: torch.cat([each.tensors[name] for each in parts]) for name in parts[0].tensors},
            [start + place for start, each in zip(first, parts, strict=False) for place in each.sequences],
        )

    def columns(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the JSON values of completions, rewards and batch, and all tensors."""
        values: dict[str, Any] = {}
        tensors = {**self.tensors, "update.sequences": torch.tensor(self.sequences, dtype=torch.int64)}
        for prefix, value in (("completions.", self.completions), ("rewards.", self.rewards), ("batch.", self.batch)):
            of_value, values[prefix] = value.to_tensors(prefix)
            tensors |= of_value
        return values, {name: each.clone() for name, each in tensors.items()}  # safetensors refuses shared memory


@dataclass
class StepCapture:
    """What the stages of a capture share: the step in writing, and the first update's results.

    Each rank keeps its sequences; rank 0, which has all gradients and weights, writes those of all ranks.

    Its size is bounded by the step's tokens, about 50 bytes each, its prompts' data, and 64 entries of each parameter.
    """

    config: Config
    """With absolute paths."""
    written: Config
    """With the user's own paths, for the record."""
    device: Device
    strategy: Single | Ddp
    update: PolicyUpdate
    reference: Reference | None
    total_steps: int
    """Steps of the run, over which the learning rate may fall."""
    machine: Mapping[str, Any]
    _open: bool = field(default=False, init=False)
    """Whether this rank keeps a step, and nothing has failed."""
    _writer: StepWriter | None = field(default=None, init=False)
    """Rank 0's."""
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    _facts: dict[str, Any] = field(default_factory=dict, init=False)
    _passes: tuple[list[int], torch.Tensor] = field(default=([], torch.zeros(0)), init=False)
    """Sequences and log-probs of this rank in the first update."""
    _step: int = field(default=0, init=False)
    _notes: list[str] = field(default_factory=list, init=False)
    """The step's notes for the user."""

    def begin(self, state: StepState) -> None:
        """Keep what is before the update; write the weights, where the settings ask for them."""
        trainer = self.config.trainer
        if state.step not in trainer.capture_steps:
            return

        def work() -> None:
            self._open = True
            self.update.watch(self)
            if self.strategy.rank:
                return
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
        if not self._open:
            return
        self._passes = [*sequences], logprobs.clone()
        if self._writer is None:
            return
        gradients = [self.strategy.gradient(p) for p in self._named().values() if p.requires_grad]
        shapes = [p for p in self._named().values() if p.requires_grad]
        kept = [torch.zeros_like(entries_of(p)) if g is None else entries_of(g) for g, p in zip(gradients, shapes)]
        norms = [0.0 if g is None else float(total_norm([g.detach().float()])) for g in gradients]
        self._tensors["gradients"] = _joined(kept)
        self._tensors["gradient_norms"] = torch.tensor(norms, dtype=torch.float64)
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
        if state.step not in self.config.trainer.capture_steps:
            return
        kept: list[RankShare] = []
        if self._open:
            self._guarded(state.step, lambda: kept.append(RankShare.of(state, *self._passes)))
        of_ranks = self.strategy.gather_objects(kept)

        def work() -> None:
            assert self._writer is not None
            if not all(of_ranks):
                raise RuntimeError(f"rank {next(rank for rank, each in enumerate(of_ranks) if not each)} has no values")
            share = RankShare.concat([*chain.from_iterable(of_ranks)])
            values, tensors = share.columns()
            self._writer.add_tensors(TENSORS, self._tensors | tensors)
            self._writer.finish(self._record(state, share.prompts, values))
            size = self._writer.bytes / 2**20
            state.notes.append(f"captured step {state.step}: {size:,.3g} MiB in {self._writer.folder}")

        if self._writer is not None:
            self._guarded(state.step, work)
        self._open, self._writer, self._tensors, self._facts = False, None, {}, {}

    def _guarded(self, step: int, work: Callable[[], None]) -> None:
        """Write; no disk or no memory costs the capture and not the run, whose results do not depend on it."""
        self._step = step
        try:
            work()
        except (OSError, SafetensorError, RuntimeError) as error:  # torch's errors, out of memory among them
            if self._writer is not None:
                self._writer.give_up()
            self._open, self._writer = False, None
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
        shards = full_param_shards(self.update.policy.model, self.strategy.optimizer, read_only=True)
        for name, tensors in shard_files.files_of(shards, 0).items():
            writer.add_tensors(name, tensors)
        return shard_files.table_of(shards, 0)

    def _record(self, state: StepState, batch: PromptBatch, values: Mapping[str, Any]) -> dict[str, Any]:
        prompts, converted = _prompts(batch)
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
            "machine": {**self.machine, "ranks": self.strategy.world_size, "kernels": hwgrpo_kernels.choices()},
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
