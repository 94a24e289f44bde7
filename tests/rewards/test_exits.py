"""A reward's own file or call that ends the program, by whichever exception, never passes for the run's end."""

import os
import re
import signal

import pytest

from hwgrpo.cli.main import main
from hwgrpo.errors import ConfigError
from tests.support.runs import runs

ENDS = {
    "sys.exit(0)": r"SystemExit: 0 at .*my_rewards.py:\d+",
    "sys.exit()": r"SystemExit at .*my_rewards.py:\d+",
    "raise KeyboardInterrupt": r"KeyboardInterrupt at .*my_rewards.py:\d+",
    "raise asyncio.CancelledError": r"CancelledError at .*my_rewards.py:\d+",
    "raise GeneratorExit('odd')": r"GeneratorExit: odd at .*my_rewards.py:\d+",
}
WHERE = pytest.mark.parametrize(
    ("end", "settings"), [*((end, {}) for end in ENDS), ("sys.exit(0)", {"timeout": 120.0})]
)
"""All of them in the trainer; one start of a process shows that it goes the same way there."""


@WHERE
def test_a_file_that_ends_the_program_when_it_is_run_is_a_wrong_setting(end, settings, pipeline):
    with pytest.raises(ConfigError, match=rf"my_rewards.py:f': running the file failed: {ENDS[end]}"):
        pipeline(f"import asyncio, sys\n{end}\ndef f(solution_str): return 1", **settings)


@WHERE
@pytest.mark.parametrize("form", ["def f(solution_str)", "async def f(solution_str)", "def f(completions)"])
def test_a_call_that_ends_the_program_costs_what_the_policy_says(form, end, settings, pipeline, make_batch):
    rewards = pipeline(f"import asyncio, sys\n{form}:\n    {end}", on_error="mask_sample", **settings)
    scored = rewards.score(*make_batch([["a", "b"]]))
    assert scored.failures == {"errors/f": 2}
    assert re.search(f"raised {ENDS[end]}", scored.first_failures["errors/f"])


@pytest.mark.parametrize("call", ["def f(solution_str): time.sleep(60)", "async def f(solution_str): await sleep(60)"])
def test_ctrl_c_in_a_call_is_no_failure_of_the_function(call, pipeline, make_batch):
    rewards = pipeline(f"import time\nfrom asyncio import sleep\n{call}", on_error="mask_sample")

    def interrupt(*_):
        os.kill(os.getpid(), signal.SIGINT)

    previous = signal.signal(signal.SIGALRM, interrupt), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            rewards.score(*make_batch([["a"]]))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip((signal.SIGALRM, signal.SIGINT), previous, strict=True):
            signal.signal(number, handler)


def test_training_with_a_reward_file_that_exits_with_success_fails(reward_file, tmp_path, capsys):
    path = reward_file("import sys\nsys.exit(0)\ndef f(solution_str): return 1")
    small = [word for word in runs.SMALL if not word.startswith("reward.")]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{}\n")
    words = [*small, f"reward.functions=['{path}:f']", f"trainer.output_dir={tmp_path}/run"]
    assert main(["train", str(recipe), *words, "--dry-run"]) == 2
    assert "SystemExit: 0" in capsys.readouterr().err
    assert main(["train", str(recipe), *words]) == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("code", ["0", "None", "'bye'", "3"])
def test_code_from_elsewhere_that_exits_inside_a_command_is_an_error(code, tmp_path, monkeypatch, capsys):
    """As a model's own code, a plug-in, or a library may do."""
    plugin = {}
    source = f"import sys\ndef leave(*args, **kwargs): sys.exit({code})\n"
    exec(compile(source, f"{tmp_path}/odd_plugin.py", "exec"), plugin)
    monkeypatch.setattr("hwgrpo.config.load_config", plugin["leave"])
    assert main(["train", "tiny_sort"]) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path}/odd_plugin.py:2" in said
    assert "sys.exit" in said
