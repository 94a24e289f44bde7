"""Captured steps: what a run writes, and that its numbers stay as they are."""

import errno
import hashlib
import json
from pathlib import Path

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device
from safetensors.torch import load_file

from hwgrpo.errors import ConfigError, RunError
from hwgrpo.training.captured_step import ENTRIES, StepWriter, entry_places
from hwgrpo.training.stages import capture as capture_stages
from hwgrpo.training.startup_checks import missing_requirements
from hwgrpo.training.update.policy_update import PolicyUpdate
from tests.support.processes import ranks
from tests.support.runs import runs
from tests.support.runs.captures import SHORT, TWO_UPDATES, capture, replay

KEYED_REWARD = """
def by_key(data_source, solution_str, ground_truth, extra_info=None, api_key=None, url=None, hub=None, run=None):
    return float(len(solution_str))
"""
URL = "reward.functions.0.kwargs.url=x"


def test_the_numbers_of_a_run_are_the_same_with_and_without_captures(captures_with_weights: Path, tmp_path: Path):
    assert runs.run(tmp_path / "plain", *SHORT, *TWO_UPDATES) == "completed"
    plain, captured = runs.everything(tmp_path / "plain"), runs.everything(captures_with_weights.parent)
    assert len(plain["metrics"]) > 2
    assert captured == plain


def test_a_step_is_in_its_folder_with_checksums_of_all_its_files(captures_with_weights: Path):
    assert [each.name for each in sorted(captures_with_weights.iterdir())] == ["step_00001", "step_00003"]
    folder = captures_with_weights / "step_00003"
    lines = [line.split("  ") for line in (folder / "SHA256SUMS").read_text().splitlines()]
    assert {name for _, name in lines} == {each.name for each in folder.iterdir()} - {"SHA256SUMS"}
    assert {"weights-rank0.safetensors", "moments-rank0.safetensors"} < {name for _, name in lines}
    for digest, name in lines:
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


def test_a_step_has_its_values_and_no_place_of_the_run(captures: Path):
    folder = captures / "step_00003"
    facts, tensors = json.loads((folder / "step.json").read_text()), load_file(folder / "step.safetensors")
    assert (facts["schema"], facts["step"], facts["weight_version"]) == ("hwgrpo.step/1", 3, 2)
    assert str(captures.parent) not in (folder / "step.json").read_text()
    responses = 16
    assert len(tensors["advantages"]) == len(tensors["rewards.total"]) == len(tensors["trained"]) == responses
    tokens = int(tensors["completions.offsets"][-1])
    for name in ("batch.old_logprobs", "batch.ref_logprobs", "completions.logprobs", "update.logprobs"):
        assert len(tensors[name]) == tokens
    assert len(facts["prompts"]) == 4
    trained = [each for each in facts["parameters"] if each["trained"]]
    assert len(tensors["gradient_norms"]) == len(trained) > 5
    assert len(tensors["gradients"]) == len(tensors["weights.after"]) <= ENTRIES * len(trained)


@pytest.mark.parametrize("count", [0, 1, 64, 65, 255, 256, 1024, 1_000_003])
def test_entries_are_spread_over_a_tensor(count: int):
    places = entry_places(count).tolist()
    assert places == sorted({*places})
    assert len(places) == min(count, ENTRIES)
    gaps = [b - a for a, b in zip([0, *places], [*places, count], strict=True)]
    assert max(gaps) < 3 * max(count / ENTRIES, 1)


