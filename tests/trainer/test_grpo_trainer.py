"""`hwgrpo.Trainer`: the run of the command, step by step; nothing of it stays in the process."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import hwgrpo_kernels
import numpy as np
import pytest
import torch
from hwgrpo_backends import get
from hwgrpo_backends.device import Device
from transformers.utils import logging

from hwgrpo import Config, Trainer
from hwgrpo.cli import backend_selection
from hwgrpo.cli.main import main
from hwgrpo.errors import DataError, RunError
from hwgrpo.observe.loggers.jsonl import read_metrics
from hwgrpo.sandbox.code_reward import close_pools
from hwgrpo.support.jsonlines import read_lines
from hwgrpo.trainer.process_state import restored_process
from tests.support.runs.dense_reward import share_right
from tests.support.runs.published_rows import write_jsonl
from tests.support.runs.runs import SMALL

MEASURED = ("timing_s/", "perf/")


def settings(output: Path, *more: str, steps: int = 3) -> list[str]:
    own = ("backend.name=cpu", f"trainer.output_dir={output}", f"trainer.max_steps={steps}")
    return [*(each for each in SMALL if "max_steps" not in each), *own, *more]


def trainer_of(output: Path, *more: str, steps: int = 3, **objects) -> Trainer:
    return Trainer("tiny_sort", settings(output, "trainer.validate_at_start=false", *more, steps=steps), **objects)


def without_times(values) -> dict[str, float]:
    return {name: value for name, value in values.items() if not name.startswith(MEASURED)}


def metrics(output: Path) -> list[dict[str, float]]:
    return [without_times(line) for line in read_lines(output / "metrics.jsonl")]


def weights(output: Path) -> bytes:
    return (output / "final" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def commanded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the command."""
    output = tmp_path_factory.mktemp("command") / "run"
    assert main(["train", "tiny_sort", *settings(output)]) == 0
    return output


def test_importing_the_package_and_its_trainer_imports_no_torch():
    code = "import hwgrpo, sys; hwgrpo.Trainer, hwgrpo.Config, hwgrpo.Step; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_two_runs_one_after_the_other_are_each_the_run_of_the_command(commanded: Path, tmp_path: Path):
    for name in ("first", "second"):
        output = tmp_path / name
        with Trainer("tiny_sort", settings(output)) as trainer:
            steps = list(trainer)
            assert trainer.train() == "completed"
        assert metrics(output) == metrics(commanded)
        assert weights(output) == weights(commanded)
        assert [step.step for step in steps] == [1, 2, 3]


def test_a_step_has_what_the_run_logs_of_it(tmp_path: Path):
    trainer = trainer_of(tmp_path, "trainer.save_every=2", "trainer.validate_every=2", "observe.completions_per_step=5")
    steps = list(trainer)
    logged = read_metrics(tmp_path)
    for step in steps:
        assert without_times(step.metrics | (step.validation or {})) == without_times(logged[step.step])
    assert [step.validation is not None for step in steps] == [False, True, True]
    assert [step.saved and step.saved.name for step in steps] == [None, "step-00000002", "step-00000003"]
    lines = [*read_lines(tmp_path / "completions.jsonl")]
    assert len(lines) == 15
    assert all(len(step.completions) == 16 for step in steps), "all of a step, whatever the file has"
    kept = [record for step in steps for record in step.completions]
    assert all(record in kept for record in lines)
    assert {*trainer.validations} == {2, 3}
    assert (trainer.step, trainer.total_steps, trainer.is_open) == (3, 3, False)


def state_of_the_process() -> dict[str, object]:
    registry = hwgrpo_kernels.default_registry
    return {
        "environment": dict(os.environ),
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "kernels": (registry._pins, registry._preference, registry._strict),
        "bars": logging.is_progress_bar_enabled(),
        "verbosity": logging.get_verbosity(),
        "signals": {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)},
        "folder": os.getcwd(),
        "user's modules": {name for name in sys.modules if name.startswith("hwgrpo_user_")},
        "running threads": {thread.name for thread in threading.enumerate()},
        "errors of stdout": sys.stdout.errors,
    }


CHANGING = ("trainer.deterministic=true", "kernels.strict=true", "kernels.pins.row_stats=torch")


@pytest.mark.parametrize("end", ["completed", "break", "error", "a failed start", "a lost trainer"])
def test_the_process_is_as_before_after_a_run(end: str, tmp_path: Path):
    trainer_of(tmp_path / "imports").train()
    torch.set_num_threads(2)
    logging.enable_progress_bar()
    before = state_of_the_process()
    more = ["rollout.max_staleness=1", "algorithm.correction.name=token_truncate"]
    if end == "a failed start":
        more = ["data.max_prompt_tokens=1"]
    trainer = trainer_of(tmp_path / "run", "trainer.threads=1", *more, *CHANGING)
    assert state_of_the_process() == before, "the constructor changes nothing"
    if end == "completed":
        trainer.train()
    elif end == "break":
        for _ in trainer:
            assert torch.get_num_threads() == 1
            break
    elif end == "error":
        with pytest.raises(KeyError, match="no_such"):
            [step.metrics["no_such"] for step in trainer]
    elif end == "a failed start":
        with pytest.raises(DataError, match="longer than data"):
            trainer.train()
    else:
        trainer.evaluate()
        assert trainer.is_open
        del trainer
        gc.collect()
    assert state_of_the_process() == before


