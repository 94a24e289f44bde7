"""Real vLLM with several ranks, and beside a trainer on another vendor's device: every rank samples with the policy.

The trainer's log-probs of what vLLM sampled are vLLM's own to 1e-5 in every step, over all ranks: after an update that
a rank or a server has not got, they are apart by far more.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device

from hwgrpo.config import load_config
from hwgrpo.config.load import to_yaml
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.server.http_client import Client
from hwgrpo.rollout.server.server_process import ServerProcess, free_ports
from hwgrpo.rollout.server.vllm import VllmServer
from tests.support.devices import simulated_npu
from tests.support.numbers.rounding import GENTLE
from tests.support.processes.deepspeed_package import with_deepspeed
from tests.support.processes.launch import ROOT, forked
from tests.support.runs import runs
from tests.vllm import vllm_environment

pytestmark = pytest.mark.slow

STEPS = 3
TOKEN = "of-the-test"
SERVER = vllm_environment.ONE_PROCESS | vllm_environment.NOT_COMPILED
"""Variables of the servers."""
WORDS = (
    "model.path=builtin://tiny?task=sort&head=32&steps=30&batch=32&digits=3",
    "model.dtype=float32",
    vllm_environment.EXECUTOR,
    "rollout.kv_cache_gb=0.5",
    "trainer.tokens_per_micro_batch=4096",
    "trainer.validate_at_start=false",
    "observe.progress=plain",
    f"trainer.max_steps={STEPS}",
)
AHEAD = ("rollout.max_staleness=1", "algorithm.correction.name=token_truncate")


@pytest.fixture(scope="module", autouse=True)
def _token() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HWGRPO_SERVER_TOKEN", TOKEN)
        yield


@pytest.fixture(scope="module")
def servers(_token, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Two servers for all tests; each run finds the weights of the one before and brings its own."""
    folder = tmp_path_factory.mktemp("server")
    python = f"rollout.server.python={vllm_environment.vllm_python()}"
    config = runs.small(folder, *WORDS, "rollout.engine=vllm_server", python)
    parts = EngineParts(config, None, None, None, Device(BACKEND), torch.float32)  # pyright: ignore
    dialect = VllmServer()
    environment = dialect.environment(BACKEND, TOKEN, SERVER)
    ports = free_ports("127.0.0.1", 2)
    processes = [
        ServerProcess(dialect.command(parts, None, "127.0.0.1", port), environment, folder / f"log-{port}")
        for port in ports
    ]
    clients = [Client(f"http://127.0.0.1:{port}", TOKEN, 1 << 20) for port in ports]
    try:
        for process in processes:
            process.start()
        for process, client in zip(processes, clients, strict=True):
            process.wait_until_healthy(client, 600)
        yield [client.url for client in clients]
    finally:
        for process in processes:
            process.stop()


@pytest.fixture(scope="module")
def server(servers: list[str]) -> str:
    return servers[0]


def recipe(output: Path, *more: str) -> str:
    path = output.with_suffix(".yaml")
    path.write_text(to_yaml(runs.small(output, *WORDS, *more)))
    return str(path)


def served(server: str, *more: str) -> tuple[str, ...]:
    return ("rollout.engine=vllm_server", f"rollout.server.url={server}", *more)


def steps_of(output: Path) -> list[dict]:
    found = [line for line in runs.metrics(output) if "critic/rewards/mean" in line]
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    return found


def assert_on_its_own_weights(output: Path) -> list[dict]:
    found = steps_of(output)
    for line in found:
        assert abs(line["rollout_corr/kl"]) < 1e-5
        assert line["rollout_corr/rollout_is_eff_sample_size"] > 0.999
    assert any(line["actor/grad_norm"] > 1e-3 for line in found), "the weights have changed"
    return found


def test_a_simulated_npu_trains_by_a_server_that_auto_finds_and_starts(tmp_path: Path):
    words = (
        "rollout.engine=auto",
        f"rollout.server.python={vllm_environment.vllm_python()}",
        f"rollout.server.env={json.dumps(SERVER)}",
        "rollout.sleep_mode=never",  # vLLM's CPU build cannot
        "rollout.enforce_eager=true",  # the default for an NPU compiles the model, by the CPU's compiler here
    )
    done = simulated_npu.train(recipe(tmp_path / "run", *words), npus=1)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "rollout.engine=vllm_server (auto), shared: on the training devices, where it stays awake" in done.stdout
    assert "a folder: the trainer communicates by hccl and the server by gloo" in done.stdout
    assert_on_its_own_weights(tmp_path / "run")
    assert load_config(tmp_path / "run/config.yaml").rollout.engine == "vllm_server", "which a resumed run uses, too"


def test_every_strategy_draws_the_curve_of_one_process_on_a_server(server: str, tmp_path: Path):
    """Not to the last bit: vLLM's sums depend on which requests it computes together."""
    zero = {f"zero-{n}": ["trainer.strategy=deepspeed", f"trainer.deepspeed.stage={n}"] for n in (1, 3)}
    ways = {"single": [], "ddp": ["trainer.strategy=ddp"], "fsdp2": ["trainer.strategy=fsdp2"], **zero}
    steps = 4
    own = (
        *("model.path=builtin://tiny?task=sort&head=32", "data.validation_max_rows=8", "observe.loggers=[jsonl]"),
        f"trainer.max_steps={steps}",
    )
    every = [*WORDS[1:-1], *served(server), *own, "trainer.prompts_per_step=32", *GENTLE]
    curves = {}
    for ranks, names in ((1, ["single"]), (2, list(ways)[1:])):
        each = [["tiny_sort", *every, *ways[name], f"trainer.output_dir={tmp_path / name}"] for name in names]
        done = with_deepspeed(ranks, str(ROOT / "tests/support/runs/train_worker.py"), "gloo", json.dumps(each))
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        assert done.stdout.count("through a process group over gloo") == len(names)
        curves |= {name: [line for line in runs.metrics(tmp_path / name) if "reward" in line] for name in names}
    alone = [line["reward"] for line in curves["single"]]
    assert sum(alone[-2:]) > sum(alone[:2]) + 0.1, "a curve that does not rise compares nothing"
    for name, curve in curves.items():
        assert [line["step"] for line in curve] == list(range(1, steps + 1))
        assert max(abs(line["rollout_corr/kl"]) for line in curve) < 1e-5, name
        assert min(line["rollout_corr/rollout_is_eff_sample_size"] for line in curve) > 0.999, name
        assert max(line["actor/grad_norm"] for line in curve) > 1e-3, "the weights have changed"
        assert [line["rollout/server_retries"] for line in curve] == [0.0] * steps, name
        apart = [abs(line["reward"] - reward) for line, reward in zip(curve, alone, strict=True)]
        assert apart[0] < 0.02, (name, "sampled with the same weights")
        assert max(apart) < 0.1, (name, apart)


def test_two_ranks_sample_ahead_on_two_servers(servers: list[str], tmp_path: Path):
    words = served(f"[{','.join(servers)}]", *AHEAD, "trainer.strategy=ddp")
    done = forked(2, "-m", "hwgrpo", "train", recipe(tmp_path / "run", *words))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    found = steps_of(tmp_path / "run")
    assert [line["rollout/staleness_max"] for line in found] == [0, 1, 1]
    assert [line["rollout/servers_alive"] for line in found] == [2] * STEPS
    gaps = [abs(line["rollout_corr/k3_kl"]) for line in found]
    assert gaps[0] < 1e-9 < min(gaps[1:]), "the policy has moved since"
