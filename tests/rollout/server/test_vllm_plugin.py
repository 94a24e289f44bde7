"""The part inside the server: the token guards every route, and weights change only between requests."""

import asyncio
import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hwgrpo.rollout.server.server_owner import Owner
from hwgrpo.rollout.vllm_plugin import hwgrpo_vllm
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import (
    GROUP_ROUTE,
    IMAGES_ROUTE,
    LEASE,
    OWNER_HEADER,
    TOKEN_VARIABLE,
    VERSION_HEADER,
    WEIGHTS_ROUTE,
    Guard,
)
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import (
    guard as guard_module,
)

TOKEN = "the-token"
STATUS = {
    "protocol": hwgrpo_vllm.PROTOCOL,
    "version": "-1",
    "group": None,
    "can_sleep": True,
    "without_images": "its vLLM is older than 0.32",  # there is none
}


class Engine:
    def __init__(self) -> None:
        self.done: list[Any] = []
        self.broken = False
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=4, data_parallel_size=1),
            model_config=SimpleNamespace(enable_sleep_mode=True, multimodal_config=None),
        )
        self.asleep: set[str] = set()

    async def collective_rpc(self, method: str, args: tuple) -> None:
        await asyncio.sleep(0.01)
        if self.broken:
            raise RuntimeError("a worker died")
        self.done.append((method, *args))

    async def reset_prefix_cache(self) -> None:
        self.done.append("reset")

    async def sleep(self, level: int) -> None:
        assert not self.asleep, "vLLM would ignore the call"
        self.asleep = {"weights", "kv_cache"}
        self.done.append(f"sleep {level}")

    async def wake_up(self, tags: list[str]) -> None:
        # vLLM ignores a tag that is awake, as after a load that failed
        self.asleep -= {*tags}
        self.done.append(f"wake {' '.join(tags)}")