def test_the_attention_kernels_that_a_backend_turns_off_are_on_again_after_a_run():
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with restored_process(Device(get("cpu"))):
        torch.backends.cuda.enable_cudnn_sdp(False)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_a_variable_that_the_loop_sets_stays_and_those_of_the_run_do_not(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("DOOR_KEPT", "before")
    monkeypatch.delenv("HWGRPO_ENV_APPLIED", raising=False)
    for _ in trainer_of(tmp_path):
        os.environ["DOOR_KEPT"] = "set in the loop"
        assert os.environ["HWGRPO_ENV_APPLIED"]
    assert os.environ["DOOR_KEPT"] == "set in the loop"
    assert "HWGRPO_ENV_APPLIED" not in os.environ


def test_stop_ends_the_run_with_a_checkpoint_from_which_a_new_trainer_goes_on(commanded: Path, tmp_path: Path):
    output = tmp_path / "run"
    trainer = Trainer("tiny_sort", settings(output))
    for step in trainer:
        if step.step == 2:
            trainer.stop()
    assert trainer.train() == "interrupted"
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-00000002"]
    with pytest.raises(RunError, match=r"closed after step 2; make a new one"):
        trainer.save_checkpoint()
    later = Trainer("tiny_sort", settings(output))
    assert later.train() == "completed"
    assert weights(output) == weights(commanded)
    assert metrics(output) == metrics(commanded)


def test_a_checkpoint_in_the_loop_is_one_to_resume_from(commanded: Path, tmp_path: Path):
    output = tmp_path / "run"
    trainer = Trainer("tiny_sort", settings(output))
    for step in trainer:
        if step.step == 2:
            folder = trainer.save_checkpoint()
            assert folder == trainer.save_checkpoint()
            break
    assert not trainer.is_open
    with pytest.raises(RunError, match="closed after step 2"):
        trainer.train()
    later = Trainer("tiny_sort", settings(output))
    assert [step.step for step in later] == [3]
    assert weights(output) == weights(commanded)


def test_rows_that_a_reward_refuses_are_refused_before_responses_to_them_are_sampled(tmp_path: Path):
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "sort 312:", "ground_truth": "assert f(1) == 2"}])
    reward = 'reward.functions=[{"name": "code", "kwargs": {"workers": 1}}]'
    trainer = trainer_of(tmp_path / "run", reward, f"data.train={rows}", f"data.validation={rows}")
    with pytest.raises(DataError, match=r"f\(1\) == 2 is a comparison that nothing reads"):
        trainer.evaluate([{"prompt": "sort 312:", "ground_truth": "f(1) == 2"}])
    trainer.close()
    close_pools()


def test_evaluations_change_nothing_of_the_training_and_work_before_between_and_after(commanded: Path, tmp_path: Path):
    output = tmp_path / "run"
    trainer = Trainer("tiny_sort", settings(output))
    found = [trainer.evaluate()]
    rows = [{"prompt": "sort 312:", "ground_truth": "123"}]
    for _ in trainer:
        assert "val-core/evaluation/reward/greedy" in trainer.evaluate(rows)
        found.append(trainer.evaluate())
    found.append(trainer.evaluate())
    names = [name for name in found[0] if name.startswith("val-")]
    logged = read_metrics(output)
    assert found[0] == {name: logged[0][name] for name in names}
    assert found[0] != found[3] == found[4] == {name: logged[3][name] for name in names}
    assert metrics(output) == metrics(commanded)
    assert weights(output) == weights(commanded)


@pytest.mark.parametrize(
    "more",
    [
        ("rollout.max_staleness=1", "algorithm.correction.name=token_truncate"),
        ("model.lora.rank=2", "model.lora.dropout=0.1"),
    ],
)
def test_evaluations_change_nothing_where_responses_are_prefetched_or_layers_drop(
    more: tuple[str, ...], tmp_path: Path
):
    for name in ("plain", "evaluated"):
        trainer = trainer_of(tmp_path / name, *more)
        for _ in trainer:
            if name == "evaluated":
                trainer.evaluate()
    assert metrics(tmp_path / "plain") == metrics(tmp_path / "evaluated")
    assert weights(tmp_path / "plain") == weights(tmp_path / "evaluated")


