"""Rollout on one vendor's device and training on another's: a simulated NPU trains, a server samples on the CPU.

tests/vllm/test_mixed_vendors.py does the same with a real vLLM server.
"""

from pathlib import Path

import pytest

from hwgrpo.config.load import to_yaml
from tests.support.devices import simulated_npu
from tests.support.numbers.rounding import GENTLE, LOGITS, STEP, assert_metrics_close, drift
from tests.support.runs import runs
from tests.support.servers import local_server, model_server
from tests.support.servers.fake_server import TOKEN

STEPS = 4
MODEL = next(word for word in runs.SMALL if word.startswith("model.path=")).removeprefix("model.path=")


def train(output: Path, server: model_server.Address, npus: int) -> str:
    """Train by responses of the server; return what was said."""
    words = (
        "model.dtype=float32",
        "trainer.tokens_per_micro_batch=4096",
        f"trainer.max_steps={STEPS}",
        *GENTLE,
        "observe.progress=plain",
        "rollout.engine=vllm_server",
        f"rollout.server.url={server.url}",
    )
    recipe = output.with_suffix(".yaml")
    recipe.write_text(to_yaml(runs.small(output, *words)))
    done = simulated_npu.train(str(recipe), npus=npus, HWGRPO_SERVER_TOKEN=TOKEN)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_an_npu_that_trains_by_a_server_on_the_cpu_learns_what_a_cpu_does(tmp_path: Path):
    with model_server.served(MODEL) as server:
        said = train(tmp_path / "npu", server, npus=1)
        assert "a folder: the trainer communicates by hccl and the server by gloo" in said
        assert set(server.ways()) == {"folder"}
        said = train(tmp_path / "cpu", server, npus=0)
        assert "through a process group over gloo" in said
        assert set(server.ways()) == {"group"}
    on_npu, on_cpu = runs.metrics(tmp_path / "npu"), runs.metrics(tmp_path / "cpu")
    assert len(on_npu) == len(on_cpu) == STEPS + 2
    assert_metrics_close(on_npu, on_cpu, drift(STEPS))
    gaps = [abs(line["rollout_corr/kl"]) for line in on_npu if "rollout_corr/kl" in line]
    assert len(gaps) == STEPS
    assert max(gaps) < STEP * LOGITS, "every response is of the weights that the NPU had"


@pytest.mark.slow
def test_two_npus_train_by_a_server_on_each_of_them_that_sleeps_meanwhile(tmp_path: Path):
    python = local_server.program(tmp_path)
    lines = python.read_text().splitlines(keepends=True)
    python.write_text("".join([lines[0], 'echo "sees $ASCEND_RT_VISIBLE_DEVICES"\n', *lines[1:]]))
    words = ("model.dtype=float32", "trainer.strategy=ddp", f"trainer.max_steps={STEPS}", *GENTLE)
    words += ("rollout.engine=vllm_server", f"rollout.server.python={python}", "observe.progress=plain")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(runs.small(tmp_path / "run", *words)))
    done = simulated_npu.train(str(recipe), npus=2, ranks=2)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert done.stdout.count("its sleep frees 0.0 MiB of the 0.0 MiB that it takes") == 2, "measured by each rank"
    logs = [(tmp_path / f"run/rollout-server-{number}.log").read_text() for number in (0, 1)]
    assert [log.splitlines()[0] for log in logs] == ["sees 0", "sees 1"]
    found = [line for line in runs.metrics(tmp_path / "run") if "rollout_corr/kl" in line]
    assert [line["rollout/servers_alive"] for line in found] == [2] * STEPS
    assert max(abs(line["rollout_corr/kl"]) for line in found) < STEP * LOGITS
