"""A profile of a run shows its stages by name."""

import torch

from tests.support.runs.runs import run


def test_a_profile_of_a_run_shows_its_stages(tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run(tmp_path / "run", "trainer.max_steps=1", "trainer.validate_at_start=false")
    seen = {event.name: event for event in profiler.events() if event.is_user_annotation}
    stages = ("step", "gen", "reward", "adv", "old_log_prob", "ref", "update_actor", "sync", "testing")
    assert set(stages) <= seen.keys()
    step = seen["step"].time_range
    for name in stages[1:-1]:
        inner = seen[name].time_range
        assert step.start <= inner.start <= inner.end <= step.end, name
