"""vLLM in the training process sleeps while the policy is trained: whole runs with a double that counts bytes."""

import json
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device
from hwgrpo_backends.device import Memory as DeviceMemory

from hwgrpo.errors import ConfigError
from hwgrpo.rollout.vllm.engine import VllmEngine
from hwgrpo.training.finish import finish
from hwgrpo.training.loop import train
from hwgrpo.training.setup import build_run
from tests.rollout.served import SAMPLING, batch, parts_for
from tests.support.models.tiny import settings
from tests.support.processes import ranks
from tests.support.runs import runs
from tests.support.servers.vllm_double import Llm, Memory, installed

STEPS = 2
RUN = (
    "model.path=builtin://tiny?task=sort&hidden=64&layers=2&head=32&steps=30&batch=32&digits=3",
    "rollout.engine=vllm",
    "rollout.sleep_mode=always",
    "rollout.probe_every=0",
    f"trainer.max_steps={STEPS}",
    "trainer.validate_every=1",
)
LORA = ("model.lora.rank=4", "optim.lr=1e-2")


def recorded(file: Path, memory: Memory, body: Callable[[], Any]) -> None:
    """Run `body` with the double, and write what happened to a file."""
    with installed(memory):
        try:
            body()
        finally:
            file.write_text(json.dumps({"events": memory.events, "host": memory.host}))


def events_of(file: Path) -> list[tuple[str, int]]:
    return [tuple(event) for event in json.loads(file.read_text())["events"]]


def run(folder: Path, *words: str, states: float = 2.0, steps: int = STEPS) -> tuple[int, list[tuple[str, int]]]:
    """Return the exit code of a run in a child, and its events."""
    folder.mkdir(exist_ok=True)
    file = folder / "events.json"
    settings = (*RUN, f"trainer.max_steps={steps}", *words)
    code = runs.forked(lambda: recorded(file, Memory(states), lambda: runs.run(folder / "run", *settings)))
    return code, events_of(file)


def expected(level: int, steps: int = STEPS, first: int = 0) -> list[str]:
    """Return the events of a run that validates after every step, and before the first."""
    load = ["load"] if level == 2 else []

    def woken(version: int) -> list[str]:
        return ["wake weights", *load, "wake kv_cache", "reset", f"version {version}"]

    validation = ["generate", "generate"]  # greedy, and sampled
    events = ["start", f"sleep {level}", *woken(0), *load, "reset", f"version {first}", *([] if first else validation)]
    for step in range(first + 1, steps + 1):
        events += ["generate", f"sleep {level}", "update", *woken(step), *validation]
    return [*events, "shutdown"]


def assert_slept(events: list[tuple[str, int]], level: int, **run: int) -> None:
    assert [name for name, _ in events] == expected(level, **run)
    assert {held for name, held in events if name.startswith(("sleep", "update"))} == {0}
    weights = next(held for name, held in events if name == "wake weights")
    assert {held for name, held in events if name in ("generate", "wake kv_cache")} == {3 * weights}


@pytest.mark.parametrize(("words", "level", "states"), [((), 2, 2.0), (LORA, 1, 0.5)], ids=["full", "adapter"])
def test_one_process_frees_weights_and_cache_while_it_trains(tmp_path: Path, words, level, states):
    code, events = run(tmp_path, *words, states=states)
    assert code == 0
    assert_slept(events, level)
    assert runs.metrics(tmp_path / "run")[-1]["step"] == STEPS


@pytest.mark.parametrize(("strategy", "words", "level"), [("fsdp2", (), 2), ("ddp", LORA, 1)])
def test_every_rank_frees_weights_and_cache_while_it_trains(tmp_path: Path, strategy: str, words, level):
    def body(rank: int) -> None:
        def whole() -> None:
            settings = runs.small(tmp_path / "run", *RUN, f"trainer.strategy={strategy}", *words)
            parts = build_run(settings, BACKEND, rank, 2)
            try:
                finish(parts, train(parts))
            finally:
                parts.close()

        recorded(tmp_path / f"{rank}.json", Memory(states=2.0), whole)

    assert ranks.forked(2, body) == [0, 0]
    for rank in range(2):
        assert_slept(events_of(tmp_path / f"{rank}.json"), level)