class App:
    """Answers every request; one to /v1/slow waits until it is let go."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(engine_client=Engine())
        self.go = asyncio.Event()
        self.seen: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append(scope["path"])
        if scope["path"] == "/v1/slow":
            await self.go.wait()
            self.state.engine_client.done.append("sampled")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture
def guard(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    platform = SimpleNamespace(device_type="cpu", is_sleep_mode_available=lambda: True)
    platforms = SimpleNamespace(current_platform=platform)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    app = App()
    return Guard(app), app


async def ask(
    guard, app, path: str, body: Any = None, token: str | None = TOKEN, method: str = "POST", session: str = ""
):
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.sleep(600)  # the client stays

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {token}".encode())] if token is not None else []
    headers.append((OWNER_HEADER.encode(), session.encode()))
    await guard({"type": "http", "path": path, "method": method, "headers": headers, "app": app}, receive, send)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, json.loads(sent[1]["body"])


OURS = Owner("run1", "a", "host:/run1 (process 1)")


def weights_body(version: int, owner: Owner = OURS) -> dict[str, Any]:
    folder = f"/weights/{version}"
    return {"folder": folder, "version": owner.label(version), "adapter": False, "owner": owner.payload()}


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/health", "/metrics", WEIGHTS_ROUTE, GROUP_ROUTE, IMAGES_ROUTE, "/collective_rpc"]
)
@pytest.mark.parametrize("token", [None, "", "the-tokem", "the-token "])
def test_no_route_answers_without_the_token(guard, path, token):
    guard, app = guard
    assert asyncio.run(ask(guard, app, path, {}, token))[0] == 401
    assert app.seen == []
    assert app.state.engine_client.done == []


def test_with_the_token_requests_get_through(guard):
    guard, app = guard
    assert asyncio.run(ask(guard, app, "/health", method="GET"))[0] == 200
    assert app.seen == ["/health"]


def test_a_server_without_a_token_does_not_start(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=TOKEN_VARIABLE):
        Guard(App())


def test_answers_carry_the_version_of_the_weights(guard):
    guard, app = guard

    async def run():
        before = await ask(guard, app, "/v1/completions")
        await ask(guard, app, WEIGHTS_ROUTE, weights_body(4))
        return before, await ask(guard, app, "/v1/completions"), await ask(guard, app, WEIGHTS_ROUTE, method="GET")

    before, after, told = asyncio.run(run())
    assert before[1][VERSION_HEADER] == "-1"
    assert after[1][VERSION_HEADER] == OURS.label(4) == "4:run1:a:host%3A/run1%20%28process%201%29"
    status = {**STATUS, "version": OURS.label(4)}
    assert told[2] == {**status, "library": "gloo", "workers": 4}
    assert app.state.engine_client.done == [("hwgrpo_load_weights", "/weights/4"), "reset"]


def test_weights_wait_for_requests_and_requests_for_weights(guard):
    guard, app = guard

    async def run():
        slow = asyncio.create_task(ask(guard, app, "/v1/slow"))
        await asyncio.sleep(0.01)
        update = asyncio.create_task(ask(guard, app, WEIGHTS_ROUTE, weights_body(5)))
        await asyncio.sleep(0.01)
        late = asyncio.create_task(ask(guard, app, "/v1/late"))
        await asyncio.sleep(0.05)
        assert app.seen == ["/v1/slow"], "a request that comes during an update waits"
        assert app.state.engine_client.done == [], "an update waits for what is running"
        app.go.set()
        return await asyncio.gather(slow, update, late)

    slow, update, late = asyncio.run(run())
    assert slow[1][VERSION_HEADER] == "-1"
    assert update[0] == 200
    assert late[1][VERSION_HEADER] == OURS.label(5)
    assert app.state.engine_client.done == ["sampled", ("hwgrpo_load_weights", "/weights/5"), "reset"]


def test_a_server_sleeps_between_requests_until_it_has_new_weights(guard):
    guard, app = guard
    done = app.state.engine_client.done
    sleep = {"owner": OURS.payload(), "sleep": 2}

    async def run():
        slow = asyncio.create_task(ask(guard, app, "/v1/slow"))
        await asyncio.sleep(0.01)
        asleep = asyncio.create_task(ask(guard, app, WEIGHTS_ROUTE, sleep))
        await asyncio.sleep(0.05)
        assert done == [], "it sleeps when nothing is running"
        app.go.set()
        await slow
        assert (await asleep)[0] == 200
        refused = await ask(guard, app, "/v1/completions")
        return refused, await ask(guard, app, WEIGHTS_ROUTE, weights_body(5)), await ask(guard, app, "/v1/completions")

    refused, update, answer = asyncio.run(run())
    assert (refused[0], refused[2]) == (503, {"error": "this server sleeps until it gets new weights"})
    assert app.seen == ["/v1/slow", "/v1/completions"]
    load = ("hwgrpo_load_weights", "/weights/5")
    assert done == ["sampled", "sleep 2", "wake weights", load, "wake kv_cache", "reset"]
    assert update[0] == 200
    assert answer[1][VERSION_HEADER] == OURS.label(5)


def test_weights_that_fail_leave_it_asleep_and_the_next_ones_wake_it(guard):
    guard, app = guard
    engine = app.state.engine_client

    async def run():
        await ask(guard, app, WEIGHTS_ROUTE, {"owner": OURS.payload(), "sleep": 1})
        engine.broken = True
        failed = await ask(guard, app, WEIGHTS_ROUTE, weights_body(5))
        refused = await ask(guard, app, "/v1/completions")
        engine.broken = False
        return failed, refused, await ask(guard, app, WEIGHTS_ROUTE, weights_body(6)), engine.asleep

    failed, refused, update, asleep = asyncio.run(run())
    assert (failed[0], refused[0], update[0]) == (500, 503, 200)
    assert not asleep


@pytest.mark.parametrize("holds", ["another run", "no memory pool"])
def test_a_server_of_another_run_or_without_sleep_mode_does_not_sleep(guard, holds):
    guard, app = guard
    app.state.engine_client.vllm_config.model_config.enable_sleep_mode = holds == "another run"
    other = Owner("run2", "b", "host:/run2 (process 2)")

    async def run():
        await ask(guard, app, WEIGHTS_ROUTE, weights_body(5, other if holds == "another run" else OURS))
        return await ask(guard, app, WEIGHTS_ROUTE, {"owner": OURS.payload(), "sleep": 1})

    status, _, answer = asyncio.run(run())
    assert status == (409 if holds == "another run" else 400)
    assert "run2" in str(answer) if holds == "another run" else "--enable-sleep-mode" in answer["error"]
    assert not app.state.engine_client.asleep


def test_weights_that_could_not_be_taken_leave_no_version(guard):
    guard, app = guard

    async def run():
        await ask(guard, app, WEIGHTS_ROUTE, weights_body(1))
        app.state.engine_client.broken = True
        failed = await ask(guard, app, WEIGHTS_ROUTE, weights_body(2))
        return failed, await ask(guard, app, "/v1/completions")

    failed, answer = asyncio.run(run())
    assert failed[0] == 500
    assert "a worker died" in failed[2]["error"]
    assert answer[1][VERSION_HEADER] == "-1"


JOIN = {"name": "the-group", "host": "here"}
ASK_TO_JOIN = {**JOIN, "owner": OURS.payload()}
RECEIVE = {"version": OURS.label(6), "owner": OURS.payload()}


def test_a_group_is_joined_by_all_workers_and_weights_come_through_it(guard):
    guard, app = guard

    async def run():
        joined = await ask(guard, app, GROUP_ROUTE, ASK_TO_JOIN)
        taken = await ask(guard, app, WEIGHTS_ROUTE, {**RECEIVE, "transfer": 3})
        return joined, taken, await ask(guard, app, WEIGHTS_ROUTE, method="GET")

    joined, taken, told = asyncio.run(run())
    assert (joined[0], joined[2]) == (200, {"group": "the-group"})
    assert (taken[0], taken[2]) == (200, {"version": OURS.label(6)})
    assert (told[2]["group"], told[2]["version"]) == ("the-group", OURS.label(6))
    assert app.state.engine_client.done == [("hwgrpo_join_group", JOIN), ("hwgrpo_receive_weights", 3), "reset"]


def test_a_group_that_failed_is_no_group_any_more(guard):
    guard, app = guard

    async def run():
        await ask(guard, app, GROUP_ROUTE, ASK_TO_JOIN)
        app.state.engine_client.broken = True
        failed = await ask(guard, app, WEIGHTS_ROUTE, {**RECEIVE, "transfer": 0})
        after = await ask(guard, app, WEIGHTS_ROUTE, method="GET")
        return failed, after, await ask(guard, app, GROUP_ROUTE, ASK_TO_JOIN)

    failed, after, again = asyncio.run(run())
    assert failed[0] == again[0] == 500
    assert (after[2]["group"], after[2]["version"]) == (None, "-1")


def test_a_server_of_several_engines_offers_no_group(guard):
    guard, app = guard
    app.state.engine_client.vllm_config.parallel_config.data_parallel_size = 2
    response = asyncio.run(ask(guard, app, WEIGHTS_ROUTE, method="GET"))
    assert response[2] == STATUS


class Lora:
    """vLLM's request for an adapter."""

    def __init__(self, name: str, number: int, folder: str) -> None:
        self.name, self.number, self.folder = name, number, folder


