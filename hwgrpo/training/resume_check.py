"""The check of a resume: a few log-probs of the checkpoint's weights, by the machine that saved it and by this one.

The first machine may be gone by then, so that every checkpoint has its values in `resume-check.safetensors`: a short
sample of the step's sequences, their log-probs and entropy, and how far rounding moves these on that machine. Before
its first step, a resumed run computes them again. What rounding does not explain ends it: the two machines do not train
the same model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from hwgrpo_backends.device import Device
from hwgrpo_kernels import default_registry

import hwgrpo
from hwgrpo.config import Config
from hwgrpo.errors import CheckpointError
from hwgrpo.models.rounding import MARGIN
from hwgrpo.support.stage_differences import Stage, as_json, compare_tensor, first_difference, worst_of
from hwgrpo.training.checkpoint import checkpoint_files
from hwgrpo.training.checkpoint.restore import Checkpoint
from hwgrpo.training.feed.scored_groups import pack, values_json
from hwgrpo.training.policy.auto_settings import choose_strategy
from hwgrpo.training.strategies.strategy import Strategy, raise_on_all_ranks
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.training.update.sample_scores import SampleScores, score_sample
from hwgrpo.values import TrainBatch

FILE = "resume-check.safetensors"
SCHEMA = "hwgrpo.resume_check/1"
RECORD = "resumes"
"""Key of the records of all resumes, in a checkpoint's state and in environment.json."""
FLOOR = 4 * torch.finfo(torch.float32).eps
"""Difference that counts as rounding on any machine, as a share of the largest value: the values are fp32."""
_SEQUENCES, _VALUES = "sequences.", "values."


@dataclass(frozen=True)
class Machine:
    """What computes a run's log-probs."""

    backend: str
    device: str
    dtype: str
    """Of the products."""
    torch: str
    transformers: str
    hwgrpo: str
    layout: str
    attention: str
    strategy: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.backend} ({self.device}, {self.dtype}, torch {self.torch})"

    def changes(self, other: Machine) -> str:
        """Return the fields in which another machine differs: `backend cpu -> npu, dtype float32 -> bfloat16`."""
        pairs = zip(asdict(self).items(), asdict(other).values(), strict=True)
        return ", ".join(f"{name} {mine} -> {theirs}" for (name, mine), theirs in pairs if mine != theirs)


@dataclass(frozen=True)
class SavedScores:
    """What a checkpoint's file has."""

    machine: Machine
    """Rank 0's."""
    sample: TrainBatch
    scores: SampleScores


