"""A resumed run's log-probs against those of the machine that saved the checkpoint: compared, recorded, refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hwgrpo.errors import CheckpointError
from hwgrpo.models.rounding import MARGIN
from hwgrpo.report.resume_rows import resume_rows
from hwgrpo.training import resume_check
from hwgrpo.training.checkpoint import checkpoint_files, restore
from hwgrpo.training.resume_check import FILE, FLOOR, compare_scores, read_scores
from hwgrpo.training.update.sample_scores import ENTROPY, LOG_PROBS, SampleScores
from tests.support.numbers.rounding import LOGITS, STEP
from tests.support.processes import ranks
from tests.support.runs import runs
from tests.support.runs.wrong_devices import WRONG, scaled_layer

BASE = (
    *("model.dtype=float32", "rollout.temperature=0.7", "trainer.save_every=3"),
    *("trainer.validate_at_start=false", "observe.progress=plain"),
)
WARN, OFF = "trainer.resume_check=warn", "trainer.resume_check=off"


def start(output: Path, steps: int, *overrides: str) -> None:
    assert runs.run(output, *BASE, f"trainer.max_steps={steps}", *overrides) == "completed"


def resumes(output: Path) -> list[dict[str, Any]]:
    return json.loads((output / "environment.json").read_text())["resumes"]


def checkpoint(output: Path, step: int) -> Path:
    return checkpoint_files.folder_of(output / "checkpoints", step)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, the last of which is saved."""
    output = tmp_path_factory.mktemp("saved") / "run"
    start(output, 3)
    return output


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def test_a_resume_on_the_same_machine_has_the_same_values_and_changes_no_bit(
    tmp_path: Path, copied: Path, capsys: pytest.CaptureFixture[str]
):
    start(copied, 6)
    assert "resumed after step 3 on cpu: log-probs equal the checkpoint's\n" in capsys.readouterr().out
    [record] = resumes(copied)
    assert (record["step"], record["passed"], record["from"]) == (3, True, record["to"])
    assert (record["to"]["backend"], record["to"]["dtype"], record["to"]["torch"]) == (
        "cpu",
        "float32",
        torch.__version__,
    )
    assert [(stage["name"], stage["error"]) for stage in record["stages"]] == [(LOG_PROBS, 0), (ENTROPY, 0)]
    for name, overrides in (("checked", ()), ("unchecked", (OFF,))):
        start(tmp_path / name, 6, *overrides)
    results = [runs.everything(each) for each in (copied, tmp_path / "checked", tmp_path / "unchecked")]
    # the first part of the interrupted run ended with a validation
    curves = [[line for line in result.pop("metrics") if "actor/loss" in line] for result in results]
    assert curves[0] == curves[1] == curves[2]
    assert results[0] == results[1] == results[2]
    tensors = [
        {file.name: file.read_bytes() for file in checkpoint(tmp_path / name, 3).glob("*.safetensors")}
        for name in ("checked", "unchecked")
    ]
    assert tensors[0].pop(FILE)
    assert tensors[0] == tensors[1]


def test_a_checkpoint_has_a_short_sample_with_its_values(saved: Path):
    scores = read_scores(restore.verify(checkpoint(saved, 3)))
    assert scores is not None
    sample = scores.sample
    assert len(sample) == 4
    assert len(sample.prompt_tokens) + len(sample.tokens) <= 256
    assert sample.temperature == 0.7
    values, rounding = scores.scores.values, scores.scores.rounding
    assert {name: len(each) for name, each in values.items()} == dict.fromkeys((LOG_PROBS, ENTROPY), len(sample.tokens))
    assert values[LOG_PROBS].lt(0).all()
    assert values[ENTROPY].gt(0).all()
    assert all(0 < effect < STEP * LOGITS for effect in rounding.values())


def test_the_tolerance_is_that_of_the_machine_with_more_rounding():
    values = {LOG_PROBS: torch.tensor([-1.0, -8.0])}
    coarse, fine = SampleScores(values, {LOG_PROBS: 1e-2}), SampleScores(values, {LOG_PROBS: 1e-9})
    shifted = SampleScores({LOG_PROBS: values[LOG_PROBS] + 0.02}, {LOG_PROBS: 1e-9})
    for now, before in ((coarse, fine), (fine, coarse)):
        assert compare_scores(now, before)[0].tolerance == MARGIN * 1e-2
    assert compare_scores(fine, fine)[0].tolerance == 8 * FLOOR
    assert compare_scores(shifted, coarse)[0].passed
    assert not compare_scores(shifted, fine)[0].passed


