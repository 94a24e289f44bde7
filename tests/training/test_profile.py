"""Profiles of a run: its stages by name, and the steps of `trainer.profile_steps` as files."""

import gzip
import json

import pytest
import torch
from hwgrpo_backends.device import Device

from hwgrpo.bench.step import repeatable_step
from hwgrpo.errors import ConfigError, RunError
from hwgrpo.training.setup import build_run
from hwgrpo.training.stages.profile import StepProfile
from hwgrpo.training.stages.stage import StepState
from hwgrpo.training.update.policy_update import PolicyUpdate
from tests.support.runs import runs
from tests.support.runs.runs import run

STAGES = ("gen", "reward", "adv", "old_log_prob", "ref", "update_actor", "sync")
SHORT = ("trainer.max_steps=3", "trainer.validate_at_start=false", "trainer.save_every=0", "data.validation_max_rows=1")


def test_a_profile_of_a_run_shows_its_stages(tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run(tmp_path / "run", "trainer.max_steps=1", "trainer.validate_at_start=false")
    seen = {event.name: event for event in profiler.events() or () if event.is_user_annotation}
    assert {"step", *STAGES, "testing"} <= seen.keys()
    step = seen["step"].time_range
    for name in STAGES:
        inner = seen[name].time_range
        assert step.start <= inner.start <= inner.end <= step.end, name


def test_a_profiled_step_has_a_trace_of_its_stages_and_a_table_of_its_kernels_and_the_others_none(tmp_path, capsys):
    run(tmp_path / "run", *SHORT, "trainer.profile_steps=[2,9]", "observe.progress=plain")
    printed = capsys.readouterr().out
    assert "trainer.profile_steps has [9], after the run's last step 3" in printed
    [folder] = (tmp_path / "run" / "profiles").iterdir()
    assert folder.name == "step_00002"
    assert f"profiled step 2: {folder}" in printed
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    ranges = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert [ranges.count(name) for name in STAGES] == [1] * len(STAGES)  # of one step, and of all of it
    assert "testing" not in ranges
    table = (folder / "kernels.txt").read_text().splitlines()
    assert table[0].split() == ["ms", "share", "calls", "kernel"]
    assert any(line.endswith(("aten::addmm", "aten::mm")) for line in table)


def test_a_profile_changes_no_number_of_a_run(tmp_path):
    for name, setting in (("with", "trainer.profile_steps=[1,2,3]"), ("without", "trainer.profile_steps=[]")):
        run(tmp_path / name, *SHORT, setting)
    numbers = [
        [{key: value for key, value in line.items() if not key.startswith(("timing", "perf"))} for line in lines]
        for lines in (runs.metrics(tmp_path / "with"), runs.metrics(tmp_path / "without"))
    ]
    assert numbers[0] == numbers[1]
    assert len(list((tmp_path / "with" / "profiles").iterdir())) == 3
    assert not (tmp_path / "without" / "profiles").exists()


def stages_of(stages):
    return [type(stage).__name__ for slot in vars(stages).values() for stage in slot.stages]


def test_rank_0_alone_is_profiled(tmp_path):
    states = [StepState(2), StepState(3)]
    for rank, expected in ((1, []), (0, ["step_00003"])):
        profile = StepProfile([3], tmp_path, Device(runs.BACKEND), rank)
        for state in states:
            profile.begin(state)
            torch.ones(2)
            profile.end(state)
        assert [folder.name for folder in (tmp_path / "profiles").glob("*")] == expected


def test_the_profile_is_around_all_stages_but_metrics_and_a_run_without_has_no_stage_of_it(tmp_path):
    names = {}
    for setting in ("[2]", "[]"):
        built = build_run(runs.small(tmp_path / setting, f"trainer.profile_steps={setting}"), runs.BACKEND, 0, 1)
        try:
            names[setting], names[f"bench {setting}"] = map(
                stages_of, (built.stages, repeatable_step(built, built.watch))
            )
        finally:
            built.close()
    profiled = names["[2]"]
    assert names["bench [2]"] == names["bench []"]  # rounds of a measurement are all of step 1
    assert profiled[0] == "BeginProfile"
    assert profiled[profiled.index("EndProfile") - 1] == "SendWeights"
    assert names["[]"] == [name for name in profiled if not name.endswith("Profile")]


def test_a_full_disk_costs_the_profile_and_not_the_run(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profiles").write_text("no folder")
    assert run(tmp_path / "run", *SHORT, "trainer.profile_steps=[1]", "observe.progress=plain") == "completed"
    assert "warning: the profile of step 1 could not be written: " in capsys.readouterr().out


def test_a_step_that_fails_leaves_no_profiler_running(tmp_path, monkeypatch):
    def fail(self: PolicyUpdate, batch):
        raise RunError("no more")

    monkeypatch.setattr(PolicyUpdate, "__call__", fail)
    with pytest.raises(RunError, match="no more"):
        run(tmp_path / "run", *SHORT, "trainer.profile_steps=[1]")
    assert not torch.autograd._profiler_enabled()
    assert not (tmp_path / "run" / "profiles").exists()


def test_a_step_below_1_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.profile_steps"):
        runs.small(tmp_path / "run", "trainer.profile_steps=[0]")