def test_variables_that_come_too_late_are_named_once(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(backend_selection, "_reported", set())
    monkeypatch.delenv("HWGRPO_ENV_APPLIED", raising=False)
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    for expected in (1, 0):
        trainer_of(tmp_path)
        assert capsys.readouterr().err.count("may ignore ONEDNN_PRIMITIVE_CACHE_CAPACITY") == expected


def test_the_iterator_continues_where_it_was_left_and_train_takes_the_rest(commanded: Path, tmp_path: Path):
    trainer = Trainer("tiny_sort", settings(tmp_path))
    steps = iter(trainer)
    assert next(steps).step == 1
    assert next(iter(trainer)).step == 2
    assert trainer.train() == "completed"
    assert [*steps] == []
    assert weights(tmp_path) == weights(commanded)


def test_one_run_is_open_at_a_time(tmp_path: Path):
    with trainer_of(tmp_path / "first") as first:
        steps = iter(first)
        next(steps)
        with pytest.raises(RunError, match=r"first is open in this process; call its close\(\) first"):
            trainer_of(tmp_path / "second").train()
    assert trainer_of(tmp_path / "second").train() == "completed"


def test_a_run_that_is_not_iterated_makes_way_for_the_next(tmp_path: Path):
    first = trainer_of(tmp_path / "first")
    assert first.total_steps > 0
    assert trainer_of(tmp_path / "second").train() == "completed"
    assert not first.is_open


def test_a_finished_run_yields_no_step_and_says_so(commanded: Path, capsys):
    trainer = Trainer("tiny_sort", settings(commanded))
    assert [*trainer] == []
    assert "is finished: 3 of 3 steps are done" in capsys.readouterr().out
    assert trainer.train() == "completed"
    with pytest.raises(RunError, match="is finished"):
        trainer.evaluate()


def test_the_model_is_written_as_the_command_writes_it(commanded: Path, tmp_path: Path):
    trainer = Trainer("tiny_sort", settings(tmp_path / "run"))
    trainer.train()
    folder = trainer.save_model(tmp_path / "saved")
    assert (folder / "model.safetensors").read_bytes() == weights(commanded)
    assert trainer.tokenizer.eos_token_id is not None
    assert sum(p.numel() for p in trainer.model.parameters()) > 0


def test_with_lora_the_model_is_a_peft_model_and_is_saved_merged(tmp_path: Path):
    trainer = trainer_of(tmp_path / "run", "model.lora.rank=2", steps=1)
    trainer.train()
    assert type(trainer.model).__name__.startswith("PeftModel")
    assert (trainer.save_model(tmp_path / "saved") / "model.safetensors").read_bytes() == weights(tmp_path / "run")


@pytest.mark.parametrize("form", ["config", "mapping", "dotted", "file"])
def test_settings_in_every_form_are_the_same_run(form: str, commanded: Path, tmp_path: Path):
    output = tmp_path / "run"
    config = Config.load("tiny_sort", settings(output))
    if form == "config":
        config = Config.load("tiny_sort", settings(output, steps=7))
        config.trainer.max_steps = 3
        given = config
    elif form == "mapping":
        from hwgrpo.trainer.given_settings import given_tree

        given = given_tree(config)
    elif form == "dotted":
        dotted = [each.partition("=") for each in SMALL if not each.startswith("reward")]
        given = {key: _value(text) for key, _, text in dotted} | {
            "reward": {"functions": [config.reward.functions[0].name]},
            "algorithm.kl.coef": 0.25,
            "optim.schedule": "linear",
            "backend.name": "cpu",
            "trainer.output_dir": output,
            "trainer.max_steps": 3,
        }
    else:
        given = tmp_path / "recipe.yaml"
        from hwgrpo.config.load import to_yaml

        given.write_text(to_yaml(config))
    trainer = Trainer(given)
    trainer.train()
    assert metrics(output) == metrics(commanded)
    if form == "config":
        assert trainer.config is not config


def _value(text: str):
    import yaml

    return yaml.safe_load(text) if "e-" not in text else float(text)


def test_a_reward_file_that_has_changed_is_read_again_by_the_next_run(tmp_path: Path):
    file = tmp_path / "own.py"
    means = []
    for value in (1.0, 3.0):
        file.write_text(f"def own(completions, **_):\n    return [{value}] * len(completions)\n")
        trainer = trainer_of(tmp_path / str(value), f"reward.functions=['{file}:own']", steps=1)
        means += [step.metrics["rewards/own/mean"] for step in trainer]
    assert means == [1.0, 3.0]


def test_a_reward_given_as_an_object_is_the_one_in_a_file(commanded: Path, tmp_path: Path):
    trainer_of(tmp_path, "trainer.validate_at_start=true", rewards=share_right).train()
    assert metrics(tmp_path) == metrics(commanded)
    assert weights(tmp_path) == weights(commanded)


def test_a_connection_that_fails_between_steps_is_a_lost_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def closed(*_) -> None:
        raise RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer")

    with trainer_of(tmp_path, steps=2) as trainer:
        steps = iter(trainer)
        next(steps)
        strategy = trainer._opened().strategy
        collectives = {
            "gather_objects": trainer.save_checkpoint,
            "barrier": lambda: trainer.save_model(tmp_path / "model"),
            "sum": lambda: next(steps),
        }
        with monkeypatch.context() as patch:
            patch.setattr("hwgrpo.training.evaluate.validate", closed)
            with pytest.raises(RunError, match="the connection to another rank failed"):
                trainer.evaluate()
        for name, call in collectives.items():
            with monkeypatch.context() as patch:
                patch.setattr(strategy, name, closed)
                with pytest.raises(RunError, match="the connection to another rank failed"):
                    call()
