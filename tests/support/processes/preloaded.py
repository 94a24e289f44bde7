"""Commands run by processes that are forked from one that has imported torch and the project, which costs seconds.

`run` does what `python WORDS` or `torchrun --nproc-per-node RANKS WORDS` does, without torchrun's own process. It is
for tests of what ranks compute; those of how torchrun starts and ends them use `launch.torchrun`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

MODULES = (
    *("torch", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers", "peft", "hwgrpo.cli.main"),
    *("transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3"),
    *("hwgrpo.training.setup", "hwgrpo.training.finish", "hwgrpo.training.loop", "hwgrpo.rollout.local.engine"),
    *("hwgrpo.training.strategies.single", "hwgrpo.training.strategies.ddp", "hwgrpo.training.strategies.fsdp2"),
    *("hwgrpo.cli.train", "hwgrpo_kernels.rows_torch", "torch.utils.tensorboard"),
)
"""Modules that the first process imports."""
READ_BY_IMPORTS = ("PYTHONPATH", "SIMULATED_", "TORCH_")
"""Prefixes of variables that imports read; the number of simulated devices is read later."""
PYTHON = sys.executable
"""Kept from the start: a test may let `sys.executable` be a program of `preloaded_programs`."""
_servers: dict[tuple[str, ...], subprocess.Popen[str]] = {}


def run(
    ranks: int,
    *words: str,
    env: Mapping[str, str],
    also: Sequence[str] = (),
    cwd: Path | None = None,
    limit_s: float = 280,
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` to its end, as one process (0 ranks) or by ranks as torchrun starts them.

    Args:
        ranks: processes of a group; the others are ended where one fails. 0 for a process without a group.
        words: what follows `python`: a script, `-m MODULE` or `-c CODE`, and its arguments.
        env: all variables of the processes. Those that matter to imports choose the process that is forked.
        also: modules to import beside `MODULES`.
        cwd: folder of the processes, this one's if left out.
        limit_s: seconds after which processes are killed.
    """
    server = _server(env, also)
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        request = {"ranks": ranks, "words": words, "env": {**env}, "out": folder, "limit": limit_s}
        request["cwd"] = str(cwd or Path.cwd())
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        statuses = json.loads(server.stdout.readline())
        out, err = ((Path(folder) / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    code = statuses[0] if ranks == 0 else int(any(statuses))
    if ranks and any(statuses):
        err += f"\nranks ended with {statuses}"
    return subprocess.CompletedProcess([sys.executable, *words], code, out, err)


def _server(env: Mapping[str, str], also: Sequence[str]) -> subprocess.Popen[str]:
    """Return the process to fork from, for what imports find; start it the first time."""
    read = [name for name in sorted(env) if name.startswith(READ_BY_IMPORTS) and not name.endswith("_DEVICES")]
    key = (*(f"{name}={env[name]}" for name in read), *also)
    if key not in _servers:
        command = [PYTHON, __file__, *MODULES, *also]
        _servers[key] = subprocess.Popen(command, env={**env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        atexit.register(_end, _servers[key])
    return _servers[key]


def _end(server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None
    server.stdin.close()  # which ends its loop
    server.wait()


def _serve() -> None:
    """Import, then answer each line of standard input, a request, by the statuses of its processes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for module in sys.argv[1:]:
        import_module(module)
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # a collection would copy what is shared
    for line in sys.stdin:
        request = json.loads(line)
        port = _free_port()
        children = []
        for rank in range(max(request["ranks"], 1)):
            child = os.fork()
            if child == 0:
                answers.close()
                os._exit(_ended(lambda: _become(request, rank, port)))  # noqa: B023
            children.append(child)
        answers.write(json.dumps(_wait(children, request["limit"])) + "\n")
        answers.flush()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _wait(children: list[int], limit_s: float) -> list[int]:
    """Return the exit codes, or minus the signals, of processes; where one fails, the others are ended."""
    statuses: dict[int, int] = {}
    terminated, end = False, time.monotonic() + limit_s
    while len(statuses) < len(children):
        for child in (child for child in children if child not in statuses):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                statuses[child] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
            elif any(statuses.values()) and not terminated:
                os.kill(child, signal.SIGTERM)
        if any(statuses.values()) and not terminated:
            terminated, end = True, min(end, time.monotonic() + 10)
        time.sleep(0.01)
    return [statuses[child] for child in children]


def _ended(body: Callable[[], None]) -> int:
    """Run what a process is for, end it as the interpreter does but for taking itself apart; return its exit code."""
    code = 0
    try:
        body()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _become(request: dict, rank: int, port: int) -> None:
    """Do what the process was asked for."""
    os.environ.clear()
    os.environ.update(request["env"])
    if request["ranks"]:  # what torchrun sets
        world = str(request["ranks"])
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "preloaded"}
    os.chdir(request["cwd"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    out = Path(request["out"])
    files = [os.open(out / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in ("stdout", "stderr")]
    for number, file in enumerate((nothing, *files)):
        os.dup2(file, number)
        os.close(file)
    first, *arguments = request["words"]
    if first == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(arguments[0], {"__name__": "__main__"})
    else:
        sys.argv = [first, *arguments]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    _serve()
