"""The engine on a server: what it sends, what it accepts, and how it gets over a server that fails. The server is fake;
tests/vllm has the real one."""

import os
import shutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hwgrpo_backends import environment, registry
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device, Memory

from hwgrpo.errors import ConfigError, RunError
from hwgrpo.rollout.pause_gate import Gate, Stopped
from hwgrpo.rollout.policy_weights import ModuleWeights
from hwgrpo.rollout.server import engine as server_engine
from hwgrpo.rollout.server import rollout_server, server_connection
from hwgrpo.rollout.server.engine import ServerEngine
from hwgrpo.rollout.server.server_api import command_line
from hwgrpo.rollout.server.server_owner import Owner
from hwgrpo.rollout.server.server_process import ServerProcess
from hwgrpo.rollout.server.sglang import SglangServer
from hwgrpo.rollout.server.vllm import VllmServer, check_running, vllm_server
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import TOKEN_VARIABLE
from hwgrpo.support import waits
from hwgrpo.values import Sampling
from tests.rollout.served import SAMPLING, TOKENIZER, batch, parts_for
from tests.support.servers.fake_server import TOKEN, FakeServer, come_back


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("THE_TOKEN", TOKEN)
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture
def make(server, tmp_path):
    engines = []

    def make(*overrides: str) -> ServerEngine:
        engines.append(vllm_server(parts_for(server.url, tmp_path, *overrides)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_samples_come_back_in_order_with_their_logprobs_and_version(make):
    engine = make()
    engine.update_weights(7)
    found = engine.generate(batch("ab", "c"), SAMPLING)
    assert found.tokens.tolist() == [5, 6, 7] * 2
    assert found.offsets.tolist() == [0, 1, 3, 4, 6]
    assert found.logprobs.tolist() == [-0.5, -0.5, -1.5] * 2
    assert found.prompt_index.tolist() == [0, 0, 1, 1]
    assert found.weight_version == 7


def test_every_prompt_is_asked_for_once_with_its_own_seed_and_the_settings_of_sampling(make, server):
    engine = make()
    sampling = Sampling(n=3, max_response_tokens=4, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, stop=("x",))
    engine.generate(batch("ab", "c"), sampling)
    first, second = sorted(server.asked, key=lambda asked: -len(asked["prompt"]))
    assert first["prompt"] == TOKENIZER("ab").input_ids
    assert first["seed"] != second["seed"]
    wanted = {"n": 3, "max_tokens": 4, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "stop": ["x"]}
    assert wanted.items() <= first.items()
    assert TOKENIZER.eos_token_id in first["stop_token_ids"]
    assert first["model"] == "fake"


def test_prompts_with_settings_of_their_own_are_asked_for_at_once(make, server):
    engine = make()
    samplings = [Sampling(n=2, max_response_tokens=2, stop=("x",)), Sampling(n=1, max_response_tokens=1)]
    found = engine.generate_each(batch("ab", "c"), samplings)
    first, second = sorted(server.asked, key=lambda asked: -len(asked["prompt"]))
    assert [(asked["n"], asked["max_tokens"], asked["stop"]) for asked in (first, second)] == [
        (2, 2, ["x"]),
        (1, 1, []),
    ]
    assert found.prompt_index.tolist() == [0, 0, 1]
    assert found.tokens.tolist() == [5, 6, 7, 5]
    assert found.dropped == {}


def test_a_response_above_the_limit_of_its_own_prompt_is_an_error(make, server):
    engine = make("rollout.server.retries=0")
    server.faults = [lambda answer: answer["choices"][0].update(token_ids=[5, 6]) or answer] * 2
    with pytest.raises(RunError, match="a sample has 2 tokens; it may have 1 to 1"):
        engine.generate_each(batch("ab", "c"), [Sampling(1, 1), Sampling(1, 1)])


def test_one_greedy_sample_stands_for_all(make, server):
    engine = make()
    found = engine.generate(batch("ab"), Sampling(n=3, max_response_tokens=2, greedy=True))
    assert found.tokens.tolist() == [5, 5, 5]
    assert [asked["n"] for asked in server.asked] == [1]
    assert server.asked[0]["temperature"] == 0.0


def test_the_server_gets_the_weights_of_every_version_and_older_ones_are_removed(make, server, tmp_path):
    engine = make()
    model = engine._parts.model
    for version in (1, 2):
        with torch.no_grad():
            model.model.norm.weight.fill_(float(version))
        engine.update_weights(version)
        assert server.weights["model.norm.weight"].eq(version).all()
        assert [path.name for path in (tmp_path / "weights").glob("*/*")] == [f"version-{version:08d}"]
    assert server.weights.keys() == dict(ModuleWeights(model).full()).keys()
    assert server.taken == [0, 1, 2]


def flip(folder: Path) -> None:
    """Flip a bit of the last weight in a folder's files."""
    file = max(folder.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("repairs", [True, False])
def test_weights_in_files_that_have_changed_on_the_way_are_not_loaded(make, server, tmp_path, repairs: bool):
    engine = make("rollout.server.retries=1", "rollout.server.start_timeout=1")
    served, damaged = server.weights, []

    def damage(folder: Path) -> Path:
        damaged.append(tmp_path / f"read-{len(damaged)}")
        shutil.copytree(folder, damaged[-1])
        if len(damaged) == 1 or not repairs:
            flip(damaged[-1])
        return damaged[-1]

    server.damage = damage
    if repairs:
        engine.update_weights(1)
        assert server.taken == [0, 1]
    else:
        with pytest.raises(RunError, match=r"arrived changed: checksum \w{16}, sent \w{16}"):
            engine.update_weights(1)
        assert len(damaged) > 1, "it is sent again"
        assert server.taken == [0]
        assert server.weights is served


@pytest.mark.parametrize("retries", [0, 1])
def test_weights_that_are_damaged_in_the_folder_are_written_again_once(make, server, capfd, retries: int):
    engine = make(f"rollout.server.retries={retries}", "rollout.server.start_timeout=60")
    loads = []
    damage_loads = 1

    def damage(folder: Path) -> None:
        loads.append(folder)
        if len(loads) <= damage_loads:
            flip(folder)

    server.damage = damage
    engine.update_weights(1)
    assert server.taken == [0, 1]
    assert server.weights.keys() == dict(ModuleWeights(engine._parts.model).full()).keys()
    assert capfd.readouterr().err.count("written again: weights 1 cannot be sent: their files in") == 1
    loads.clear()
    damage_loads = 2
    with pytest.raises(RunError, match=r"weights 2 cannot be sent: their files in .*version-00000002 have changed"):
        engine.update_weights(2)
    assert len(loads) == 2
    assert server.taken == [0, 1]


def test_weights_that_are_damaged_after_they_were_loaded_are_not_sent_again(make, server, tmp_path):
    engine = make("rollout.server.retries=1", "rollout.server.start_timeout=60")
    engine.update_weights(1)
    [folder] = (tmp_path / "weights").glob("*/version-00000001")
    flip(folder)
    server.version = -1
    with pytest.raises(RunError, match=r"weights 1 cannot be sent: their files in .* have changed"):
        engine.generate(batch("ab"), SAMPLING)
    assert server.taken == [0, 1]


@pytest.mark.parametrize("version", [None, 1, 3])
def test_a_plugin_of_another_version_is_refused_with_the_command_that_starts_this_one(server, tmp_path, version):
    server.protocol = version
    with pytest.raises(
        ConfigError, match=rf"has version {version or 1} of the protocol and this trainer 2.*PYTHONPATH="
    ):
        vllm_server(parts_for(server.url, tmp_path))


def with_choice(**changes: Any):
    def change(answer):
        answer["choices"][0] |= changes
        return answer

    return change


FAULTS = {
    "a dropped connection": "drop",
    "no JSON": "not json",
    "an internal error": "status 500",
    "too large an answer": "large",
    "forgotten weights": "forget",
    "a missing sample": lambda answer: {"choices": answer["choices"][1:]},
    "no samples": lambda answer: {"error": "busy"},
    "a list": lambda answer: [1, 2],
    "a log-prob that is NaN": with_choice(logprobs={"token_logprobs": [float("nan"), -1.0]}),
    "a log-prob that is missing": with_choice(logprobs={"token_logprobs": [None, -1.0]}),
    "a log-prob too few": with_choice(logprobs={"token_logprobs": [-1.0]}),
    "a log-prob above 0": with_choice(logprobs={"token_logprobs": [0.5, -1.0]}),
    "a token out of the vocabulary": with_choice(token_ids=[5, 100000]),
    "a token that is text": with_choice(token_ids=["5", 6]),
    "too many tokens": with_choice(token_ids=[5] * 9, logprobs={"token_logprobs": [-1.0] * 9}),
    "no tokens": with_choice(token_ids=[], logprobs={"token_logprobs": []}),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_after_one_bad_answer_the_request_is_sent_again(make, server, fault):
    engine = make("rollout.server.max_reply_mb=1")
    server.faults = [fault]
    found = engine.generate(batch("ab"), SAMPLING)
    assert found.tokens.tolist() == [5, 6, 7]
    assert len(server.asked) == 2
    assert engine.metrics["rollout/server_retries"] == 1


def test_requests_are_marked_with_the_version_of_the_weights(make, server):
    engine = make()
    for version in (1, 2):
        engine.update_weights(version)
        engine.generate(batch("ab"), SAMPLING)
    assert [asked["cache_salt"] for asked in server.asked] == ["weights 1", "weights 2"]


@pytest.mark.parametrize("fault", ["hang", "drip"])
def test_a_server_that_hangs_is_noticed_and_asked_again(make, server, fault):
    engine = make("rollout.server.request_timeout=1")
    server.faults = [fault]
    began = time.monotonic()
    assert engine.generate(batch("ab"), SAMPLING).tokens.tolist() == [5, 6, 7]
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "fault, told",
    [
        ("not json", "not valid JSON: '<html>busy"),
        ("large", "larger than 1 MiB"),
        (FAULTS["a log-prob that is NaN"], "not fi"),
    ],
    ids=["not json", "large", "nan"],
)
def test_a_server_that_goes_on_answering_garbage_is_an_error_that_says_what_came(make, server, fault, told):
    engine = make("rollout.server.max_reply_mb=1", "rollout.server.retries=2")
    server.faults = [fault] * 3
    with pytest.raises(RunError, match="failed 3 times in a row") as error:
        engine.generate(batch("ab"), SAMPLING)
    assert told in str(error.value)
    assert TOKEN not in str(error.value)


def test_a_server_that_comes_back_without_weights_gets_the_current_ones_and_the_request(make, server):
    engine = make()
    engine.update_weights(3)
    thread, back = come_back(server, after=1.5)
    try:
        found = engine.generate(batch("ab", "c", "d"), SAMPLING)
    finally:
        thread.join()
        back[0].close()
    assert found.tokens.tolist() == [5, 6, 7] * 3
    assert back[0].taken == [3]
    assert back[0].weights.keys() == dict(engine._parts.weights.full()).keys()


def test_while_only_other_ranks_wait_for_it_rank_0_brings_a_server_its_weights_again(make, server, monkeypatch):
    monkeypatch.setattr(rollout_server, "HEARTBEAT", 0.05)
    engine = make()
    engine.update_weights(2)
    watch = threading.Thread(target=engine._servers[0].keep_claim, args=(True,))
    watch.start()
    server.version = -1
    for _ in range(400):
        if server.version == 2:
            break
        time.sleep(0.05)
    engine.close()
    watch.join(20)
    assert server.taken == [0, 2, 2]
    assert not watch.is_alive()


def test_an_engine_that_is_closed_while_it_looks_after_its_server_sends_no_weights_any_more(make, server, monkeypatch):
    engine = make()

    def broken_off() -> bool:
        engine._state.closed.set()
        return False

    monkeypatch.setattr(engine._servers[0], "has_current_weights", broken_off)
    engine._servers[0]._recover("it lost its weights")
    assert server.taken == [0]


def test_a_rank_that_does_not_send_weights_waits_until_the_server_has_them(make, server):
    engine = make()
    engine._transfer = engine._servers[0]._transfer = None  # as on ranks other than 0
    late = threading.Timer(0.5, lambda: setattr(server, "version", 6))
    late.start()
    engine.update_weights(6)
    assert server.version == 6
    late.join()


def test_a_server_that_stays_away_is_an_error_within_the_time_it_may_take(make, server):
    engine = make("rollout.server.start_timeout=2")
    server.close()
    with pytest.raises(RunError, match=r"did not recover within rollout\.server\.start_timeout=2 s"):
        engine.generate(batch("ab"), SAMPLING)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(server_connection, "REFUSAL_TIMEOUT", 1.0)
    monkeypatch.setattr(server_connection, "PAUSE", 0.05)
    monkeypatch.setattr(server_engine, "PAUSE", 0.05)
    monkeypatch.setattr(rollout_server, "PAUSE", 0.05)


def test_a_wrong_token_is_refused_and_appears_in_no_message(server, tmp_path, monkeypatch):
    monkeypatch.setenv("THE_TOKEN", "wrong-token")
    with pytest.raises(ConfigError, match=r"refuses the token.*rollout\.server\.token_variable") as error:
        vllm_server(parts_for(server.url, tmp_path))
    assert "wrong-token" not in str(error.value)


def test_without_a_token_a_server_of_somebody_elses_is_not_asked(server, tmp_path, monkeypatch):
    monkeypatch.delenv("THE_TOKEN")
    with pytest.raises(ConfigError, match="needs a token: set THE_TOKEN"):
        vllm_server(parts_for(server.url, tmp_path))


def test_where_nobody_answers_the_address_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("THE_TOKEN", TOKEN)
    with pytest.raises(ConfigError, match=r"rollout\.server\.url='http://127\.0\.0\.1:1'"):
        vllm_server(parts_for("http://127.0.0.1:1", tmp_path))


def test_health_is_that_of_the_server_and_its_weights(make, server):
    engine = make()
    assert engine.health()
    server.version = 12
    assert not engine.health()
    server.version = 0
    server.close()
    assert not engine.health()


def test_closing_removes_the_weights(make, tmp_path):
    engine = make()
    engine.close()
    assert not (tmp_path / "weights").exists()
    assert not engine.health()


def test_health_of_a_server_that_another_run_has_taken_is_bad(make, server):
    engine = make()
    server.label = OTHER.label(0)
    assert not engine.health()


OTHER = Owner("other", "session", "elsewhere:/other (process 7)")


def as_run(server: FakeServer, tmp_path: Path, run: str, *overrides: str) -> ServerEngine:
    """Make an engine of a run that is started."""
    weights = f"rollout.server.weights_dir={tmp_path / run}"
    parts = parts_for(server.url, tmp_path, weights, f"trainer.output_dir={tmp_path / run}", *overrides)
    return vllm_server(replace(parts, run_id=run))


def test_a_second_run_is_refused_by_the_name_of_the_first_and_changes_nothing(server, tmp_path):
    first = as_run(server, tmp_path, "one")
    first.update_weights(3)
    with pytest.raises(ConfigError, match=r"rollout\.server\.url.* in use by another run: .*/one \(process") as error:
        as_run(server, tmp_path, "two")
    assert "rollout.server.wait_for_owner" in str(error.value)
    assert "rollout.server.take_over=true" in str(error.value)
    assert server.taken == [0, 3]
    assert first.generate(batch("ab"), SAMPLING).weight_version == 3
    first.close()
    as_run(server, tmp_path, "two").close()
    assert server.taken == [0, 3, 0]


def test_a_run_that_is_started_again_after_a_kill_takes_its_server_and_the_zombie_gives_up_with_its_name(
    server, tmp_path
):
    killed = as_run(server, tmp_path, "one")
    killed.update_weights(3)
    resumed = as_run(server, tmp_path, "one")
    resumed.update_weights(3)
    assert resumed.generate(batch("ab"), SAMPLING).weight_version == 3
    asked = len(server.asked)
    with pytest.raises(RunError, match=r"belongs to another run now: .*/one .*another process of this same run"):
        killed.generate(batch("ab"), SAMPLING)
    assert len(server.asked) == asked + 1, "the same version of another process's weights is no reason to ask again"
    with pytest.raises(RunError, match="another process of this same run"):
        killed.update_weights(4)
    assert server.taken == [0, 3, 0, 3]
    assert resumed.generate(batch("ab"), SAMPLING).weight_version == 3
    killed.close()
    resumed.close()


def test_a_run_may_wait_for_another_to_leave_its_server_and_says_for_what(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(waits, "FIRST_REPORT", 0.0)
    first = as_run(server, tmp_path, "one")

    def leave() -> None:
        while len(server.turned_away) < 3:
            time.sleep(0.02)
        first.close()

    leaving = threading.Thread(target=leave)
    leaving.start()
    second = as_run(server, tmp_path, "two", "rollout.server.wait_for_owner=30")
    leaving.join()
    assert "waiting for " in (said := capsys.readouterr().err)
    assert "/one (process" in said
    with pytest.raises(ConfigError, match=r"in use by another run: .*/two"):
        as_run(server, tmp_path, "one", "rollout.server.wait_for_owner=0.2")
    third = as_run(server, tmp_path, "three", "rollout.server.take_over=true")
    with pytest.raises(RunError, match=r"belongs to another run now: .*/three"):
        second.generate(batch("ab"), SAMPLING)
    for engine in (first, second, third):
        engine.close()


def test_runs_that_share_a_folder_for_weights_do_not_share_its_files(make, server, tmp_path):
    make()
    other = FakeServer()
    second = vllm_server(parts_for(other.url, tmp_path))
    folders = list((tmp_path / "weights").iterdir())
    assert [[path.name for path in folder.iterdir()] for folder in folders] == [["version-00000000"]] * 2
    second.close()
    other.close()
    assert sum(folder.exists() for folder in folders) == 1


def test_a_start_that_resumes_a_run_removes_the_weights_that_a_killed_one_has_left(server, tmp_path):
    killed = as_run(server, tmp_path, "one")
    resumed = as_run(server, tmp_path, "one")
    (folder,) = (tmp_path / "one").iterdir()
    assert folder.name.endswith(resumed._owner.session)
    for engine in (killed, resumed):
        engine.close()


def test_a_run_that_trains_for_long_is_heard_of(make, server, monkeypatch):
    monkeypatch.setattr(rollout_server, "HEARTBEAT", 0.02)
    make()
    server.holder._last_heard = 0.0
    for _ in range(200):
        if server.holder._last_heard:
            break
        time.sleep(0.02)
    assert time.monotonic() - server.holder._last_heard < 20


def test_ranks_beside_rank_0_notice_a_server_that_another_run_has_taken(make, server):
    engine = make()
    engine._transfer = engine._servers[0]._transfer = None  # as on ranks other than 0
    server.label = OTHER.label(1)
    with pytest.raises(RunError, match="belongs to another run now: elsewhere:/other"):
        engine.update_weights(1)


@pytest.mark.parametrize("setting", ["wait_for_owner=5", "take_over=true"])
def test_what_is_said_of_other_runs_needs_a_server_that_runs_already(tmp_path, setting):
    with pytest.raises(ConfigError, match=r"has no effect with rollout\.server\.url=null"):
        parts_for(None, tmp_path, f"rollout.server.{setting}")


def test_when_a_server_stays_away_all_requests_fail_after_one_and_the_same_wait(make, server, monkeypatch):
    engine = make("rollout.server.start_timeout=1")
    server.close()
    repairs = []
    repair = engine._servers[0]._repair
    monkeypatch.setattr(engine._servers[0], "_repair", lambda wait: (repairs.append(wait), repair(wait)))
    began = time.monotonic()
    with pytest.raises(RunError, match=r"did not recover within rollout\.server\.start_timeout=1 s"):
        engine.generate(batch(*(f"{i}" for i in range(server_engine.THREADS))), SAMPLING)
    assert time.monotonic() - began < 15
    assert len({id(wait) for wait in repairs}) == 1


def test_the_first_request_that_fails_for_good_ends_those_that_hang(make, server):
    engine = make("rollout.server.request_timeout=300", "rollout.server.retries=0")
    server.faults = ["hang", "hang", "not json"]
    began = time.monotonic()
    with pytest.raises(RunError, match="failed 1 times in a row"):
        engine.generate(batch("a", "b", "c"), SAMPLING)
    assert time.monotonic() - began < 30


def test_closing_ends_requests_to_a_server_that_hangs(make, server):
    engine = make("rollout.server.request_timeout=300")
    server.faults = ["hang"]
    raised: list[BaseException] = []

    def generate() -> None:
        try:
            engine.generate(batch("a"), SAMPLING)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    while not server.asked:
        time.sleep(0.01)
    engine.close()
    thread.join(20)
    assert [type(error) for error in raised] == [Stopped]


@pytest.mark.parametrize("status", [401, 404, 403, 503])
def test_a_refusal_that_passes_is_no_reason_to_end(make, server, status):
    server.refusals = [status] * 3 if status != 503 else []
    engine = make()
    server.refusals = [status] * 2
    assert engine.generate(batch("ab"), SAMPLING).tokens.tolist() == [5, 6, 7]
    server.refusals = [status]
    engine.update_weights(1)
    assert server.version == 1


@pytest.mark.parametrize("status, told", [(401, "refuses the token"), (404, "does not know /health")])
def test_a_refusal_that_lasts_is_named_after_a_bounded_time(make, server, status, told):
    engine = make("rollout.server.start_timeout=1")
    server.refusals = [status] * 10000
    with pytest.raises(RunError, match=told.replace("/health", ".*")):
        engine.generate(batch("ab"), SAMPLING)
    server.refusals = []


SLEEPING = "import time; time.sleep(600)"
LISTENING = "import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(600)"


def restarting(engine: ServerEngine, server: FakeServer, code: str, tmp_path: Path) -> tuple[threading.Thread, list]:
    """Take the server away, and have a thread generate that waits for CODE, which never answers, in its place.

    Returns the thread and what its call raises.
    """
    raised: list[BaseException] = []

    def generate() -> None:
        try:
            engine.generate(batch("ab", "c"), SAMPLING)
        except BaseException as error:
            raised.append(error)

    command = [sys.executable, "-c", code.format(port=server.port)]
    process = engine._servers[0].connection.process = ServerProcess(command, dict(os.environ), tmp_path / "log")
    server.close()
    thread = threading.Thread(target=generate)
    thread.start()
    while not process.alive:
        time.sleep(0.05)
    time.sleep(1.5)  # it is waited for
    assert thread.is_alive()
    return thread, raised


@pytest.mark.parametrize("code", [SLEEPING, LISTENING], ids=["nobody listens", "it takes requests and says nothing"])
def test_closing_ends_a_start_that_is_under_way(make, server, tmp_path, code: str):
    engine = make("rollout.server.start_timeout=600")
    thread, raised = restarting(engine, server, code, tmp_path)
    began = time.monotonic()
    engine.close()
    thread.join(10)
    assert time.monotonic() - began < 5
    assert not thread.is_alive()
    assert [type(error) for error in raised] == [Stopped]
    assert not engine._servers[0].connection.process.alive


def test_a_thread_that_generates_ahead_waits_for_no_start_when_it_is_to_end(server, tmp_path):
    gate = Gate()
    engine = vllm_server(replace(parts_for(server.url, tmp_path, "rollout.server.start_timeout=600"), gate=gate))
    thread, raised = restarting(engine, server, SLEEPING, tmp_path)
    gate.stop()
    thread.join(5)
    assert not thread.is_alive()
    assert [type(error) for error in raised] == [Stopped]
    engine.close()
    assert not engine._servers[0].connection.process.alive


def test_a_thread_that_generates_ahead_waits_for_no_response_when_it_is_to_end(server, tmp_path):
    """An interrupted run waited for a response that never came."""
    gate, server.faults, raised = Gate(), ["hang"], []
    engine = vllm_server(replace(parts_for(server.url, tmp_path, "rollout.server.request_timeout=600"), gate=gate))

    def generate() -> None:
        try:
            engine.generate(batch("a"), SAMPLING)
        except Stopped as stopped:
            raised.append(stopped)

    thread = threading.Thread(target=generate)
    thread.start()
    while not server.asked:
        time.sleep(0.01)
    gate.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert len(raised) == 1
    engine.close()


def test_a_python_that_is_not_there_is_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"rollout\.server\.python='/nowhere/python' cannot be run"):
        vllm_server(parts_for(None, tmp_path, "rollout.server.python=/nowhere/python"))


def test_a_server_that_ends_while_it_starts_shows_the_end_of_its_log(tmp_path):
    here = f"rollout.server.python={sys.executable}"  # this environment has no vLLM
    with pytest.raises(ConfigError, match="ended while it started") as error:
        vllm_server(parts_for(None, tmp_path, here))
    assert "No module named" in str(error.value)


def alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{number}/stat").read_text().split()[2]


def test_stopping_a_server_ends_its_children_too(tmp_path):
    spawn = (
        "import subprocess, sys, time; c = subprocess.Popen(['sleep', '60']); print(c.pid, flush=True); time.sleep(60)"
    )
    process = ServerProcess([sys.executable, "-c", spawn], dict(os.environ), tmp_path / "log")
    process.start()
    while not (tmp_path / "log").read_text().strip():
        time.sleep(0.05)
    child = int((tmp_path / "log").read_text())
    assert alive(child)
    process.stop()
    assert not process.alive
    for _ in range(100):
        if not alive(child):
            break
        time.sleep(0.05)
    assert not alive(child)


def test_a_server_of_ours_gets_the_token_by_its_environment_and_not_the_trainers_packages(make, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/trainer")
    monkeypatch.setenv("RANK", "0")
    engine = make()
    variables = VllmServer().environment(BACKEND, "secret", {"ONE_MORE": "1"})
    assert variables[TOKEN_VARIABLE] == "secret"
    assert variables["PYTHONPATH"].endswith("vllm_plugin")
    assert variables["ONE_MORE"] == "1"
    assert "RANK" not in variables
    engine._parts.config.rollout.server.python = sys.executable
    assert not any("secret" in word for word in VllmServer().command(engine._parts, None, "127.0.0.1", 1))


@pytest.mark.parametrize("server", [VllmServer(), SglangServer()], ids=["vllm", "sglang"])
def test_a_server_of_ours_gets_the_variables_of_rollout_and_what_the_user_set(server, monkeypatch):
    npu = registry.get("npu")
    names = {*npu.env_train, *npu.env_rollout}
    environ = {name: value for name, value in os.environ.items() if name not in names}
    monkeypatch.setattr(os, "environ", environ)
    environ["HCCL_CONNECT_TIMEOUT"] = "7"
    environment.apply(npu, "train", environ)
    assert environ["TASK_QUEUE_ENABLE"] == "2"
    variables = server.environment(npu, "secret", {})
    assert variables["TASK_QUEUE_ENABLE"] == "1"
    assert variables["VLLM_ASCEND_ENABLE_NZ"] == "0"
    assert variables["HCCL_CONNECT_TIMEOUT"] == "7"
    assert not {"PYTORCH_NPU_ALLOC_CONF", "CPU_AFFINITY_CONF"} & variables.keys()
    assert environ["TASK_QUEUE_ENABLE"] == "2", "the trainer keeps its own"

    environ |= {"TASK_QUEUE_ENABLE": "0", "VLLM_ASCEND_ENABLE_NZ": "1"}
    environment.apply(npu, "train", environ)
    variables = server.environment(npu, "secret", {"VLLM_ASCEND_ENABLE_NZ": "2"})
    assert variables["TASK_QUEUE_ENABLE"] == "0"
    assert variables["VLLM_ASCEND_ENABLE_NZ"] == "2", "rollout.server.env is for the server alone"
    assert server.environment(npu, "secret", {})["VLLM_ASCEND_ENABLE_NZ"] == "1"


def test_a_vllm_server_on_npus_of_a_trainer_without_one_can_be_sent_weights(monkeypatch):
    monkeypatch.delenv("VLLM_ASCEND_ENABLE_NZ", raising=False)
    assert VllmServer().environment(BACKEND, "secret", {})["VLLM_ASCEND_ENABLE_NZ"] == "0"
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", "1")
    assert VllmServer().environment(BACKEND, "secret", {})["VLLM_ASCEND_ENABLE_NZ"] == "1"


def test_settings_become_words_of_the_command_line():
    words = command_line({"max_model_len": 64, "enforce_eager": True, "enable_prefix_caching": False, "revision": None})
    assert words == ["--max-model-len", "64", "--enforce-eager", "--no-enable-prefix-caching"]
    assert command_line({"additional_config": {"a": 0}}) == ["--additional-config", '{"a": 0}']


def test_it_sleeps_until_it_gets_new_weights(make, server, monkeypatch):
    freed = []
    monkeypatch.setattr("hwgrpo_backends.device.Device.empty_cache", lambda self: freed.append(list(server.taken)))
    engine = make("rollout.sleep_mode=always")
    assert freed == [[]], "before a server takes memory for its first weights"
    freed.clear()
    engine.sleep()
    assert not engine.health()
    with pytest.raises(RuntimeError, match="update_weights"):
        engine.generate(batch("ab"), SAMPLING)
    assert freed == []
    engine.update_weights(1)
    assert freed == [[0]], "before the server takes memory for the new weights"
    assert engine.generate(batch("ab"), SAMPLING).weight_version == 1
    assert any("its sleep frees nothing" in note for note in engine.notes)
    assert server.slept == [2]


@pytest.mark.parametrize(
    ("shares", "freed", "slept"),
    [(True, 60, [2, 2]), (True, 40, [2]), (False, 40, [2])],
    ids=["enough", "little", "not"],
)
def test_servers_whose_first_sleep_frees_less_than_half_stay_awake(make, server, monkeypatch, shares, freed, slept):
    def free(device: Device) -> Memory:
        return Memory(free=2**20 * (1000 - (100 - freed * len(server.slept) if measuring else 0)))

    measuring: list[Any] = []
    connect = server_engine.connect_servers
    monkeypatch.setattr(server_engine, "connect_servers", lambda *args: measuring.append(0) or connect(*args))
    monkeypatch.setattr(server_engine, "shares_device", lambda rollout: shares)
    monkeypatch.setattr(Device, "memory", free)
    engine = make("rollout.sleep_mode=always")
    assert server.slept == [2] * shares
    assert server.taken == [0], "it has weights, and is awake"
    [note] = [note for note in engine.notes if "server at" in note]
    assert (f"its sleep frees {freed}.0 MiB of the 100.0 MiB" in note) == shares, note
    assert ("warning: " in note) == ("stays awake" in note) == (shares and freed < 50)
    engine.sleep()
    assert server.slept == slept
    engine.update_weights(1)
    assert engine.generate(batch("ab"), SAMPLING).weight_version == 1


@pytest.mark.parametrize("refused", [1, 2])
def test_a_server_that_does_not_sleep_is_asked_again_then_an_error(make, server, monkeypatch, refused):
    monkeypatch.setattr(rollout_server, "PAUSE", 0.01)
    engine = make("rollout.sleep_mode=always", "rollout.server.retries=1")
    server.refusals = [500] * refused
    if refused == 1:
        engine.sleep()
        assert server.slept == [2]
    else:
        with pytest.raises(RunError, match="did not free its memory"):
            engine.sleep()


def test_a_dead_server_of_the_run_has_freed_its_memory(make, server):
    engine = make("rollout.sleep_mode=always")
    engine._servers[0].connection.process = SimpleNamespace(alive=False, stop=lambda: None)
    server.refusals = [500]
    engine.sleep()
    assert server.slept == []


def test_a_running_server_that_cannot_sleep_is_refused_before_the_run(server, tmp_path):
    config = parts_for(server.url, tmp_path, "rollout.sleep_mode=always").config
    check_running(config)
    server.can_sleep = False
    with pytest.raises(ConfigError, match="start it with --enable-sleep-mode"):
        check_running(config)
