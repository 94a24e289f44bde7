"""Several rollout servers: what is spread over them, and how a run gets over the loss of some. The servers are fake."""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device

from hwgrpo.config.schema import LoraConfig
from hwgrpo.errors import ConfigError, RunError
from hwgrpo.models.lora import apply_lora
from hwgrpo.rollout.policy_weights import ModuleWeights
from hwgrpo.rollout.server import engine as server_engine
from hwgrpo.rollout.server import rollout_server, server_connection, server_process
from hwgrpo.rollout.server.engine import ServerEngine
from hwgrpo.rollout.server.http_client import TimedOut
from hwgrpo.rollout.server.request_router import LEAST_CHECK
from hwgrpo.rollout.server.rollout_server import RolloutServer
from hwgrpo.rollout.server.server_owner import Owner
from hwgrpo.rollout.server.server_process import free_ports
from hwgrpo.rollout.server.sglang import sglang_server
from hwgrpo.rollout.server.vllm import check_running, vllm_server
from hwgrpo.rollout.shared_devices import server_devices
from hwgrpo.values import Completions, Sampling
from tests.rollout.served import TOKENIZER, batch, parts_for
from tests.rollout.server.fake_sglang import FakeSglang
from tests.support.models.tiny import tiny_qwen3
from tests.support.servers.fake_server import TOKEN, FakeServer, FakeWorkers, good

PROMPTS = tuple("abcdefghijklmnopqrst")
SAMPLING = Sampling(n=2, max_response_tokens=3)


class SeededServer(FakeServer):
    """Its samples are functions of the prompt and the request's seed, as a model's are.

    Attributes:
        hangs: whether it does not answer requests for samples, until `released` is set.
    """

    hangs = closed = False

    def close(self) -> None:
        self.closed = True
        super().close()

    def _misbehave(self, request: BaseHTTPRequestHandler, asked: dict[str, Any], fault: Any) -> None:
        if self.hangs:
            self.released.wait(30)
        if not self.closed:
            super()._misbehave(request, asked, fault)

    def answer(self, asked: dict[str, Any]) -> Any:
        reply = good(asked)
        for choice in reply["choices"]:
            first = (asked["seed"] + choice["index"] + sum(asked["prompt"])) % 20
            choice["token_ids"] = [5 + (first + k) % 20 for k in range(len(choice["token_ids"]))]
        return reply


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setenv("THE_TOKEN", TOKEN)
    monkeypatch.setattr(server_connection, "REFUSAL_TIMEOUT", 1.0)
    for module in (server_engine, rollout_server, server_connection):
        monkeypatch.setattr(module, "PAUSE", 0.05)


