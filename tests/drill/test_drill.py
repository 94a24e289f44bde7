"""Every fault done to a run for real; what it computes in the end is what the undisturbed run computes.

docs/faults.md tells users the same; its rows are those drilled here.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hwgrpo.config.load import to_yaml
from hwgrpo.support.jsonlines import read_lines
from hwgrpo.training.checkpoint import restore
from tests.support.devices import simulated_npu
from tests.support.numbers.rounding import GENTLE, assert_metrics_close, drift
from tests.support.processes import ranks
from tests.support.processes.launch import ROOT
from tests.support.runs import runs
from tests.support.runs.full_disk import small_disk
from tests.support.servers import local_server, model_server
from tests.support.servers.fake_server import TOKEN

Told = Callable[[str, str, str], None]
WORDS = ("trainer.save_every=2", "trainer.validate_at_start=false", "trainer.max_steps=6")
LONG = (*WORDS, "trainer.save_every=20", "trainer.max_steps=60")
"""A signal comes in time: a step takes 10 ms on a fast processor."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the run computes when nothing happens."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert runs.forked(lambda: runs.run(folder, *WORDS)) == 0
    return runs.everything(folder)


@pytest.fixture(scope="module")
def long_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the long run computes when nothing happens."""
    folder = tmp_path_factory.mktemp("long") / "run"
    assert runs.forked(lambda: runs.run(folder, *LONG)) == 0
    return runs.everything(folder)


def resumed(folder: Path, *more: str) -> dict:
    """Start the run again and return all that it computed."""
    assert runs.forked(lambda: runs.run(folder, *WORDS, *more)) == 0
    return runs.everything(folder)


@contextmanager
def command(folder: Path, *words: str, processes: int = 1, restarts: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Start `hwgrpo train` as a user does, in a process of its own; end it with all its children."""
    recipe = folder.with_suffix(".yaml")
    recipe.write_text(to_yaml(runs.small(folder, *words)))
    start = [sys.executable, "-m"]
    if processes > 1:
        start += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        start += [f"--max-restarts={restarts}", "-m"]
    path = os.pathsep.join(str(ROOT / part) for part in (".", "backends", "kernels"))
    process = subprocess.Popen(
        [*start, "hwgrpo", "train", str(recipe)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for_step(folder: Path, step: int) -> None:
    """Wait until a run has logged a step."""
    for _ in range(6000):
        file = folder / "metrics.jsonl"
        if file.exists() and any(line.get("step", 0) >= step for line in read_lines(file)):
            return
        time.sleep(0.02)
    raise AssertionError(f"{folder} never came to step {step}")


def workers(launcher: int) -> dict[int, int]:
    """Return the process of each rank below a launcher."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int(re.search(r"PPid:\s+(\d+)", (entry / "status").read_text())[1])  # type: ignore[index]
                variables = (entry / "environ").read_bytes().split(b"\0")
            except (OSError, TypeError):
                continue
            rank = next((v for v in variables if v.startswith(b"RANK=")), None)
            if parent == launcher and rank:
                found[int(rank.removeprefix(b"RANK="))] = int(entry.name)
    return found


def test_sigterm_saves_what_is_done_exits_0_and_loses_nothing(tmp_path: Path, long_undisturbed: dict, told: Told):
    with command(tmp_path / "run", *LONG) as process:
        wait_for_step(tmp_path / "run", 3)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        took = time.monotonic() - began
    assert process.returncode == 0, output
    newest, _ = restore.newest(tmp_path / "run/checkpoints")
    assert newest is not None
    steps = [line["step"] for line in read_lines(tmp_path / "run/metrics.jsonl")]
    assert 3 <= newest.step == max(steps) < 60, "no finished step is lost"
    assert resumed(tmp_path / "run", *LONG) == long_undisturbed
    told("SIGTERM", f"saved step {newest.step}, exit 0 after {took:.1f} s", "nothing")


def test_sigkill_costs_the_steps_since_the_last_checkpoint_which_are_done_again(
    tmp_path: Path, long_undisturbed: dict, told: Told
):
    with command(tmp_path / "run", *LONG) as process:
        runs.wait_for_checkpoint(tmp_path / "run", 20)
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    newest, _ = restore.newest(tmp_path / "run/checkpoints")
    assert newest is not None
    assert newest.step < 60
    assert resumed(tmp_path / "run", *LONG) == long_undisturbed
    told("SIGKILL", f"resumed from step {newest.step}, bitwise equal", "nothing")


def test_a_rank_that_dies_ends_the_others_and_all_start_again(tmp_path: Path, told: Told):
    words = ("trainer.strategy=ddp", *LONG, "observe.progress=plain")
    assert ranks.forked(2, lambda _: runs.run(tmp_path / "whole", *words)) == [0, 0]
    with command(tmp_path / "run", *words, processes=2, restarts=1) as process:
        runs.wait_for_checkpoint(tmp_path / "run", 20)
        os.kill(workers(process.pid)[1], signal.SIGKILL)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
    assert re.search(r"continuing after step [24]0\b", output), output
    assert runs.everything(tmp_path / "run") == runs.everything(tmp_path / "whole")
    told("a rank is killed", "torchrun ended the other and started both again; bitwise equal", "nothing")


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, undisturbed: dict, told: Told, capfd):
    assert runs.forked(lambda: runs.run(tmp_path / "run", *WORDS, "trainer.max_steps=4")) == 0
    file = tmp_path / "run/checkpoints/step-00000004/moments-rank0.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert resumed(tmp_path / "run", "observe.progress=plain") == undisturbed
    assert "step-00000004/moments-rank0.safetensors is damaged" in capfd.readouterr().out
    told("one bit of a checkpoint flips", "named, resumed from the one before; bitwise equal", "nothing")


def test_a_full_disk_keeps_the_last_checkpoint_and_the_run_goes_on_once_there_is_room(
    tmp_path: Path, undisturbed: dict, told: Told, capfd
):
    assert runs.forked(lambda: runs.run(tmp_path / "size", *WORDS, "trainer.max_steps=2")) == 0
    size = sum(file.stat().st_size for file in (tmp_path / "size/checkpoints/step-00000002").iterdir())
    (tmp_path / "run").mkdir()
    with small_disk(tmp_path / "run/checkpoints", 6 * size) as disk:
        filler = tmp_path / "run/checkpoints/filler"
        filler.write_bytes(bytes(shutil.disk_usage(disk).free - size * 3 // 2))
        assert runs.forked(lambda: runs.run(tmp_path / "run", *WORDS)) != 0
        said = capfd.readouterr().err
        assert "No space left on device" in said, said
        assert "the run resumes from step-00000002" in said
        filler.unlink()
        assert resumed(tmp_path / "run") == undisturbed
    told("the disk is full", "the run ended and said so; with room again it goes on; bitwise equal", "nothing")


def test_an_accelerator_with_too_little_memory_takes_smaller_micro_batches(tmp_path: Path, told: Told):
    words = (
        "model.path=builtin://tiny?task=sort&steps=150&batch=64",
        "model.dtype=float32",
        "trainer.prompts_per_step=32",
        "data.validation_max_rows=8",
        "trainer.validation_n=0",
        "observe.loggers=[jsonl]",
        "observe.progress=plain",
        "trainer.max_steps=3",
        "trainer.validate_at_start=false",
        *GENTLE,
    )

    def train(name: str, megabytes: int, tokens: int) -> str:
        more = (f"trainer.output_dir={tmp_path / name}", f"trainer.tokens_per_micro_batch={tokens}")
        recipe = str(ROOT / "configs/tiny_sort.yaml")
        done = simulated_npu.train(recipe, *words, *more, npus=1, SIMULATED_NPU_MB=str(megabytes))
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    said = train("scarce", 14, 4096)
    smaller = [int(n.replace(",", "")) for n in re.findall(r"repeated with ([\d,]+), and so from here on", said)]
    assert smaller, said
    train("enough", 4096, smaller[-1])
    assert_metrics_close(runs.metrics(tmp_path / "scarce"), runs.metrics(tmp_path / "enough"), drift(3))
    told("a device runs out of memory", f"micro-batches of {smaller[-1]} tokens, the same numbers", "nothing")


def test_gradients_that_are_not_finite_end_the_run_with_good_weights_saved(tmp_path: Path, told: Told, capfd):
    words = (*WORDS, "trainer.save_every=1", "trainer.max_skipped_updates=1", "observe.progress=plain")
    assert runs.forked(lambda: runs.run(tmp_path / "run", *words, "trainer.max_steps=2")) == 0
    capfd.readouterr()
    # a learning rate at which weights overflow in one update: what it then computes is no number any more
    assert runs.forked(lambda: runs.run(tmp_path / "run", *words, "optim.lr=1e38")) != 0
    said = capfd.readouterr()
    assert re.search(r"not finite", said.out + said.err), said
    newest, problems = restore.newest(tmp_path / "run/checkpoints")
    assert newest is not None
    assert not problems
    told(
        "a gradient is not finite",
        "the run ended and said why; checkpoints before it are whole",
        "nothing that was saved",
    )


REWARD = """
import time

def hangs_now_and_then(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str.startswith("1"):
        time.sleep(3600)
    return 1.0 if solution_str == ground_truth else 0.1 * len(solution_str)
"""


def test_a_reward_that_hangs_costs_its_samples(tmp_path: Path, told: Told):
    (tmp_path / "rewards.py").write_text(REWARD)
    costs = "timeout: 0.5, on_timeout: mask_sample"
    reward = f"reward.functions=[{{name: '{tmp_path}/rewards.py:hangs_now_and_then', {costs}}}]"
    assert runs.forked(lambda: runs.run(tmp_path / "run", *WORDS, "trainer.max_steps=2", reward)) == 0
    counts = [line.get("reward_failures/timeouts/hangs_now_and_then", 0) for line in runs.metrics(tmp_path / "run")]
    assert sum(counts) > 0
    told("a reward hangs", f"{sum(counts):.0f} samples stopped after 0.5 s and taken out", "those samples")


def test_a_response_that_does_not_end_costs_its_group(tmp_path: Path, told: Told, monkeypatch):
    monkeypatch.setenv("HWGRPO_SERVER_TOKEN", TOKEN)
    with model_server.served(next(word for word in runs.SMALL if "model.path" in word).partition("=")[2]) as server:
        words = (*WORDS, "trainer.max_steps=2", "rollout.engine=vllm_server", f"rollout.server.url={server.url}")
        assert runs.forked(lambda: runs.run(tmp_path / "whole", *words)) == 0
        stuck = next(read_lines(tmp_path / "whole/completions.jsonl"))
        server.stick(stuck["prompt"])
        assert runs.forked(lambda: runs.run(tmp_path / "run", *words, "rollout.group_timeout=2")) == 0
    dropped = [line for line in read_lines(tmp_path / "run/completions.jsonl") if "dropped" in line]
    assert dropped[0]["uid"] == stuck["uid"]
    counts = [line["rollout/groups_dropped"] for line in runs.metrics(tmp_path / "run") if "reward" in line]
    assert sum(counts) == len(dropped)
    told("a response does not end", f"{sum(counts):.0f} groups dropped after twice 2 s", "those groups")


def test_a_rollout_server_that_is_killed_comes_back_with_the_current_weights(tmp_path: Path, told: Told):
    model = "model.path=builtin://tiny?task=sort&layers=1&steps=30&batch=32&digits=3&head=32"  # vLLM's on a CPU, too
    words = (*WORDS, model, "rollout.engine=vllm_server", f"rollout.server.python={local_server.program(tmp_path)}")
    assert runs.forked(lambda: runs.run(tmp_path / "whole", *words)) == 0
    held = tmp_path / "held"
    hold = f"rollout.server.env={{HOLD_FILE: '{held}', HOLD_AT: '14'}}"
    kill = f"until [ -f {held} ]; do sleep 0.02; done; kill -KILL $(cat {held})"
    with subprocess.Popen(["bash", "-c", kill]) as killer:
        try:
            assert runs.forked(lambda: runs.run(tmp_path / "run", *words, hold)) == 0
        finally:
            killer.terminate()
    assert killer.returncode == 0, "no server was killed"
    found, expected = runs.everything(tmp_path / "run"), runs.everything(tmp_path / "whole")
    counts = [
        {name: line.pop(f"rollout/server_{name}", 0) for name in ("restarts", "retries")}
        for line in (*found["metrics"], *expected["metrics"])
    ]
    assert counts[0] == counts[-1] == {"restarts": 0, "retries": 0}
    again = max(line["retries"] for line in counts)
    assert again >= 1
    assert max(line["restarts"] for line in counts) == 1
    assert found == expected
    log = (tmp_path / "run/rollout-server.log").read_text()
    assert re.findall(r"weights (\d+)", log) == ["0", "0", "1", "2", "2", "3", "4", "5", "6"], log
    told("the rollout server is killed", f"started again, weights 2 again, {again:.0f} requests repeated", "nothing")


def test_the_page_on_faults_has_a_row_for_each_drill():
    table = (ROOT / "docs/faults.md").read_text().partition("\n| fault |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (?!---)([^|]+) \|", table, flags=re.M)
    drilled = re.findall(r'^    told\(\s*"([^"]+)"', Path(__file__).read_text(), flags=re.M)
    assert sorted(rows) == sorted(drilled)