@pytest.mark.parametrize("damaged", [False, True])
def test_an_adapter_is_loaded_only_after_the_workers_have_checked_its_files(guard, monkeypatch, tmp_path, damaged):
    guard, app = guard
    engine = app.state.engine_client
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=Lora))
    app.state.openai_serving_models = SimpleNamespace(lora_requests={})
    weights = {"a": torch.ones(2)}
    sent = {"a": torch.zeros(2)} if damaged else weights
    save_file(weights, tmp_path / "adapter_model.safetensors", hwgrpo_vllm.named_digests(sent))

    async def add_lora(request: Lora) -> None:
        engine.done.append(("loaded", request.folder))

    async def collective_rpc(method: str, args: tuple) -> None:
        engine.done.append(method)
        getattr(hwgrpo_vllm.WorkerExtension, method)(None, *args)

    engine.add_lora, engine.collective_rpc = add_lora, collective_rpc
    body = weights_body(3) | {"folder": str(tmp_path), "adapter": True}
    status, _, told = asyncio.run(ask(guard, app, WEIGHTS_ROUTE, body))
    if damaged:
        assert (status, engine.done) == (500, ["hwgrpo_check_files"])
        assert "ChecksumError: a arrived changed" in told["error"]
        assert app.state.openai_serving_models.lora_requests == {}
    else:
        assert (status, engine.done) == (200, ["hwgrpo_check_files", ("loaded", str(tmp_path)), "reset"])


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {"folder": "x"},
        {"folder": "x", "version": "new", "adapter": False},
        {"folder": "x", "version": 3, "adapter": False, "owner": OURS.payload()},
        {"folder": "x", "version": "a\r\nb: c", "adapter": False, "owner": OURS.payload()},
        {"folder": "x", "version": "3" * 5000, "adapter": False, "owner": OURS.payload()},
        {"folder": "x", "version": "3", "adapter": False, "owner": {"run": "x"}},
        {"folder": "x", "version": "3", "adapter": False, "owner": "x"},
        {"version": "3", "adapter": False, "owner": OURS.payload()},
        "x" * 70000,
    ],
)
def test_an_order_that_is_none_is_refused(guard, body):
    guard, app = guard
    for route in (WEIGHTS_ROUTE, GROUP_ROUTE, IMAGES_ROUTE):
        assert asyncio.run(ask(guard, app, route, body))[0] == 400
    assert app.state.engine_client.done == []