def test_a_full_disk_costs_the_capture_and_not_the_run(tmp_path: Path, capsys, monkeypatch):
    def full(self: StepWriter, *args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(StepWriter, "add_tensors", full)
    output = tmp_path / "run"
    folder = capture(output, "observe.progress=plain")
    assert (
        "warning: step 3 could not be captured: No space left on device; the run continues" in capsys.readouterr().out
    )
    assert not any(folder.iterdir())
    assert len([line for line in runs.metrics(output) if "actor/grad_norm" in line]) == 3


def test_no_memory_for_the_gradients_costs_the_capture_and_not_the_run(tmp_path: Path, capsys, monkeypatch):
    def full(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(capture_stages, "total_norm", full)
    output = tmp_path / "run"
    folder = capture(output, "observe.progress=plain")
    assert "warning: step 3 could not be captured: out of memory; the run continues" in capsys.readouterr().out
    assert not any(folder.iterdir())
    assert len([line for line in runs.metrics(output) if "actor/grad_norm" in line]) == 3


def test_an_update_that_ends_the_run_leaves_no_partial_capture(tmp_path: Path, monkeypatch):
    def failing(self: PolicyUpdate, *args: object) -> None:
        raise RunError("the gradient is not finite")

    monkeypatch.setattr(PolicyUpdate, "_update", failing)
    with pytest.raises(RunError):
        capture(tmp_path / "run")
    assert [*(tmp_path / "run" / "captures").iterdir()] == []


def test_secrets_are_left_out(tmp_path: Path, capsys, monkeypatch):
    (tmp_path / "keyed.py").write_text(KEYED_REWARD)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    kwargs = {
        "api_key": "sk-abcdef0123456789",
        "url": "https://user:hunter22@example.org/v1",
        "hub": "hf_abcDEF0123456789",
        "run": "0123456789abcdef0123456789abcdef01234567",
    }
    reward = {"name": f"{tmp_path}/keyed.py:by_key", "kwargs": kwargs}
    folder = capture(tmp_path / "run", f"reward.functions=[{json.dumps(reward)}]")
    text = (folder / "step_00001" / "step.json").read_text()
    assert "keyed.py:by_key" in text
    assert "https://***@example.org/v1" in text
    assert [secret for secret in ("sk-abcdef", "hunter22", "hf_abc", "0123456789abcdef") if secret in text] == []
    capsys.readouterr()
    note = replay(capsys, folder / "step_00001")["notes"][0]
    assert "is not recomputed: reward.functions.0.kwargs." in note
    given = [f"reward.functions.0.kwargs.{name}=x" for name in ("api_key", "hub", "run")]
    note = replay(capsys, folder / "step_00001", *given)["notes"][0]
    assert "reward.functions.0.kwargs.url: a part of its value is a secret" in note
    assert "rewards" in [stage["name"] for stage in replay(capsys, folder / "step_00001", *given, URL)["stages"]]


@pytest.mark.parametrize("setting", ["trainer.strategy=fsdp2", "trainer.sequence_parallel_size=2"])
def test_ranks_with_shares_of_weights_or_sequences_are_refused_at_the_start(setting: str, tmp_path: Path):
    config = runs.small(tmp_path / "run", "trainer.capture_steps=[1]", "trainer.strategy=ddp", setting)
    problems = missing_requirements(config, Device(BACKEND, 0))
    assert any("trainer.capture_steps=[1]" in each and "leave capture_steps out" in each for each in problems), problems


def test_the_step_of_two_ranks_is_replayed_in_one_process(tmp_path: Path, capsys):
    words = ("trainer.strategy=ddp", "trainer.capture_weights=true", *TWO_UPDATES)
    assert ranks.forked(2, lambda rank: capture(tmp_path / "run", *words)) == [0, 0]
    step = tmp_path / "run" / "captures" / "step_00003"
    facts, tensors = json.loads((step / "step.json").read_text()), load_file(step / "step.safetensors")
    assert (facts["machine"]["ranks"], len(facts["prompts"]), len(tensors["advantages"])) == (2, 4, 16)
    assert tensors["update.sequences"].tolist() == [*range(4), *range(8, 12)], "a prompt of each rank"
    report = replay(capsys, step)
    assert report["passed"], report
    by_name = {stage["name"]: stage for stage in report["stages"]}
    assert [name for name in ("texts", "rewards", "advantages", "batch") if by_name[name]["error"]] == []
    assert replay(capsys, step, "optim.lr=1.01e-3")["first_difference"] == "updated weights"
    assert replay(capsys, step, "algorithm.kl.coef=0.101")["first_difference"] == "loss"


def test_a_rank_that_cannot_keep_its_values_costs_the_capture_and_not_the_run(tmp_path: Path):
    def body(rank: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(capture_stages.RankShare, "of", lambda *args: torch.zeros(2) @ torch.zeros(3))
            capture(tmp_path / "run", "trainer.strategy=ddp")

    assert ranks.forked(2, body) == [0, 0]
    assert [*(tmp_path / "run" / "captures").iterdir()] == []
    assert len([line for line in runs.metrics(tmp_path / "run") if "actor/grad_norm" in line]) == 3


def test_steps_after_the_last_one_are_noted(tmp_path: Path, capsys):
    runs.run(tmp_path / "run", *SHORT, "trainer.capture_steps=[2,9]", "observe.progress=plain")
    assert "trainer.capture_steps has [9], after the run's last step 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "message"),
    [("trainer.capture_steps=[0]", "trainer.capture_steps"), ("trainer.capture_weights=true", "has no effect")],
)
def test_settings_without_sense_are_refused(setting: str, message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        runs.small(tmp_path / "run", setting)