@pytest.fixture
def pair():
    servers = [SeededServer(), SeededServer()]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def make(pair, tmp_path):
    engines = []

    def make(*overrides: str, servers: Any = pair, **more: Any) -> ServerEngine:
        urls = f"rollout.server.url=[{','.join(server.url for server in servers)}]"
        engines.append(vllm_server(replace(parts_for(None, tmp_path, urls, *overrides), **more)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def back():
    """Start a server again where one was."""
    started: list[FakeServer] = []

    def back(server: FakeServer) -> FakeServer:
        started.append(type(server)(server.port))
        return started[-1]

    yield back
    for server in started:
        server.close()


def wait_until(done: Callable[[], Any], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def same(found: Completions, wanted: Completions) -> bool:
    return torch.equal(found.tokens, wanted.tokens) and torch.equal(found.offsets, wanted.offsets)


@contextmanager
def generating(engine: ServerEngine) -> Iterator[list[Completions]]:
    """Run the block while another thread generates, and then wait for the responses."""
    found: list[Completions] = []
    thread = threading.Thread(target=lambda: found.append(engine.generate(batch(*PROMPTS), SAMPLING)))
    thread.start()
    yield found
    thread.join(20)
    assert not thread.is_alive()
    assert found


@contextmanager
def in_flight_on_both(engine: ServerEngine, pair: list[SeededServer]) -> Iterator[list[Completions]]:
    """Run the block when half of the requests are in flight on each server, and then wait for the responses."""
    for server in pair:
        server.hangs = True
    with generating(engine) as found:
        wait_until(lambda: [len(server.asked) for server in pair] == [len(PROMPTS) // 2] * 2)
        yield found


@pytest.fixture
def wanted(tmp_path):
    """Responses to `PROMPTS` of one server alone."""
    server = SeededServer()
    engine = vllm_server(parts_for(server.url, tmp_path / "alone"))
    found = engine.generate(batch(*PROMPTS), SAMPLING)
    engine.close()
    server.close()
    assert len(found.tokens.unique()) > 5, "prompts and seeds matter"
    return found


def test_requests_are_spread_evenly_and_responses_do_not_depend_on_the_server(make, pair, wanted):
    engine = make()
    with in_flight_on_both(engine, pair) as found:
        for server in pair:
            server.released.set()
    assert same(found[0], wanted)
    assert [engine.metrics[f"rollout/{name}"] for name in ("servers_alive", "server_retries")] == [2, 0]
    assert [sum(pair[i].url in note for note in engine.notes) for i in (0, 1)] == [1, 1]
    for server in pair:
        server.asked.clear()
    for _ in range(4):
        engine.generate(batch("a"), SAMPLING)
    assert [len(server.asked) for server in pair] == [2, 2], "one at a time, they take turns"


def test_a_slow_server_is_given_no_more_than_it_can_answer(make, pair, wanted, monkeypatch):
    monkeypatch.setattr(server_engine, "THREADS", 4)
    engine = make()
    pair[1].hangs = True
    with generating(engine) as found:
        wait_until(lambda: len(pair[0].asked) >= len(PROMPTS) - 4)
        assert len(pair[1].asked) <= 4
        pair[1].released.set()
    assert same(found[0], wanted)


def test_every_server_gets_the_weights_of_every_version_which_are_gathered_once(make, pair, tmp_path, monkeypatch):
    engine = make()
    full, gathered = engine._parts.weights.full, []
    monkeypatch.setattr(engine._parts.weights, "full", lambda: (gathered.append(1), full())[1])
    for version in (1, 2):
        with torch.no_grad():
            engine._parts.model.model.norm.weight.fill_(float(version))
        engine.update_weights(version)
        for server in pair:
            assert server.weights["model.norm.weight"].eq(version).all()
        assert [path.name for path in (tmp_path / "weights").glob("*/*")] == [f"version-{version:08d}"]
    assert [server.taken for server in pair] == [[0, 1, 2]] * 2
    assert len(gathered) == 2


def test_a_server_that_is_killed_in_a_step_leaves_its_requests_to_the_other_and_comes_back_with_current_weights(
    make, pair, wanted, back, capsys
):
    engine = make()
    with in_flight_on_both(engine, pair) as found:
        pair[1].close()
        pair[0].released.set()
    assert same(found[0], wanted)
    assert engine.metrics["rollout/servers_alive"] == 1
    assert engine.metrics["rollout/server_retries"] == len(PROMPTS) // 2
    for version in (1, 2):
        engine.update_weights(version)
    assert pair[0].taken == [0, 1, 2]
    again = back(pair[1])
    wait_until(lambda: engine._servers[1].ready)
    assert again.taken == [2]
    assert again.weights.keys() == pair[0].weights.keys()
    found[0] = engine.generate(batch(*PROMPTS), SAMPLING)
    assert same(found[0], wanted)
    assert found[0].weight_version == 2
    assert again.asked
    assert engine.metrics["rollout/servers_alive"] == 2
    again.close()
    engine.generate(batch(*PROMPTS), SAMPLING)
    said = capsys.readouterr().err
    assert said.count(f"the rollout server at {pair[1].url} is lost, and others take its requests: ") == 2
    assert said.count(f"the rollout server at {pair[1].url} takes requests again, with weights 2") == 1
    assert pair[0].url not in said


def test_a_server_that_is_killed_between_steps_costs_only_the_requests_that_find_it_dead(make, pair, wanted):
    engine = make()
    pair[0].close()
    assert same(engine.generate(batch(*PROMPTS), SAMPLING), wanted)
    assert engine.metrics["rollout/servers_alive"] == 1
    retries = engine.metrics["rollout/server_retries"]
    engine.update_weights(1)
    assert same(engine.generate(batch(*PROMPTS), SAMPLING), wanted)
    assert engine.metrics["rollout/server_retries"] == retries > 0
    assert pair[1].taken == [0, 1]


def test_requests_that_a_server_leaves_hanging_are_answered_by_the_other(make, pair, wanted):
    engine = make("rollout.server.request_timeout=1", "rollout.server.retries=1")
    pair[1].hangs = True
    began = time.monotonic()
    assert same(engine.generate(batch(*PROMPTS), SAMPLING), wanted)
    assert time.monotonic() - began < 20


def test_a_group_that_is_late_on_one_server_is_dispatched_again_to_the_other(make, pair, wanted):
    engine = make()
    pair[1].hangs = True
    found = engine.generate(batch(*PROMPTS), replace(SAMPLING, group_timeout=1.0))
    assert same(found, wanted)
    assert (found.late > 0, found.dropped) == (True, {})


def test_a_server_that_hangs_altogether_loses_all_its_requests_when_the_first_has_timed_out(make, pair, wanted):
    engine = make("rollout.server.request_timeout=300", "rollout.server.start_timeout=300")
    with in_flight_on_both(engine, pair) as found:
        pair[0].released.set()
        pair[1].refusals = [503] * 10000  # it answers no check of its health either
        engine._servers[1].lose("a request timed out")
    assert same(found[0], wanted), "none waits for the 300 s of a request"
    pair[1].refusals = []


def test_a_server_with_stale_weights_is_not_used_until_it_has_the_current_ones(make, pair, wanted):
    engine = make()
    engine.update_weights(3)
    pair[1].version = 2
    assert same(engine.generate(batch(*PROMPTS), SAMPLING), wanted)
    assert engine.metrics["rollout/server_retries"] >= 1
    wait_until(lambda: engine._servers[1].ready)
    assert pair[1].taken == [0, 3, 3]
    assert pair[0].taken == [0, 3]


def test_an_invalid_answer_goes_to_the_other_server(make, pair, wanted):
    engine = make("rollout.server.retries=1")
    pair[1].faults = ["not json"] * 3
    assert same(engine.generate(batch(*PROMPTS), SAMPLING), wanted)
    wait_until(lambda: engine._servers[1].ready)


def test_where_no_server_is_left_the_error_names_all_and_the_setting(make, pair):
    engine = make("rollout.server.start_timeout=1")
    for server in pair:
        server.close()
    began = time.monotonic()
    each = (rf"{server.url} did not recover within rollout\.server\.start_timeout=1 s.*" for server in pair)
    with pytest.raises(RunError, match="no rollout server is left: .*" + "".join(each)):
        engine.generate(batch(*PROMPTS), SAMPLING)
    assert time.monotonic() - began < 15


def test_a_request_that_fails_everywhere_is_an_error_that_names_the_servers(make, pair):
    engine = make("rollout.server.retries=1")
    for server in pair:
        server.faults = ["not json"] * 2
    with pytest.raises(
        RunError, match=r"servers at http\S+, http\S+ failed 2 times in a row \(rollout.server.retries=1"
    ):
        engine.generate(batch("a"), SAMPLING)


def test_a_run_goes_on_without_a_server_that_never_comes_back_and_says_so_once(make, pair, wanted, capsys):
    engine = make("rollout.server.start_timeout=0.2")
    pair[1].close()
    for version in (1, 2, 3):
        assert same(engine.generate(batch(*PROMPTS), SAMPLING), wanted)
        if version == 1:
            wait_until(lambda: engine._servers[1].failure)
        time.sleep(0.3)
        engine.update_weights(version)
    assert engine.metrics["rollout/servers_alive"] == 1
    said = capsys.readouterr().err
    assert said.count(f"the run goes on without the rollout server at {pair[1].url}: ") == 1
    assert said.count("rollout.server.start_timeout=0.2 s") == 1


def test_new_weights_that_one_server_does_not_load_are_used_on_the_other(make, pair, wanted):
    engine = make()
    pair[1].refusals = [500] * 3
    engine.update_weights(1)
    assert pair[0].taken == [0, 1]
    found = engine.generate(batch(*PROMPTS), SAMPLING)
    assert same(found, wanted)
    wait_until(lambda: engine._servers[1].ready)
    assert pair[1].taken == [0, 1]


def test_damaged_weights_are_written_again_for_the_server_that_refuses_them(make, pair):
    engine = make("rollout.server.start_timeout=60")
    refused = []

    def damage(folder: Path) -> None:
        if not refused:
            wait_until(lambda: pair[0].taken == [0, 1])
            file = max(folder.glob("*.safetensors"))
            content = bytearray(file.read_bytes())
            content[-3] ^= 1
            file.write_bytes(content)
        refused.append(folder)

    pair[1].damage = damage
    engine.update_weights(1)
    assert [server.taken for server in pair] == [[0, 1]] * 2
    assert len(refused) == 2
    assert all(server.ready for server in engine._servers)


def test_weights_reach_servers_side_by_side(make, pair):
    engine = make()
    meet = threading.Barrier(2, timeout=10)
    for server in pair:
        server.damage = lambda folder: meet.wait()
    engine.update_weights(1)
    assert [server.taken for server in pair] == [[0, 1]] * 2


def test_all_servers_sleep_and_wake_up_with_new_weights_but_one_that_is_dead(make, pair, back):
    engine = make("rollout.sleep_mode=always")
    engine.sleep()
    assert [server.slept for server in pair] == [[2], [2]]
    engine.update_weights(1)
    pair[1].close()
    engine.generate(batch(*PROMPTS), SAMPLING)
    engine.sleep()
    assert pair[0].slept == [2, 2]
    again = back(pair[1])
    time.sleep(0.5)
    assert again.taken == [], "it would take memory that the policy needs now"
    engine.update_weights(2)
    wait_until(lambda: engine._servers[1].ready)
    assert again.taken == [2]


def test_a_server_that_does_not_sleep_is_lost(make, pair):
    engine = make("rollout.sleep_mode=always", "rollout.server.retries=0")
    pair[1].refusals = [500]
    engine.sleep()
    assert (pair[0].slept, pair[1].slept) == ([2], [])
    assert [server.repairing for server in engine._servers] == [False, True]
    engine.update_weights(1)
    wait_until(lambda: engine._servers[1].ready)


def test_a_server_takes_requests_with_the_current_weights_only_and_none_while_it_sleeps(make):
    engine = make("rollout.sleep_mode=always")
    server = engine._servers[1]
    engine.update_weights(1)
    server.ready = False
    assert not server._take_requests(0), "its repair had begun before the new weights"
    assert server._take_requests(1)
    engine.sleep()
    assert not server._take_requests(1)


def test_rank_0_repairs_a_server_whose_process_has_died_though_other_ranks_alone_use_it(make, monkeypatch):
    monkeypatch.setattr(rollout_server, "HEARTBEAT", 0.01)
    engine = make()
    first, second = engine._servers
    lost: list[RolloutServer] = []
    for server in (first, second):
        monkeypatch.setattr(server, "lose", lambda problem, server=server: lost.append(server))
    dead: Any = SimpleNamespace(alive=False, stop=lambda: None)
    second.connection.process = dead
    for server in (first, second):
        threading.Thread(target=server.keep_claim, args=(True,), daemon=True).start()
    wait_until(lambda: lost)
    assert set(lost) == {second}
    second.connection.process = None


OTHER = Owner("other", "session", "elsewhere:/other (process 7)")


def test_one_server_that_another_run_has_taken_ends_the_run_with_its_name(make, pair):
    engine = make()
    pair[1].label = OTHER.label(0)
    with pytest.raises(RunError, match="belongs to another run now: elsewhere:/other"):
        engine.generate(batch(*PROMPTS), SAMPLING)


def test_a_late_request_to_a_server_that_another_run_has_taken_ends_all_requests(make, pair, monkeypatch):
    engine = make()
    aborted: list[str] = []
    for server in engine._servers:
        monkeypatch.setattr(server.client, "abort_requests", lambda url=server.url: aborted.append(url))

    def time_out(server: RolloutServer) -> Any:
        pair[0].label = pair[1].label = OTHER.label(0)
        raise TimedOut("late")

    with pytest.raises(RunError, match="belongs to another run now: elsewhere:/other"):
        engine._router.request(time_out, lambda _: None, [], group_timeout=1.0)
    assert aborted == [server.url for server in pair], "no other request waits for its own deadline"
    with pytest.raises(RunError, match="belongs to another run now: elsewhere:/other"):
        engine._router.ready_servers()


def test_a_run_claims_all_its_servers_and_leaves_all(make, pair):
    first = make(run_id="one")
    for server in pair:
        with pytest.raises(ConfigError, match=rf"{server.url}.* in use by another run"):
            make(servers=[server], run_id="two")
    free = SeededServer()
    with pytest.raises(ConfigError, match=rf"{pair[1].url}.* in use by another run"):
        make(servers=[free, pair[1]], run_id="two")
    make(servers=[free], run_id="three").close()  # a run that did not start has left it
    free.close()
    first.close()
    make(run_id="two").generate(batch(*PROMPTS), SAMPLING)


KINDS = {"vllm_server": (SeededServer, vllm_server), "sglang_server": (FakeSglang, sglang_server)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_started_again_after_a_kill_takes_both_servers(tmp_path, kind: str):
    server_of, engine_of = KINDS[kind]
    servers = [server_of(), server_of()]
    words = (f"rollout.server.url=[{servers[0].url},{servers[1].url}]", f"rollout.engine={kind}")
    killed, resumed = (engine_of(replace(parts_for(None, tmp_path, *words), run_id="one")) for _ in range(2))
    resumed.update_weights(3)
    assert [server.taken for server in servers] == [[0, 0, 3]] * 2
    assert resumed.generate(batch(*PROMPTS), SAMPLING).weight_version == 3
    with pytest.raises(RunError, match="another process of this same run"):
        killed.generate(batch(*PROMPTS), SAMPLING)
    for each in (killed, resumed, *servers):
        each.close()


def test_adapters_reach_both_servers_and_one_that_comes_back(make, pair, back, tmp_path):
    policy: Any = apply_lora(tiny_qwen3(vocab=len(TOKENIZER)), LoraConfig(rank=4))
    engine = make("model.lora.rank=4", model=policy, weights=ModuleWeights(policy))
    engine.update_weights(1)
    assert all("lora_A" in name or "lora_B" in name for name in pair[0].weights)
    assert pair[0].weights.keys() == pair[1].weights.keys()
    pair[1].close()
    engine.generate(batch(*PROMPTS), SAMPLING)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.fill_(0.5)
    engine.update_weights(2)
    again = back(pair[1])
    wait_until(lambda: engine._servers[1].ready)
    assert again.taken == [2]
    assert all(weight.eq(0.5).all() for weight in (*again.weights.values(), *pair[0].weights.values()))


def test_process_groups_with_several_servers_are_fed_from_one_gathering(make, monkeypatch, request):
    servers = []
    for _ in range(2):
        workers = FakeWorkers(1)
        servers.append(SeededServer(workers=workers))
        request.addfinalizer(workers.close)
        request.addfinalizer(servers[-1].close)
    group = ("rollout.server.transfer=group", "rollout.server.weights_dir=null", "rollout.server.request_timeout=20")
    engine = make(*group, servers=servers)
    full, gathered = engine._parts.weights.full, []
    monkeypatch.setattr(engine._parts.weights, "full", lambda: (gathered.append(1), full())[1])
    with torch.no_grad():
        for parameter in engine._parts.model.parameters():
            parameter.add_(0.5)
    engine.update_weights(1)
    assert len(gathered) == 1
    wanted = dict(full())
    servers[1].version, servers[1].group = -1, None
    engine.generate(batch(*PROMPTS), SAMPLING)
    wait_until(lambda: engine._servers[1].ready)
    assert [server.taken for server in servers] == [[0, 1], [0, 1, 1]]
    for server in servers:
        assert server.weights.keys() == wanted.keys()
        assert all(torch.equal(server.weights[name], weight) for name, weight in wanted.items())
    complete = []
    monkeypatch.setattr(engine._parts.weights, "full", lambda: (yield from full()) or complete.append(True))
    monkeypatch.setattr(engine, "_expect", lambda version: [])
    engine.update_weights(2)
    assert complete, "other ranks gather them with this one, though all servers are lost"


def test_where_one_server_offers_no_group_all_take_a_folder_and_the_note_names_it(make, pair):
    engine = make("rollout.server.transfer=auto", "rollout.server.weights_dir=null")
    assert any(f"a folder: the server at {pair[0].url} offers no process group" in note for note in engine.notes)
    assert [server.taken for server in pair] == [[0]] * 2


def as_other_rank(engine: ServerEngine) -> None:
    """Let an engine do what one of a rank other than 0 does."""
    engine._transfer = None
    for server in engine._servers:
        server._transfer = None


def test_other_ranks_wait_for_all_servers_but_not_for_one_that_stays_behind(make, pair, monkeypatch):
    monkeypatch.setattr(server_engine, "LAG", 0.2)
    engine = make("rollout.server.retries=0", "rollout.server.start_timeout=3", "rollout.server.request_timeout=3")
    as_other_rank(engine)
    late = [threading.Timer(0.2 * (1 + i), lambda i=i: setattr(pair[i], "version", 6)) for i in (0, 1)]
    for each in late:
        each.start()
    engine.update_weights(6)
    assert [server.version for server in pair] == [6, 6]
    pair[0].version = 7
    began = time.monotonic()
    engine.update_weights(7)
    assert time.monotonic() - began < 4
    assert [server.ready for server in engine._servers] == [True, False]
    pair[1].version = 7
    wait_until(lambda: engine._servers[1].ready)
    assert [server.taken for server in pair] == [[0]] * 2, "rank 0 sends weights"


def test_both_servers_are_checked_before_a_run_and_the_wrong_one_is_named(pair, tmp_path):
    config = parts_for(None, tmp_path, f"rollout.server.url=[{pair[0].url},{pair[1].url}]").config
    check_running(config)
    pair[1].can_sleep = False
    config.rollout.sleep_mode = "always"
    with pytest.raises(ConfigError, match=rf"url='{pair[1].url}': that server cannot free its memory"):
        check_running(config)
    pair[1].close()
    with pytest.raises(ConfigError, match=rf"url='{pair[1].url}': no vLLM server answers there"):
        check_running(config)


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ("[]", "names no server; leave it out"),
        ("[http://a,b]", "'b' must begin with http://"),
        ("[http://a,http://a]", "names 'http://a' twice"),
    ],
)
def test_lists_of_addresses_that_make_no_sense_are_refused(tmp_path: Path, urls: str, message: str):
    with pytest.raises(ConfigError, match=message):
        parts_for(None, tmp_path, f"rollout.server.url={urls}")


def test_the_token_that_is_missing_is_one_for_all(pair, tmp_path, monkeypatch):
    monkeypatch.delenv("THE_TOKEN")
    with pytest.raises(ConfigError, match=rf"url='{pair[0].url}, {pair[1].url}' needs a token: set THE_TOKEN"):
        vllm_server(parts_for(None, tmp_path, f"rollout.server.url=[{pair[0].url},{pair[1].url}]"))


@pytest.mark.parametrize(
    ("words", "environ", "wanted"),
    [
        ([], {"LOCAL_WORLD_SIZE": "3"}, ["0", "1", "2"]),
        ([], {"LOCAL_WORLD_SIZE": "2", "SEEN": "4,6"}, ["4", "6"]),
        (["rollout.tensor_parallel_size=2"], {"LOCAL_WORLD_SIZE": "5"}, ["0,1", "2,3"]),
        (["rollout.tensor_parallel_size=2"], {"LOCAL_WORLD_SIZE": "2"}, []),
        (["rollout.server.env={A_VISIBLE_DEVICES: 7}"], {"LOCAL_WORLD_SIZE": "2"}, []),
        (["rollout.server.env={SEEN: 7}"], {"LOCAL_WORLD_SIZE": "2"}, []),
        ([], {"LOCAL_WORLD_SIZE": "2", "SEEN": "4"}, []),
        (["rollout.tensor_parallel_size=2"], {"LOCAL_WORLD_SIZE": "4", "SEEN": "4,5,6"}, []),
        (["rollout.server.url=http://a"], {"LOCAL_WORLD_SIZE": "2"}, []),
        ([], {}, []),
    ],
)
def test_servers_that_share_the_training_devices_have_some_each(tmp_path, words: list[str], environ, wanted):
    rollout = parts_for(None, tmp_path, *words).config.rollout
    assert server_devices(rollout, "SEEN", environ) == wanted
    assert server_devices(rollout, None, environ) == [], "a CPU"


OWN = """#!{python}
import os, sys
sys.path[:0] = {path}
from tests.support.servers.fake_server import FakeServer
print("sees", os.environ["SEEN"], flush=True)
FakeServer(int(sys.argv[sys.argv.index("--port") + 1]), os.environ["HWGRPO_SERVER_TOKEN"])
sys.stdin.read()
"""


def test_a_run_on_two_devices_starts_a_server_for_each_and_again_where_one_dies(tmp_path, monkeypatch):
    monkeypatch.delenv("THE_TOKEN")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    program = tmp_path / "python"
    program.write_text(OWN.format(python=sys.executable, path=[*map(str, sys.path)]))
    program.chmod(0o755)
    parts = parts_for(None, tmp_path, f"rollout.server.python={program}", "rollout.server.start_timeout=90")
    engine = vllm_server(replace(parts, device=Device(replace(BACKEND, visible_env="SEEN"))))
    logs = [tmp_path / f"run/rollout-server-{number}.log" for number in (0, 1)]
    assert [log.read_text().split()[:2] for log in logs] == [["sees", "0"], ["sees", "1"]]
    engine.update_weights(1)
    process: Any = engine.replicas[1].connection.process  # pyright: ignore
    engine.sleep()
    process._process.kill()
    process._process.wait()
    engine.update_weights(2)
    found = engine.generate(batch(*PROMPTS), SAMPLING)
    assert found.weight_version == 2
    wait_until(lambda: engine._servers[1].ready, 60)
    engine.generate(batch(*PROMPTS), SAMPLING)
    assert [engine.metrics[f"rollout/{name}"] for name in ("servers_alive", "server_restarts")] == [2, 1]
    assert logs[1].read_text().count("sees 1") == 2
    processes = [server.connection.process for server in engine._servers]
    assert all(each is not None and each.alive for each in processes)
    engine.close()
    assert not any(each is not None and each.alive for each in processes)


def test_a_run_that_waits_for_one_of_its_servers_keeps_the_others(make, pair, monkeypatch):
    first = make(servers=[max(pair, key=lambda server: server.url)])
    kept, waited = min(pair, key=lambda server: server.url), max(pair, key=lambda server: server.url)
    made: list[ServerEngine] = []
    thread = threading.Thread(target=lambda: made.append(make("rollout.server.wait_for_owner=30", run_id="two")))
    thread.start()
    wait_until(lambda: len(waited.turned_away) > 2)
    kept.holder._last_heard = 0.0
    wait_until(lambda: kept.holder._last_heard)
    first.close()
    thread.join(20)
    assert made[0].generate(batch(*PROMPTS), SAMPLING).weight_version == 0


def test_a_repair_that_fails_by_a_mistake_of_the_code_ends_the_wait_for_it(make, pair, monkeypatch, capsys):
    engine = make(servers=pair[:1])
    monkeypatch.setattr(engine._servers[0], "_repair", lambda wait: 1 / 0)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    pair[0].close()
    with pytest.raises(RunError, match="could not be repaired: ZeroDivisionError"):
        engine.generate(batch("a"), SAMPLING)


def test_servers_of_a_run_get_different_ports(monkeypatch):
    assert len(set(free_ports("127.0.0.1", 20))) == 20
    bound: list[Any] = []

    class Probe(socket.socket):
        def bind(self, address: Any) -> None:
            assert all(other.fileno() >= 0 for other in bound), "a port was free again before all were known"
            bound.append(self)
            super().bind(address)

    monkeypatch.setattr(server_process.socket, "socket", Probe)
    free_ports("127.0.0.1", 3)
    assert len(bound) == 3


def test_a_server_has_no_longer_than_the_deadline_to_show_that_it_is_healthy(make, pair, monkeypatch):
    handle = SeededServer._handle

    def slow(self: SeededServer, request: BaseHTTPRequestHandler) -> None:
        time.sleep(request.command == "GET")
        handle(self, request)

    engine = make(servers=pair[:1])
    server = engine._servers[0]
    monkeypatch.setattr(SeededServer, "_handle", slow)
    assert server.has_current_weights()
    began = time.monotonic()
    assert not server.has_current_weights(1.5)
    assert time.monotonic() - began < 1.9
    monkeypatch.setattr(SeededServer, "_handle", handle)
    checks: list[float] = []
    check = RolloutServer.has_current_weights

    def recorded(self: RolloutServer, *seconds: float) -> bool:
        checks.extend(seconds)
        return check(self, *seconds)

    monkeypatch.setattr(RolloutServer, "has_current_weights", recorded)
    pair[0].hangs = True
    assert len(engine.generate(batch("a"), replace(SAMPLING, group_timeout=1.5)).dropped) == 1
    assert checks == [LEAST_CHECK, LEAST_CHECK]
    checks.clear()
    assert len(engine.generate(batch("a"), replace(SAMPLING, group_timeout=3.5)).dropped) == 1
    assert checks == [3.5, 3.5]


def test_a_server_is_closed_when_its_repair_ends_after_the_engine_is_closed(make, pair, monkeypatch):
    engine = make(servers=pair[:1])
    ended: list[float] = []

    def repair(problem: str) -> None:
        engine._state.closed.wait(20)
        time.sleep(0.3)
        ended.append(time.monotonic())

    monkeypatch.setattr(engine._servers[0], "_wait_until_ready", repair)
    engine._servers[0].lose("it died")
    engine.close()
    assert ended
