"""Two launchers on one host, started by the line that `hwgrpo launch` prints for two nodes."""

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from hwgrpo.cli.main import main
from hwgrpo.config.load import to_yaml
from tests.support.processes.launch import ROOT
from tests.support.runs import runs

pytestmark = pytest.mark.slow


def children(parent: int) -> list[int]:
    """Return the processes that a process has started."""
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def test_a_rank_that_dies_on_one_of_two_nodes_is_started_again_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Without a store for each start, the ranks that are started again wait for those that died."""
    words = ("trainer.save_every=10", "trainer.max_steps=40", "trainer.strategy=ddp", "observe.progress=plain")
    recipe = tmp_path / "small.yaml"
    recipe.write_text(to_yaml(runs.small(tmp_path / "run", *words)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"localhost:{free.getsockname()[1]}"
    assert main(["launch", str(recipe), "--nodes", "2", "--rendezvous", place, "--max-restarts", "1"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    path = os.pathsep.join(str(ROOT / part) for part in (".", "backends", "kernels"))
    logs = [tmp_path / f"node{n}.log" for n in (1, 2)]
    nodes = [
        subprocess.Popen(
            ["bash", "-c", f"exec env {line} >{log} 2>&1"],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        for log in logs
    ]
    try:
        runs.wait_for_checkpoint(tmp_path / "run", 10)
        os.kill(children(nodes[1].pid)[0], signal.SIGKILL)
        codes = [node.wait(timeout=150) for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()
    said = "".join(log.read_text() for log in logs)
    assert codes == [0, 0], said
    assert re.search(r"continuing after step [123]0\b", said), said
    assert max(line["step"] for line in runs.metrics(tmp_path / "run")) == 40