@pytest.mark.parametrize("words", [(), LORA], ids=["full", "adapter"])
def test_an_engine_that_sleeps_trains_the_same_policy(tmp_path: Path, words):
    assert run(tmp_path / "sleeps", *words)[0] == 0
    code, events = run(tmp_path / "never", *words, "rollout.sleep_mode=never", states=math.inf)
    assert code == 0
    assert not any(name.startswith(("sleep", "wake")) for name, _ in events)
    assert runs.everything(tmp_path / "sleeps/run") == runs.everything(tmp_path / "never/run")


@pytest.mark.parametrize("words", [(), LORA], ids=["full", "adapter"])
def test_an_engine_that_has_slept_is_probed_when_it_is_awake_with_its_weights(
    tmp_path: Path, words, monkeypatch, capfd
):
    code, events = run(tmp_path / "right", *words, "rollout.probe_every=1")
    assert code == 0
    names = [name for name, _ in events]
    scored = 8 if words else 4  # at first the base model alone, too
    assert names.count("probe") == scored + 4 * STEPS
    probed = [line.get("rollout/probe_logprob_diff", 0.0) for line in runs.metrics(tmp_path / "right/run")]
    assert 0.0 < max(probed) < 1e-5

    wake = Llm.wake_up

    def forgetful(self: Llm, tags: list[str] | None = None) -> bool:
        result = wake(self, tags)
        if tags == ["kv_cache"]:  # the weights are there
            self.model.lm_head.weight.data.mul_(1.01)
        return result

    monkeypatch.setattr(Llm, "wake_up", forgetful)
    assert run(tmp_path / "wrong", *words, "rollout.probe_every=1")[0] != 0
    told = "base model of version 0" if words else "weights of version 1"  # of version 0 all weights are sent twice
    assert f"does not sample with the policy's {told}" in capfd.readouterr().err


def test_an_engine_that_does_not_sleep_leaves_no_room_for_the_update(tmp_path: Path, capfd):
    code, events = run(tmp_path, "rollout.sleep_mode=never")
    assert code != 0
    assert "update" not in [name for name, _ in events]
    assert "out of memory" in capfd.readouterr().err


def test_a_resumed_run_sleeps_alike_and_ends_alike(tmp_path: Path):
    assert run(tmp_path / "whole", steps=3)[0] == 0
    assert run(tmp_path / "parts")[0] == 0
    code, events = run(tmp_path / "parts", steps=3)
    assert code == 0
    assert_slept(events, 2, first=2, steps=3)
    whole, parts = (runs.everything(tmp_path / name / "run") for name in ("whole", "parts"))
    assert whole["weights"] == parts["weights"]


def test_an_interrupted_run_ends_with_an_engine_that_is_awake(tmp_path: Path, monkeypatch):
    slept = Memory.note

    def interrupting(self: Memory, event: str) -> None:
        slept(self, event)
        if event == "update":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Memory, "note", interrupting)
    code, events = run(tmp_path, steps=5)
    assert code == 0
    assert_slept(events, 2, steps=1)
    assert any((tmp_path / "run/checkpoints").iterdir())


@pytest.mark.parametrize(("kept", "sleeps"), [(0, True), (0.4, True), (0.6, False)])
def test_an_engine_whose_first_sleep_frees_less_than_half_stays_awake(tmp_path: Path, monkeypatch, kept, sleeps):
    memory = Memory(math.inf)

    def free(device: Device) -> DeviceMemory:
        held = max(memory.resident, int(kept * sum(memory.sizes.values())))
        return DeviceMemory(free=10**9 - held, total=10**9)

    monkeypatch.setattr(Device, "memory", free)

    def body() -> None:
        with installed(memory):
            parts = parts_for(None, tmp_path)
            parts.model.save_pretrained(tmp_path / "model")
            engine = VllmEngine(replace(parts, config=settings(*RUN[1:3], f"model.path={tmp_path / 'model'}")))
            engine.sleep()
            assert engine.health() == (not sleeps)
            assert any(("stays awake" in note) == (not sleeps) for note in engine.notes), engine.notes
            engine.update_weights(1)
            assert engine.generate(batch("ab"), SAMPLING).weight_version == 1
            engine.close()

    assert runs.forked(body) == 0


def test_prefetched_responses_need_an_engine_that_stays_awake(tmp_path: Path):
    stale = ("rollout.max_staleness=1", "algorithm.correction.name=token_truncate")
    code, events = run(tmp_path, *stale, "rollout.sleep_mode=auto", states=math.inf)
    assert code == 0
    assert not any(name.startswith("sleep") for name, _ in events)
    with pytest.raises(ConfigError, match=r"rollout\.sleep_mode='always' with rollout\.max_staleness=1"):
        runs.small(tmp_path, *RUN, *stale)
