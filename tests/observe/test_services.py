"""Loggers to services: how each is called, which run and which steps it gets over a resume, and how it is missed.

The packages are stand-ins (`services.py`, which says what they do not prove).
"""

import json
import sys
from typing import Any

import pytest

from hwgrpo.catalog import LOGGERS, SERVICES
from hwgrpo.config import Config
from hwgrpo.config.load import load_config, to_yaml
from hwgrpo.config.schema import ObserveConfig
from hwgrpo.config.validate import check_logger_installed
from hwgrpo.errors import ConfigError, RunError
from hwgrpo.observe.observer import Observer
from hwgrpo.values import StepMetrics
from tests.observe.services import FAKES, Calls, WandbRun

GREEDY = "val-core/task://sort/reward/greedy"


@pytest.fixture(params=SERVICES)
def service(request, monkeypatch) -> tuple[str, Calls]:
    """One service after the other, and the list of calls it gets."""
    calls: Calls = []
    monkeypatch.setitem(sys.modules, request.param, FAKES[request.param](calls))
    return request.param, calls


def an_observer(name: str, run_dir, **observe) -> Observer:
    config = Config(observe=ObserveConfig(loggers=["jsonl", name], progress="none", completions_per_step=0, **observe))
    config.model.path, config.data.train, config.optim.lr = "m", "d", 0.5
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    return Observer(config.observe, run_dir, total_steps=9, is_main=True)


def steps(observer: Observer, *numbers: int) -> None:
    for step in numbers:
        observer.step(StepMetrics(step, {"reward": step / 8}))


def sent(calls: Calls) -> list[int]:
    """Return the steps that were sent, in order."""
    return [c["step"] if c["step"] is not None else c["data"]["training/global_step"] for n, c in calls if n == "log"]


def of(kind: str, calls: Calls) -> list[dict[str, Any]]:
    return [call for name, call in calls if name == kind]


def test_a_run_is_started_once_with_its_settings_and_gets_every_step_and_validation(service, tmp_path):
    name, calls = service
    with an_observer(name, tmp_path / "run") as observer:
        observer.resume_from(0)
        observer.validation(0, {GREEDY: 0.25})
        steps(observer, 1, 2)
        observer.validation(2, {GREEDY: 0.75})
    [init] = of("init", calls)
    assert init["project"] == "hwgrpo"
    assert init["name"].startswith("run")
    assert init["config"]["optim"]["lr"] == 0.5
    assert init["resume"] == "allow"
    assert sent(calls) == [0, 1, 2, 2]
    assert of("log", calls)[2]["data"]["reward"] == 0.25
    assert of("log", calls)[3]["data"][GREEDY] == 0.75
    assert [kind for kind, _ in calls].count("finish") == 1
    assert calls[-1][0] == "finish"


def test_an_open_run_of_wandb_gets_the_metrics_and_stays_open(tmp_path, monkeypatch):
    calls: Calls = []
    module = FAKES["wandb"](calls)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(module, "run", WandbRun(calls))
    with an_observer("wandb", tmp_path / "run") as observer:
        observer.resume_from(0)
        steps(observer, 1, 2)
    assert (of("init", calls), of("finish", calls)) == ([], [])
    [update] = of("config", calls)
    assert update["settings"]["optim"]["lr"] == 0.5
    assert update["allow_val_change"] is True
    assert of("define_metric", calls) == [{"name": "*", "step_metric": "training/global_step"}]
    assert sent(calls) == [1, 2]


def test_names_are_those_of_the_settings(service, tmp_path):
    name, calls = service
    with an_observer(name, tmp_path / "run", project="digits", run_name="first try") as observer:
        observer.resume_from(0)
    [init] = of("init", calls)
    assert init["project"] == "digits"
    assert init["name"].startswith("first try")


def test_a_resumed_run_continues_the_same_run_there_and_its_steps_never_go_back(service, tmp_path):
    name, calls = service
    killed = an_observer(name, tmp_path / "run")
    killed.resume_from(0)
    steps(killed, 1, 2, 3, 4, 5)
    identity = {key: of("init", calls)[0].get(key) for key in ("id", "name", "project")}
    calls.clear()
    with an_observer(name, tmp_path / "run") as observer:
        observer.resume_from(3)
        steps(observer, 4, 5, 6)
    assert {key: of("init", calls)[0].get(key) for key in ("id", "name", "project")} == identity
    assert sent(calls) == [5, 6], "step 5 again: the process may have been killed before its validation"