class ResumeCheck:
    """Adds the file to checkpoints, and compares at a resume.

    Args:
        config: the run's settings.
        device: this rank's device.
        update: scores by the policy.
        strategy: connects the ranks, which call each method together.
    """

    def __init__(self, config: Config, device: Device, update: PolicyUpdate, strategy: Strategy) -> None:
        self._mode = config.trainer.resume_check
        self._update, self._strategy = update, strategy
        policy = update.policy
        self._machine = Machine(
            backend=device.backend.name,
            device=device.name,
            dtype=str(policy.compute_dtype).removeprefix("torch."),
            torch=torch.__version__,
            transformers=transformers.__version__,
            hwgrpo=hwgrpo.__version__,
            layout=update.layout.name,
            attention=str(policy.base.config._attn_implementation),
            strategy=choose_strategy(config.trainer.strategy),
            ranks=strategy.world_size,
        )
        self.resumes: list[dict[str, Any]] = []
        """Records of all resumes of the run up to now, oldest first: `{step, from, to, passed, first_difference,
        stages: [{name, error, tolerance, ...}]}`; `from` and `passed` are null where nothing was compared."""

    def files(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return this rank's files of a checkpoint of the present weights: rank 0's has the values."""
        if self._mode == "off":
            return {}
        samples = self._strategy.gather_objects(self._update.sample)
        sample = next((each for each in samples if each is not None), None)
        if sample is None:
            return {}
        scores = score_sample(self._update, sample)
        return {FILE: pack_scores(SavedScores(self._machine, sample, scores))} if self._strategy.rank == 0 else {}

    def compare(self, checkpoint: Checkpoint) -> str | None:
        """Compare the log-probs of the restored weights with the checkpoint's, and record the resume.

        Returns:
            A line for the user.

        Raises:
            CheckpointError: they differ by more than rounding explains, and `trainer.resume_check` is error; or the
                file is of another version, or cannot be read any more.
        """
        self.resumes = [*checkpoint.manifest["state"].get(RECORD, [])]
        if self._mode == "off":
            self._record(checkpoint, None, [])
            return None
        saved = raise_on_all_ranks(self._strategy, lambda: read_scores(checkpoint))
        reason = _reason_against(saved, checkpoint.folder)
        if saved is None or reason is not None:
            self._record(checkpoint, None, [])
            return reason
        with default_registry.unrecorded():  # kernels.json has those of the run's own steps
            now = score_sample(self._update, saved.sample)
        mine = compare_scores(now, saved.scores)
        of_ranks = self._strategy.gather_objects((self._machine, mine))
        stages = _worst_of_ranks([stages for _, stages in of_ranks])
        self._record(checkpoint, saved.machine, stages)
        difference = first_difference(stages)
        if difference is None:
            return _agreement(checkpoint.step, saved.machine, of_ranks[0][0], stages[0])
        rank = next(rank for rank, (_, each) in enumerate(of_ranks) if first_difference(each))
        message = _disagreement(checkpoint.folder, saved.machine, of_ranks[rank][0], difference)
        if self._mode == "warn":
            return f"warning: {message}; the run goes on (trainer.resume_check=warn)"
        raise CheckpointError(
            f"{message}. `hwgrpo parity backend.name={self._machine.backend}` shows where this machine differs from "
            "fp64; trainer.resume_check=warn resumes all the same, and records the difference"
        )

    def _record(self, checkpoint: Checkpoint, saved_by: Machine | None, stages: Sequence[Stage]) -> None:
        record = {
            "step": checkpoint.step,
            "from": None if saved_by is None else asdict(saved_by),
            "to": asdict(self._machine),
            **as_json(stages),
        }
        self.resumes.append(record if stages else record | {"passed": None})


def compare_scores(now: SampleScores, saved: SampleScores) -> list[Stage]:
    """Return the stages of two machines: their differences, by the larger effect of rounding of the two."""
    stages = []
    for stage, expected in saved.values.items():
        floor = FLOOR * float(expected.abs().max())
        tolerance = max(MARGIN * saved.rounding[stage], MARGIN * now.rounding[stage], floor)
        stages.append(compare_tensor(stage, "response token", now.values[stage], expected, tolerance))
    return stages


def pack_scores(saved: SavedScores) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint's file."""
    header = {"schema": SCHEMA, "machine": asdict(saved.machine), "rounding": dict(saved.scores.rounding)}
    values = {_VALUES + stage: values for stage, values in saved.scores.values.items()}
    return pack("", [], header) | pack(_SEQUENCES, [saved.sample], {}) | values


def read_scores(checkpoint: Checkpoint) -> SavedScores | None:
    """Return what a checkpoint's file has; None if it has none.

    Raises:
        CheckpointError: the file is of another version, or cannot be read any more.
    """
    if FILE not in checkpoint.manifest["files"]:
        return None
    path = checkpoint.folder / FILE
    tensors = checkpoint_files.read_tensors(path)
    header = values_json("", tensors) or {}
    if header.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{path} has the schema {header.get('schema')!r}, and this version of hwgrpo compares {SCHEMA!r}: resume "
            "with the version that saved it, or set trainer.resume_check=off to resume without a comparison"
        )
    sample = TrainBatch.from_tensors(_SEQUENCES, tensors, values_json(_SEQUENCES, tensors) or {})
    values = {stage: tensors[_VALUES + stage] for stage in header["rounding"]}
    return SavedScores(Machine(**header["machine"]), sample, SampleScores(values, header["rounding"]))


def _reason_against(saved: SavedScores | None, folder: Path) -> str | None:
    """Return why there is nothing to compare, or None."""
    if saved is None:
        return (
            f"{folder} has no log-probs to compare this machine's with: an earlier version saved it, or a run with "
            "trainer.resume_check=off"
        )
    if not all(values.isfinite().all() for values in saved.scores.values.values()):
        return f"warning: the log-probs that {folder} was saved with are not finite, and are not compared"
    return None


def _worst_of_ranks(of_ranks: Sequence[Sequence[Stage]]) -> list[Stage]:
    """Return each stage of the rank where its error takes the largest share of its tolerance."""
    if len(of_ranks) == 1:
        return [*of_ranks[0]]
    named = [
        [replace(stage, tensor=f"{stage.tensor} of rank {rank}") for stage in stages]
        for rank, stages in enumerate(of_ranks)
    ]
    return [worst_of(same_stage) for same_stage in zip(*named, strict=True)]


def _agreement(step: int, saved_by: Machine, now: Machine, stage: Stage) -> str:
    """Return a line on values that rounding explains."""
    changed = saved_by.changes(now)
    here = f"resumed after step {step} on {now.backend}" + (f" ({changed})" if changed else "")
    if not stage.error:
        return f"{here}: {stage.name} equal the checkpoint's"
    return f"{here}: {stage.name} differ by at most {stage.error:.1g}, {stage.share:.2g} of what rounding explains"


def _disagreement(folder: Path, saved_by: Machine, now: Machine, stage: Stage) -> str:
    """Return which stage differs, by how much, on which machines."""
    gap = "are not finite" if math.isnan(stage.error) else f"differ by {stage.error:.3g}"
    changed = saved_by.changes(now)
    return (
        f"{now} computes other {stage.name} than {saved_by} did when it saved {folder}: they {gap} in {stage.tensor}"
        f"[{stage.index[0]}] ({stage.actual:.6g} instead of {stage.expected:.6g}), where rounding explains "
        f"{stage.tolerance:.2g}" + (f"; changed since: {changed}" if changed else "")
    )