CHANGES = {
    "another dtype": ("model.dtype=bfloat16",),
    "another layout": ("model.layout=padded",),
    "another attention": ("model.layout=padded", "model.attention=eager"),
    "another temperature": ("rollout.temperature=1.0",),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_may_change_at_a_resume_is_rounding(copied: Path, change: str):
    start(copied, 4, *CHANGES[change])
    [record] = resumes(copied)
    assert record["passed"]
    assert len(record["stages"]) == 2
    if change == "another dtype":
        assert (record["from"]["dtype"], record["to"]["dtype"]) == ("float32", "bfloat16")
        assert record["stages"][0]["error"] > 0


@pytest.mark.parametrize("mistake", WRONG)
def test_a_machine_that_computes_something_else_is_refused_and_named(
    copied: Path, mistake: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        WRONG[mistake](patch, "cpu")
        with pytest.raises(CheckpointError) as refusal:
            start(copied, 6)
        message = str(refusal.value)
        for part in ("cpu (", "other log-probs than cpu", "step-00000003", "instead of", "hwgrpo parity", WARN):
            assert part in message
        assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before
        capsys.readouterr()
        start(copied, 4, WARN)
    assert "warning: cpu (" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="step-00000004"):  # which the wrong machine saved
        start(copied, 5)
    start(copied, 5, WARN)
    records = resumes(copied)
    assert [(each["step"], each["passed"], each["first_difference"]) for each in records] == [
        (3, False, LOG_PROBS),
        (4, False, LOG_PROBS),
    ]
    assert [row["mood"] for row in resume_rows(records)] == ["bad", "bad"]


def test_adapters_on_two_ranks_are_compared_on_each_and_a_wrong_rank_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    words = (*BASE, "model.lora.rank=2", "model.lora.dropout=0.1")
    output = tmp_path / "run"

    def two_ranks(strategy: str, steps: int, wrong: int | None = None) -> None:
        def body(rank: int) -> None:
            if rank == wrong:
                scaled_layer(monkeypatch, "cpu")
            overrides = (*words, f"trainer.strategy={strategy}", f"trainer.max_steps={steps}")
            if wrong is None:
                runs.run(output, *overrides)
                return
            with pytest.raises(CheckpointError, match=r"log-probs.* of rank 1"):
                runs.run(output, *overrides)

        assert ranks.forked(2, body) == [0, 0]

    two_ranks("ddp", 1)
    two_ranks("ddp", 2, wrong=1)
    two_ranks("fsdp2", 2)
    assert runs.forked(lambda: runs.run(output, *words, "trainer.strategy=single", "trainer.max_steps=3")) == 0
    records = resumes(output)
    assert [record["step"] for record in records] == [1, 2]
    assert [record["to"]["strategy"] for record in records] == ["fsdp2", "single"]
    assert [record["to"]["ranks"] for record in records] == [2, 1]
    assert all(record["passed"] for record in records)


def test_a_checkpoint_without_values_resumes_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "run"
    start(output, 3, OFF)
    folder = checkpoint(output, 3)
    assert not (folder / FILE).exists()
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["state"]["resumes"]  # as of an earlier version, which wrote no checksum either
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "manifest.sha256").unlink()
    start(output, 4)
    assert "step-00000003 has no log-probs to compare this machine's with" in capsys.readouterr().out
    start(output, 5, OFF)
    assert "log-probs" not in capsys.readouterr().out
    records = resumes(output)
    assert [(record["step"], record["passed"], record["stages"]) for record in records] == [
        (3, None, []),
        (4, None, []),
    ]
    assert [row["difference"] for row in resume_rows(records)] == ["not compared"] * 2


def test_values_of_another_version_are_an_error_that_says_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr(resume_check, "SCHEMA", "hwgrpo.resume_check/9")
        start(tmp_path / "run", 3)
    with pytest.raises(CheckpointError, match=r"resume-check.safetensors has the schema 'hwgrpo.resume_check/9'.*=off"):
        start(tmp_path / "run", 4)
    start(tmp_path / "run", 4, OFF)


def test_values_that_are_not_finite_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    plain = resume_check.score_sample

    def overflowing(*arguments: Any) -> SampleScores:
        scores = plain(*arguments)
        scores.values[LOG_PROBS][0] = -torch.inf
        return scores

    with monkeypatch.context() as patch:
        patch.setattr(resume_check, "score_sample", overflowing)
        start(tmp_path / "run", 3)
    start(tmp_path / "run", 4)
    assert "are not finite, and are not compared" in capsys.readouterr().out
    assert resumes(tmp_path / "run")[0]["passed"] is None