class Clock:
    """A clock that is moved by hand, in place of the guard's."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    monkeypatch.setattr(guard_module, "time", found := Clock())
    return found


THEIRS = Owner("run2", "b", "host:/run2 (process 2)")
RESUMED = Owner("run1", "c", "host:/run1 (process 3)")
CLAIM, JOINED = "claim", "join"


def asked(guard, app, *orders: Any) -> list[int]:
    """Return the statuses of orders of owners, in turn: (owner, version), (owner, CLAIM) or (owner, JOINED)."""

    async def run():
        statuses = []
        for owner, what in orders:
            body: Any = {"owner": owner.payload()}
            body = body if what == CLAIM else JOIN | body if what == JOINED else weights_body(what, owner)
            route = GROUP_ROUTE if what == JOINED else WEIGHTS_ROUTE
            statuses.append((await ask(guard, app, route, body))[0])
        return statuses

    return asyncio.run(run())


@pytest.mark.parametrize("what", [5, CLAIM, JOINED])
def test_another_run_changes_no_weights_and_gets_the_name_of_the_one_that_has_them(guard, clock, what):
    guard, app = guard
    asked(guard, app, (OURS, 4))
    clock.now += LEASE - 1
    before = [*app.state.engine_client.done]
    assert asked(guard, app, (THEIRS, what)) == [409]
    assert app.state.engine_client.done == before
    told = asyncio.run(ask(guard, app, WEIGHTS_ROUTE, weights_body(5, THEIRS)))[2]
    assert told["holder"] == f"host:/run1 (process 1), last heard of {LEASE - 1:.0f} s ago"
    assert asked(guard, app, (OURS, 5)) == [200]


def test_a_run_that_is_not_heard_of_any_more_loses_the_server_and_is_refused_when_it_comes_back(guard, clock):
    guard, app = guard
    asked(guard, app, (OURS, 4))
    clock.now += LEASE - 1
    asyncio.run(ask(guard, app, WEIGHTS_ROUTE, method="GET", session="a"))  # it is there
    clock.now += LEASE - 1
    asyncio.run(ask(guard, app, WEIGHTS_ROUTE, method="GET", session="b"))  # that is somebody else
    assert asked(guard, app, (THEIRS, CLAIM)) == [409]
    clock.now += 2
    assert asked(guard, app, (THEIRS, 1), (OURS, 5)) == [200, 409]
    clock.now += LEASE + 1
    assert asked(guard, app, (OURS, 5)) == [409], "who has been superseded is never the newest"


def test_a_run_that_is_started_again_takes_its_server_at_once_and_the_process_before_is_refused(guard, clock):
    guard, app = guard
    assert asked(guard, app, (OURS, 4), (RESUMED, 4), (OURS, 5), (RESUMED, 5)) == [200, 200, 409, 200]
    told = asyncio.run(ask(guard, app, WEIGHTS_ROUTE, weights_body(6)))[2]
    assert "another process of this same run" in told["holder"]


def test_a_server_that_was_left_is_free_and_a_run_may_take_one_by_force_once(guard, clock):
    guard, app = guard
    asked(guard, app, (OURS, 4))
    leave = {"owner": OURS.payload(), "release": True}
    asyncio.run(ask(guard, app, WEIGHTS_ROUTE, {**leave, "owner": THEIRS.payload()}))
    assert asked(guard, app, (THEIRS, CLAIM)) == [409], "who has not got it cannot leave it"
    asyncio.run(ask(guard, app, WEIGHTS_ROUTE, leave))
    assert asked(guard, app, (THEIRS, CLAIM)) == [200]
    ours, theirs = (replace(owner, take_over=True) for owner in (OURS, THEIRS))
    assert asked(guard, app, (ours, CLAIM), (theirs, CLAIM), (ours, 5)) == [200, 409, 200]


def test_two_orders_at_once_are_one_after_the_other_and_the_second_owner_is_refused(guard):
    guard, app = guard

    async def run():
        both = [asyncio.create_task(ask(guard, app, WEIGHTS_ROUTE, weights_body(1, owner))) for owner in (OURS, THEIRS)]
        return [each[0] for each in await asyncio.gather(*both)], await ask(guard, app, "/v1/completions")

    statuses, answer = asyncio.run(run())
    assert statuses == [200, 409]
    assert answer[1][VERSION_HEADER] == OURS.label(1)
    assert app.state.engine_client.done == [("hwgrpo_load_weights", "/weights/1"), "reset"]


def test_requests_that_do_not_end_keep_an_order_waiting_for_a_bounded_time_and_no_one_after_it(guard, monkeypatch):
    monkeypatch.setattr(guard_module, "QUIET_TIMEOUT", 0.05)
    guard, app = guard

    async def run():
        slow = asyncio.create_task(ask(guard, app, "/v1/slow"))
        await asyncio.sleep(0.01)
        status, _, told = await ask(guard, app, WEIGHTS_ROUTE, weights_body(5))
        after = await ask(guard, app, "/v1/after")
        app.go.set()
        await slow
        return status, told, after, await ask(guard, app, WEIGHTS_ROUTE, weights_body(6))

    status, told, after, late = asyncio.run(run())
    assert (status, told["error"]) == (503, "requests are still running after 0.05 s")
    assert (after[0], late[0]) == (200, 200)


def test_weights_that_do_not_come_keep_a_request_waiting_for_a_bounded_time(guard, monkeypatch):
    monkeypatch.setattr(guard_module, "QUIET_TIMEOUT", 0.05)
    guard, app = guard
    guard._loading = True
    status, _, told = asyncio.run(ask(guard, app, "/v1/completions"))
    assert (status, told["error"]) == (503, "new weights are still on their way after 0.05 s")


class Packed(torch.nn.Module):
    """A layer that multiplies with a packed copy of its weight, as vLLM's do on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.quant_method = self
        self.process_weights_after_loading(self)

    def process_weights_after_loading(self, layer: Any) -> None:
        packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda: packed


def test_loading_packs_a_tied_head_anew_and_reads_every_file(tmp_path):
    head = Packed()
    for number, weights in enumerate(({"a": torch.ones(2)}, {"b": torch.full((2,), 3.0)})):
        save_file(weights, tmp_path / f"{number:05d}.safetensors", hwgrpo_vllm.named_digests(weights))

    def reload_weights(weights_iterator) -> None:
        for _, tensor in weights_iterator:
            head.weight.data.add_(tensor)

    runner = SimpleNamespace(reload_weights=reload_weights, get_model=lambda: torch.nn.Sequential(head))
    worker: Any = SimpleNamespace(device=torch.device("cpu"), model_runner=runner)
    hwgrpo_vllm.WorkerExtension.hwgrpo_load_weights(worker, str(tmp_path))
    assert head.cpu_linear().tolist() == [4.0, 4.0]


def test_where_weights_are_reformatted_loading_asks_first():
    def refuse() -> None:
        raise ValueError("set VLLM_ASCEND_ENABLE_NZ=0")

    worker = SimpleNamespace(_check_nz_disabled=refuse)
    with pytest.raises(ValueError, match="VLLM_ASCEND_ENABLE_NZ=0"):
        hwgrpo_vllm.load_weights(worker, [])
