"""Weights through a process group: the trainer's side and the plugin's, over gloo, with workers that have no model."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hwgrpo.errors import ConfigError, RunError
from hwgrpo.planning.memory import SENT, Work, estimate
from hwgrpo.planning.model_shape import model_shape
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.policy_weights import ModuleWeights
from hwgrpo.rollout.server.engine import ServerEngine
from hwgrpo.rollout.server.http_client import Client, ServerProblem
from hwgrpo.rollout.server.server_owner import new_owner
from hwgrpo.rollout.server.vllm import vllm_server
from hwgrpo.rollout.server.weight_transfer import FolderTransfer, GroupTransfer, count_host_copies
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import group
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm.checksum import ChecksumError
from tests.rollout.served import SAMPLING, batch, parts_for
from tests.support.models.tiny import settings
from tests.support.servers.fake_server import TOKEN, FakeServer, FakeWorkers

GROUP = ("rollout.server.transfer=group", "rollout.server.weights_dir=null", "rollout.server.request_timeout=20")


@pytest.fixture(scope="module")
def workers():
    workers = FakeWorkers(2)
    yield workers
    workers.close()


@pytest.fixture
def server(workers, monkeypatch):
    monkeypatch.setenv("THE_TOKEN", TOKEN)
    workers.call("set_fails", False)
    server = FakeServer(workers=workers)
    yield server
    server.close()


@pytest.fixture
def make(server, tmp_path):
    engines = []

    def make(*overrides: str) -> ServerEngine:
        engines.append(vllm_server(parts_for(server.url, tmp_path, *GROUP, *overrides)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@torch.no_grad()
def set_weights(engine: ServerEngine, value: float) -> dict[str, torch.Tensor]:
    """Change the policy; return what a server must then have."""
    for parameter in engine._parts.model.parameters():
        parameter.add_(value)
    return {name: weight.clone() for name, weight in engine._parts.weights.full()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name


def test_every_worker_gets_all_weights_of_every_version_bit_for_bit(make, server, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(group, "BUCKET_BYTES", 4096)  # several buckets, and weights that are larger than one
    engine = make()
    for version in (1, 2):
        wanted = set_weights(engine, 0.125)
        engine.update_weights(version)
        for file in server.workers.files:
            assert_same(load_file(file), wanted)
        assert server.version == version
    assert engine.generate(batch("ab"), SAMPLING).weight_version == 2
    assert engine._transfer is not None
    assert len(engine._transfer._prepared.made) > 2, "there were several buckets"  # pyright: ignore
    assert not (tmp_path / "weights").exists()
    assert any("process group over gloo" in note for note in engine.notes)


def test_a_server_that_has_lost_its_weights_and_its_group_gets_those_of_before_again(make, server):
    engine = make()
    wanted = set_weights(engine, 0.5)
    engine.update_weights(1)
    set_weights(engine, 0.5)  # training goes on; what is sent again is what was sent
    server.version, server.group = -1, None
    assert engine.generate(batch("ab"), SAMPLING).weight_version == 1
    assert_same(server.weights, wanted)
    assert server.taken == [0, 1, 1]


def test_a_server_that_has_started_anew_is_met_in_a_new_group_at_the_first_try(make, server):
    engine = make("rollout.server.retries=0", "rollout.server.start_timeout=2")
    server.workers.call("hwgrpo_leave_group")
    server.group = None
    engine.update_weights(1)
    assert server.version == 1


def test_weights_that_nobody_takes_are_made_to_the_end_for_the_sake_of_other_ranks(make, server, monkeypatch):
    engine = make("rollout.server.retries=0", "rollout.server.start_timeout=2")
    names = [name for name, _ in engine._parts.weights.full()]
    whole, made = engine._parts.weights.full, []
    monkeypatch.setattr(engine._parts.weights, "full", lambda: (made.append(pair[0]) or pair for pair in whole()))

    def refuse(method: str, *arguments: Any) -> None:
        raise RuntimeError("no workers")

    monkeypatch.setattr(server.workers, "call", refuse)
    server.group = None
    with pytest.raises(RunError, match="no workers"):
        engine.update_weights(1)
    assert made == names


@pytest.mark.parametrize("way", ["fails to load", "dies"])
def test_a_worker_that_fails_in_a_transfer_is_noticed_at_once_and_told(make, server, way: str, request):
    if way == "dies":
        server.workers = FakeWorkers(2)
        request.addfinalizer(server.workers.close)
    patient = "rollout.server.request_timeout=300"
    engine = make("rollout.server.retries=0", "rollout.server.start_timeout=2", patient)
    set_weights(engine, 0.5)
    if way == "dies":
        server.receive = "die"
    else:
        server.workers.call("set_fails", True)
    began = time.monotonic()
    told = r"did not apply weights 1: .*" + ("no room for" if way == "fails to load" else "it died|broke")
    with pytest.raises(RunError, match=told):
        engine.update_weights(1)
    assert time.monotonic() - began < 150, "nobody waits for the time that requests may take (300 s)"


def test_after_a_failed_transfer_another_group_takes_the_same_weights(make, server):
    engine = make()
    wanted = set_weights(engine, 0.5)
    server.workers.call("set_fails", True)
    first = server.group

    def mended(method: str, *arguments: Any) -> None:
        server.workers.call = plain
        try:
            plain(method, *arguments)
        finally:
            plain("set_fails", False)

    plain, server.workers.call = server.workers.call, mended
    engine.update_weights(1)
    assert_same(server.weights, wanted)
    assert server.taken == [0, 1]
    assert server.group != first


def test_workers_that_do_not_come_are_waited_for_no_longer_than_a_request_may_take(make, server):
    engine = make("rollout.server.retries=0", "rollout.server.request_timeout=2")
    server.receive = "set_fails"  # they do something else
    with pytest.raises(RunError, match=r"did not apply weights 1.*did not join the group within 2 s"):
        engine.update_weights(1)


OFFERS = {
    "no offer": ({}, "the server offers no process group"),
    "another library": ({"library": "hccl", "workers": 2}, "the trainer communicates by gloo and the server by hccl"),
    "workers of no server": ({"library": "gloo", "workers": 10**9}, "a process group over gloo could not be made"),
    "half a worker": ({"library": "gloo", "workers": 1.5}, "a process group over gloo could not be made"),
    "a worker too many": ({"library": "gloo", "workers": 3}, "a process group over gloo could not be made"),
}


@pytest.mark.parametrize("case", OFFERS)
def test_without_a_common_group_auto_takes_a_folder_and_says_why_and_group_is_refused(make, server, case: str):
    server.offer, told = OFFERS[case]
    engine = make("rollout.server.transfer=auto", "rollout.server.request_timeout=3")
    engine.update_weights(1)
    assert server.weights.keys() == dict(engine._parts.weights.full()).keys()
    assert any(f"through a folder: {told}" in note for note in engine.notes)
    engine.close()
    with pytest.raises(ConfigError, match=re.escape(f"rollout.server.transfer='group': {told}")):
        make("rollout.server.request_timeout=3")


def test_auto_takes_the_group_where_both_have_the_same_library(make, server):
    engine = make("rollout.server.transfer=auto")
    assert server.group is not None
    assert any("process group" in note for note in engine.notes)


def test_where_there_is_no_place_to_meet_auto_takes_a_folder(make, monkeypatch):
    def refuse(*arguments: Any, **settings: Any) -> None:
        raise OSError("Cannot assign requested address")

    monkeypatch.setattr("socket.create_server", refuse)
    engine = make("rollout.server.transfer=auto")
    assert any("through a folder" in note and "Cannot assign requested address" in note for note in engine.notes)


@pytest.mark.parametrize("setting", ["model.lora.rank=4", "rollout.server.weights_dir=/somewhere"])
def test_what_goes_through_a_folder_alone_is_refused_with_group(setting: str):
    with pytest.raises(
        ConfigError, match=re.escape(setting.partition("=")[0]) + r".*transfer='group'|transfer='group'"
    ):
        settings("rollout.engine=vllm_server", "rollout.server.transfer=group", setting)


def test_the_meeting_point_is_no_address_that_others_reach(server):
    from hwgrpo.rollout.server.weights_group import _listen

    host, listening = _listen(server.url)
    assert (host, listening.getsockname()[0]) == ("127.0.0.1", "127.0.0.1")
    listening.close()


def test_a_library_is_named_with_the_version_that_both_sides_must_have(monkeypatch):
    import importlib
    from types import SimpleNamespace

    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(version=lambda: (2, 27, 3)))
    assert group.communication_library("gloo") == "gloo"
    assert group.communication_library("hccl") == "hccl"
    monkeypatch.setattr(torch.version, "hip", None)
    assert group.communication_library("nccl") == "nccl 2.27.3"
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert group.communication_library("nccl") == "rccl 2.27.3"


def test_a_weight_that_lives_only_until_the_next_is_copied_in_time():
    def one_after_the_other():
        place = torch.zeros(8)
        for number in range(3):
            yield str(number), place.fill_(number)

    (bucket,) = group.make_buckets(one_after_the_other(), torch.float32, torch.device("cpu"))
    assert [float(weight.mean()) for _, weight in group.unpack_bucket(bucket)] == [0.0, 1.0, 2.0]


def test_weights_of_all_kinds_come_out_of_a_parcel_as_they_went_in():
    weights = {
        "half": torch.randn(3, 5, dtype=torch.float64),
        "flag": torch.tensor([True, False, True]),
        "number": torch.tensor(7),
        "nothing": torch.zeros(0, 4),
        "odd": torch.arange(5, dtype=torch.int8),
        "transposed": torch.randn(4, 6).T,
        "nan": torch.tensor([float("nan"), float("inf")]),
    }
    made = list(group.make_buckets(iter(weights.items()), torch.bfloat16, torch.device("cpu")))
    found = dict(pair for bucket in made for pair in group.unpack_bucket(bucket))
    assert len(made) == 1
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        wanted = weight.to(torch.bfloat16) if weight.is_floating_point() else weight
        assert found[name].dtype == wanted.dtype
        assert found[name].shape == wanted.shape
        assert torch.equal(found[name].nan_to_num(), wanted.nan_to_num()), name


def changed(bucket: group.WeightBucket, how: str) -> group.WeightBucket:
    """Return a bucket as a transfer could leave it."""
    contents, body = json.loads(bucket.contents), bucket.body.clone()
    (_, dtype, shape, start, _) = contents[1]
    size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
    weight = body[start : start + size]
    if how == "a flipped bit":
        weight[size // 2] ^= 4
    elif how == "exchanged blocks":
        weight.copy_(weight.roll(64))
    elif how == "a stale tensor":
        weight.view(torch.float32).sub_(2**-10)
    elif how == "no checksums":
        contents = [entry[:4] for entry in contents]
    return group.WeightBucket(json.dumps(contents).encode(), body)


CHANGES = ("a flipped bit", "exchanged blocks", "a stale tensor", "no checksums")


@pytest.mark.parametrize("how", CHANGES)
def test_no_weight_of_a_bucket_that_has_changed_is_yielded(how: str):
    weights = {f"layer.{i}": torch.linspace(1, 2, 3000).view(3, 1000) * (1 + i) for i in range(3)}
    (bucket,) = group.make_buckets(iter(weights.items()), torch.float32, torch.device("cpu"))
    assert dict(group.unpack_bucket(bucket)).keys() == weights.keys()
    told = "layer.0 came without" if how == "no checksums" else r"layer.1 arrived changed: checksum \w{16}, sent \w{16}"
    with pytest.raises(ChecksumError, match=told):
        next(group.unpack_bucket(changed(bucket, how)))


@pytest.mark.parametrize("how", ["a flipped bit", "a stale tensor"])
@pytest.mark.parametrize("times", [1, 99])
def test_weights_that_change_on_the_way_are_sent_again_and_in_the_end_an_error(make, server, monkeypatch, how, times):
    monkeypatch.setattr(group, "BUCKET_BYTES", 4096)
    engine = make("rollout.server.retries=1", "rollout.server.start_timeout=1")
    wanted = set_weights(engine, 0.5)
    send, done = group.Group.send, []

    def damaged(self: group.Group, bucket: group.WeightBucket) -> None:
        done.append(len(json.loads(bucket.contents)) > 1 and len([each for each in done if each]) < times)
        send(self, changed(bucket, how) if done[-1] else bucket)

    monkeypatch.setattr(group.Group, "send", damaged)
    if times == 1:
        engine.update_weights(1)
        assert_same(server.weights, wanted)
        assert server.taken == [0, 1]
    else:
        with pytest.raises(RunError, match=r"\.weight arrived changed: checksum \w{16}, sent \w{16}. If it is so each"):
            engine.update_weights(1)
        assert server.taken == [0]


def test_rank_0_holds_as_many_bytes_of_sent_weights_as_a_plan_says(make, server, tmp_path: Path, monkeypatch):
    engine = make()
    engine.update_weights(1)
    parts = engine._parts
    transfer = engine._transfer
    assert isinstance(transfer, GroupTransfer)
    assert all(bucket.body.device.type == "cpu" for bucket in transfer._prepared.made)
    held = sum(bucket.body.nbytes for bucket in transfer._prepared.made)
    padding = group.ALIGNMENT * len(list(parts.weights.full()))
    assert planned_bytes(parts) <= held < planned_bytes(parts) + padding

    monkeypatch.setattr("hwgrpo.rollout.vllm.vllm_settings.MEMORY", str(tmp_path))
    sizes = []

    def count(client: Client, folder: Path, version: int, is_adapter: bool) -> None:
        sizes.append(sum(file.stat().st_size for file in folder.parent.glob("version-*/*.safetensors")))

    client = Client("http://here", TOKEN, 1)
    folder = FolderTransfer(None, torch.float32, new_owner(None, "run", take_over=False), count)
    for version in range(3):
        folder.prepare(version, parts.weights, None)
        folder.send(client)
        folder.discard_old()
    folder.close()
    in_memory = replace(parts, config=settings("rollout.engine=vllm_server", "rollout.server.transfer=folder"))
    headers = 2 * 4096
    assert planned_bytes(in_memory) <= max(sizes) < planned_bytes(in_memory) + headers
    assert sizes[2] == sizes[1] == 2 * sizes[0]


def test_weights_that_newer_ones_replaced_meanwhile_are_no_damaged_files(tmp_path: Path, monkeypatch):
    client = Client("http://here", TOKEN, 1)
    owner = new_owner(None, "run", take_over=False)
    transfer = FolderTransfer(str(tmp_path), torch.float32, owner, lambda *arguments: None)
    weights = ModuleWeights(torch.nn.Linear(2, 2))
    transfer.prepare(1, weights, None)
    transfer.send(client)
    assert transfer._folder is not None
    check = transfer._folder.check

    def replaced(version: int) -> None:
        assert transfer._folder is not None
        transfer.prepare(2, weights, None)
        next(transfer._folder.folder(version).glob("*.safetensors")).write_bytes(b"")
        check(version)

    monkeypatch.setattr(transfer._folder, "check", replaced)
    with pytest.raises(ServerProblem, match="weights 1 were replaced by newer ones"):
        transfer.send(client)
    monkeypatch.setattr(transfer._folder, "check", check)
    transfer.send(client)
    next(transfer._folder.folder(2).glob("*.safetensors")).write_bytes(b"")
    with pytest.raises(RunError, match="weights 2 cannot be sent: their files"):
        transfer.send(client)
    transfer.close()


def planned_bytes(parts: EngineParts) -> int:
    config = parts.config
    work = Work(
        torch.float32,
        "cuda",
        1,
        16,
        64,
        samples=False,
        sent_copies=count_host_copies(config.rollout.engine, config.rollout.server, config.model.lora),
    )
    return estimate(config, model_shape(config.model, parts.model.config), work).host[SENT]