def test_what_a_service_cannot_take_back_is_said(service, tmp_path, caplog):
    name, _ = service
    killed = an_observer(name, tmp_path / "run")
    killed.resume_from(0)
    steps(killed, 1, 2, 3, 4, 5)
    an_observer(name, tmp_path / "run").resume_from(3)
    assert f"{name} has steps 4 to 5 from before this start and cannot take them back" in caplog.text
    caplog.clear()
    an_observer(name, tmp_path / "run").resume_from(5)
    assert caplog.text == ""


def test_a_run_that_starts_over_is_another_run_there(service, tmp_path):
    name, calls = service
    for _ in range(2):
        observer = an_observer(name, tmp_path / "run")
        observer.resume_from(0)
        steps(observer, 1, 2)
    first, second = of("init", calls)
    assert (first.get("id"), first["name"]) != (second.get("id"), second["name"])
    assert sent(calls) == [1, 2, 1, 2]


def test_two_runs_in_folders_of_one_name_are_two_runs_there(service, tmp_path):
    name, calls = service
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
        an_observer(name, tmp_path / parent / "run").resume_from(0)
    first, second = of("init", calls)
    assert (first.get("id"), first["name"]) != (second.get("id"), second["name"])


@pytest.mark.parametrize(("name", "failed", "fine"), [
    ("wandb", {"exit_code": 1}, {"exit_code": 0}),
    ("swanlab", {"state": "crashed"}, {"state": "success"}),
])  # fmt: skip
def test_a_run_that_fails_is_marked_as_failed_there(name, failed, fine, tmp_path, monkeypatch):
    calls: Calls = []
    monkeypatch.setitem(sys.modules, name, FAKES[name](calls))
    with an_observer(name, tmp_path / "fine") as observer:
        observer.resume_from(0)
    observer = an_observer(name, tmp_path / "failed")
    observer.resume_from(0)
    with pytest.raises(ZeroDivisionError), observer:
        _ = 1 / 0
    assert of("finish", calls) == [fine, failed]


def test_files_that_a_service_writes_lie_in_the_folder_of_the_run(tmp_path, monkeypatch):
    for name, key in (("wandb", "dir"), ("swanlab", "log_dir")):
        calls: Calls = []
        monkeypatch.setitem(sys.modules, name, FAKES[name](calls))
        an_observer(name, tmp_path / name).resume_from(0)
        assert of("init", calls)[0][key].startswith(str(tmp_path / name))
        assert "mode" not in of("init", calls)[0], "WANDB_MODE and SWANLAB_MODE decide"


def test_wandb_draws_over_our_steps_and_uploads_no_terminal(tmp_path, monkeypatch):
    calls: Calls = []
    monkeypatch.setitem(sys.modules, "wandb", FAKES["wandb"](calls))
    an_observer("wandb", tmp_path / "run").resume_from(0)
    assert of("define_metric", calls) == [{"name": "*", "step_metric": "training/global_step"}]
    assert of("init", calls)[0]["settings"] == {"console": "off"}


def test_a_service_that_does_not_start_ends_the_run_with_the_remedy(tmp_path, monkeypatch):
    def refuse(**_):
        raise OSError("No API key configured")

    module = FAKES["wandb"]([])
    vars(module)["init"] = refuse
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(RunError, match=r"logger wandb .*No API key.*`wandb login`, set WANDB_MODE=offline, or take"):
        an_observer("wandb", tmp_path / "run").resume_from(0)
    assert not (tmp_path / "run/wandb.json").exists()


@pytest.mark.parametrize("name", SERVICES)
def test_a_missing_package_is_refused_with_the_settings_and_names_its_extra(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed, whether it is or not
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()  # what wandb leaves in a working directory looks like a package
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf'observe\.loggers.*{name}.*pip install "hwgrpo\[{name}\]"'):
        load_config("tiny_sort", [f"observe.loggers=[jsonl,{name}]"])


def test_a_folder_named_like_a_package_is_not_taken_for_it(monkeypatch, tmp_path):
    (tmp_path / "swanlab").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "swanlab", raising=False)
    with pytest.raises(ConfigError, match="not installed"):
        check_logger_installed("swanlab")


def test_loading_a_logger_imports_no_package_of_a_service(monkeypatch):
    for name in SERVICES:
        monkeypatch.setitem(sys.modules, name, None)  # importing it would raise
        assert LOGGERS.load(name).service == name


def test_what_was_sent_is_recorded_after_every_step(service, tmp_path):
    name, _ = service
    observer = an_observer(name, tmp_path / "run")
    observer.resume_from(0)
    steps(observer, 1, 2)
    state = json.loads((tmp_path / f"run/{name}.json").read_text())
    assert state["last_step"] == 2
    assert not list((tmp_path / "run").glob("*.tmp"))
