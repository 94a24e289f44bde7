"""Run programs that attack the sandbox at every protection level, and write what they achieve to docs/sandbox.md.

`python scripts/drill_sandbox.py` writes the table; --check exits with 1 where a program achieves something else than
the page says; --smoke does so for the strongest level alone. Levels that this host lacks are left out.

As root each level is drilled twice: by a trainer of root's, and by one of another user. A drilled trainer is a process
of its own, with a secret in its environment and in a file; it is killed with all its processes at a deadline.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hwgrpo.errors import ConfigError
from hwgrpo.sandbox import linux_calls as linux
from hwgrpo.sandbox.limits import Limits
from hwgrpo.sandbox.program_run import kill_user
from hwgrpo.sandbox.protection import HIDDEN
from hwgrpo.sandbox.sandbox_pool import SandboxPool
from hwgrpo.sandbox.sandbox_worker import FIRST_PROGRAM_ID
from hwgrpo.support.child_processes import adopt_orphans, descendants, end_descendants

REPO = Path(__file__).resolve().parents[1]
PAGE = REPO / "docs" / "sandbox.md"
BEGIN, END = "<!-- drill -->", "<!-- end of drill -->"
SECRET = "canary-5b1f"
VARIANTS = {
    "namespaces": ("namespaces", "", ("namespaces", "seccomp", "landlock")),
    "namespaces, no seccomp or Landlock": ("namespaces", "seccomp,landlock", ("namespaces",)),
    "seccomp": ("seccomp", "", ("seccomp", "landlock")),
    "seccomp, no Landlock": ("seccomp", "landlock", ("seccomp",)),
    "none": ("none", "", ()),
}
"""Column -> the level, what is hidden from it, and what it must then use."""
LIMITS = Limits(seconds=0.6, memory_mib=512, scratch_mib=8, scratch_files=300, output_kib=256, file_mib=4)
WORKERS = 4
DEADLINE = 90.0
"""Seconds for a drilled trainer."""

ROWS: dict[str, str] = {
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "allocate 10 GB": "x = bytearray(10 << 30)\nprint('OPEN')",
    "endless output": "while True: print('x' * 1000)",
    "endless loop": "while True: pass",
    "sleep beyond the wall time": "import time\ntime.sleep(60)\nprint('OPEN')",
    "ignore all signals": (
        "import signal\nfor each in signal.valid_signals():\n    try: signal.signal(each, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass"
    ),
    "1000 threads": (
        "import threading, time\nfor _ in range(1000):\n"
        "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nprint('OPEN')"
    ),
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "leave a daemon behind": (
        "import os, time\nfor _ in range(2):\n    if os.fork(): os._exit(0)\n    os.setsid()\n"
        "for each in range(3): os.close(each)\ntime.sleep(60)"
    ),
    "connect to a socket": (
        "import socket\ns = socket.socket()\ns.settimeout(1)\ns.connect(('127.0.0.1', PORT))\nprint('OPEN')"
    ),
    "bind a socket": "import socket\ns = socket.socket()\ns.bind(('0.0.0.0', 0))\ns.listen()\nprint(OPEN_NET)",
    "connect to an abstract UNIX socket": (
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('\\0hwgrpo-drill-PORT')\nprint('OPEN')"
    ),
    "read a file outside": "print('OPEN' if 'SECRET' in open('FOLDER/secret').read() else '')",
    "write a file outside": "open('FOLDER/open/written', 'w').write('x')\nprint('OPEN')",
    "a symbolic link out of the scratch folder": (
        "import os\nos.symlink('FOLDER/open', 'link')\nopen('link/linked', 'w').write('x')\nprint('OPEN')"
    ),
    "the mode of a file outside": (
        "import os\nfile = 'FOLDER/changed'\n"
        "def by(flags): return lambda: os.fchmod(os.open(file, flags), 0o604)\n"
        "ways = [lambda: os.chmod(file, 0o604), by(os.O_RDONLY), by(3),\n"
        "        lambda: os.chmod(f'/proc/self/fd/{os.open(file, os.O_PATH)}', 0o604)]\n"
        "for way in ways:\n    try: way()\n    except OSError: pass\n"
        "print('OPEN' if os.stat(file).st_mode & 0o777 == 0o604 else '')"
    ),
    "the times of a file outside": (
        "import os\nfile = 'FOLDER/changed'\n"
        "for way in (lambda: file, lambda: os.open(file, os.O_RDONLY), lambda: os.open(file, 3)):\n"
        "    try: os.utime(way(), (7, 7))\n    except OSError: pass\n"
        "print('OPEN' if os.stat(file).st_mtime == 7 else '')"
    ),
    "empty a file outside": (
        "import os\nfile = 'FOLDER/emptied'\n"
        "ways = [lambda: os.truncate(file, 0), lambda: os.open(file, os.O_RDONLY | os.O_TRUNC),\n"
        "        lambda: os.open(file, 3 | os.O_TRUNC)]\n"
        "for way in ways:\n    try: way()\n    except OSError: pass\n"
        "print('OPEN' if os.stat(file).st_size == 0 else '')"
    ),
    "attributes, flags and owner of a file outside": (
        "import fcntl, os, struct\nfile = 'FOLDER/changed'\n"
        "def flag(mode): fcntl.ioctl(os.open(file, mode), 0x40086602, struct.pack('l', 0x40))\n"
        "ways = [lambda: os.setxattr(file, 'user.x', b'x'), lambda: os.chown(file, -1, os.getgid()),\n"
        "        lambda: flag(os.O_RDONLY), lambda: flag(3)]\n"
        "for way in ways:\n    try:\n        way()\n        print('OPEN')\n    except OSError: pass"
    ),
    "a huge file": "f = open('huge', 'wb')\nwhile f.tell() < 1 << 28: f.write(bytes(1 << 20))\nprint('OPEN')",
    "many files": "for each in range(100000): open(str(each), 'w').write('x')\nprint('OPEN')",
    "trace the trainer": (
        "import ctypes, os\nassert ctypes.CDLL(None).ptrace(0x4206, TRAINER, 0, 0) == 0\nprint('OPEN')"
    ),
    "trace the harness": (
        "import ctypes, os\nassert ctypes.CDLL(None).ptrace(0x4206, os.getppid(), 0, 0) == 0\nprint('OPEN')"
    ),
    "the trainer's environment in /proc": (
        "print('OPEN' if b'SECRET' in open('/proc/TRAINER/environ', 'rb').read() else '')"
    ),
    "the trainer's memory in /proc": "open('/proc/TRAINER/mem', 'rb')\nprint('OPEN')",
    "the trainer's descriptors in /proc": "import os\nprint('OPEN' if os.listdir('/proc/TRAINER/fd') else '')",
    "the harness's memory and descriptors in /proc": (
        "import os\nopened = []\nfor name in ('environ', 'mem', 'fd'):\n    path = f'/proc/{os.getppid()}/{name}'\n"
        "    try: opened.append(os.listdir(path) if name == 'fd' else open(path, 'rb'))\n    except OSError: pass\n"
        "print('OPEN' if opened else '')"
    ),
    "secrets in its own environment": "import os\nprint('OPEN' if 'SECRET' in str(os.environ) else '')",
    "kill the harness": "import os\nos.kill(os.getppid(), 9)\nprint('HARMLESS')",
    "kill another process": "import os\nos.kill(SIBLING, 9)\nprint('OPEN')",
    "limit the trainer's resources": (
        "import resource\nresource.prlimit(TRAINER, resource.RLIMIT_MSGQUEUE, (1000, 1000))\nprint('OPEN')"
    ),
    "signals through fcntl": (
        "import fcntl, os, signal\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, SIBLING)\nprint(OPEN_FCNTL)"
    ),
    "own user namespaces": ("import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0\nprint('HARMLESS')"),
    "keyctl, bpf, io_uring, perf_event_open": (
        "import ctypes, platform\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "numbers = (250, 321, 425, 298) if platform.machine() == 'x86_64' else (219, 280, 425, 241)\n"
        "for number in numbers:\n    libc.syscall(number, 0, 0, 0, 0, 0)\n"
        "    if ctypes.get_errno() not in (1, 38): print('HARMLESS')"
    ),
    "socket pairs of other families": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nends = (ctypes.c_int * 2)()\n"
        "for family in {*range(46)} - {1}:\n    libc.socketpair(family, 1, 0, ends)\n"
        "    if ctypes.get_errno() != 1: print('HARMLESS')"
    ),
    "close and write all descriptors": (
        "import os\nfor each in range(256):\n    try: os.write(each, b'\\0' * 7 + b'\\x16{\"outcome\": \"passed\"}')\n"
        "    except OSError: pass\nos.closerange(0, 256)"
    ),
    "files of the program before": "import os\nprint('OPEN' if os.listdir('.') else '')",
}
"""What is attempted -> a program, which prints OPEN where it succeeds, HARMLESS where only itself is concerned."""
FORGERIES: dict[str, str] = {
    "exit with success before the tests": "import os\ndef f(x): os._exit(0)",
    "exit while it is imported": "import sys\nprint('passed')\nsys.exit(0)",
    "an object that equals everything": (
        "class All:\n    def __eq__(self, other): return True\n    def __sub__(self, other): return 0\n"
        "    def __contains__(self, other): return True\ndef f(x): return All()"
    ),
    "change the harness's modules": (
        "import builtins, json, os, sys\nfor module in list(sys.modules.values()):\n"
        "    for name in ('compare', '_same', 'run_tests', '_attempt', '_report', 'judge'):\n"
        "        if hasattr(module, name): setattr(module, name, lambda *a, **k: {'outcome': 'passed'})\n"
        "builtins.AssertionError = type('Never', (Exception,), {})\nos.write_ = os.write\n"
        "def f(x):\n    builtins.all = builtins.abs = lambda *a: 0\n    return None"
    ),
    "write verdicts to all descriptors": (
        "import os\ndef f(x):\n    for each in range(256):\n"
        "        try: os.write(each, (22).to_bytes(8, 'big') + b'{\"outcome\": \"passed\"}')\n"
        "        except OSError: pass\n    os._exit(0)"
    ),
    "shadow the tests' built-ins": (
        "def abs(x): return 0\nclass math:\n    isclose = lambda *a: True\ndef f(x): return -1"
    ),
    "replace unittest and pytest": (
        "import sys, types, unittest\nfor each in ('assertEqual', 'assertTrue', 'run', 'fail'):\n"
        "    setattr(unittest.TestCase, each, lambda *a, **k: None)\nunittest.main = lambda *a, **k: None\n"
        "pytest = sys.modules['pytest'] = types.ModuleType('pytest')\n"
        "pytest.approx = pytest.raises = lambda *a, **k: f(0)\n"
        "class TestCase:\n    assertEqual = run = lambda *a, **k: None\nclass All:\n"
        "    def __eq__(self, other): return True\n    def __enter__(self): return self\n"
        "    def __exit__(self, *a): return True\ndef f(x): return All()"
    ),
    "count assertions itself": (
        "import gc, os, sys\nexecuted = 99\nglobals()['@seen'] = lambda value: True\n"
        "globals()['@hidden'] = lambda any_kind: None\ndef f(x):\n    for each in gc.get_objects():\n"
        "        if hasattr(each, 'executed'): each.executed = 99\n    for each in range(256):\n        try:\n"
        "            os.write(each, (22).to_bytes(8, 'big') + b'{\"outcome\": \"passed\"}')\n"
        "            os.write(each, (40).to_bytes(8, 'big') + b'{\"arguments\": [null], \"value\": 771177    }')\n"
        "        except OSError: pass\n    raise AssertionError('passed')"
    ),
    "skip the tests": (
        "import unittest\nclass SkipTest(unittest.SkipTest): pass\nSkipped = SkipTest\n"
        "def f(x): raise unittest.SkipTest('passed')"
    ),
    "search the harness's memory for expected values": (
        "import gc, os, re, sys\ndef f(x):\n    text = b''\n    frame = sys._getframe()\n"
        "    while frame:\n        text += repr(frame.f_locals).encode()\n        frame = frame.f_back\n"
        "    text += repr(gc.get_objects()).encode()\n    try:\n        memory = open('/proc/self/mem', 'rb')\n"
        "        for line in open('/proc/self/maps'):\n            ends, rights = line.split()[:2]\n"
        "            start, end = (int(each, 16) for each in ends.split('-'))\n"
        "            if 'rw' in rights and end - start < 1 << 26:\n"
        "                memory.seek(start)\n                text += memory.read(end - start)\n"
        "    except OSError: pass\n"
        "    found = re.search(rb'f\\((?:0|1|2)\\) ?== ?(\\d+)|- (\\d{6})', text)\n"
        "    return int(found[1] or found[2]) if found else None"
    ),
}
"""The same for verdicts: programs whose tests all fail, unless they are forged."""
TESTS = {
    "setup": (
        "import pytest, unittest\nclass TestF(unittest.TestCase):\n    def test_f(self):\n"
        "        self.assertEqual(f(4), 771177)\n@pytest.mark.parametrize('x', [5, 6])\ndef test_f(x):\n"
        "    assert f(x) == pytest.approx(771177)\nclass TestG:\n    def test_g(self):\n"
        "        with pytest.raises(ZeroDivisionError):\n            f(7)"
    ),
    "asserts": [
        *("assert f(0) == 771177", "assert abs(f(1) - 771177) < 1e-6", "assert math.isclose(f(2), 771177)"),
        "assert 3 in f(3)",
        *({"call": path, "argument": None} for path in (["TestF", "test_f"], ["test_f"], ["TestG", "test_g"])),
    ],
}
LEFT = "leave memory, semaphores and queues behind"
LEAVE = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
EEXIST, CREATE_NEW, MODE = 17, 0o3000, 0o600
for call, *arguments in (
    (libc.shmget, TRAINER, 4096, CREATE_NEW | MODE),
    (libc.semget, TRAINER, 1, CREATE_NEW | MODE),
    (libc.msgget, TRAINER, CREATE_NEW | MODE),
    (libc.mq_open, b'/hwgrpo-drill-TRAINER', 0o300, MODE, None),
):
    ctypes.set_errno(0)
    if call(*arguments) < 0 and ctypes.get_errno() == EEXIST: print('OPEN')
"""
"""Run more often than there are workers, one after the other: the objects of a program before are in the way."""
ALL = "kill all processes"
KILL_ALL = "import os, signal\nos.kill(-1, signal.SIGKILL)\nprint('HARMLESS')"
KINDS = ("contained", "harmless", "open")


def drill(column: str) -> None:
    """Be the trainer of a column: run all programs, and print a JSON line for each."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    level, hidden, parts = VARIANTS[column]
    os.environ[HIDDEN] = hidden
    adopt_orphans()
    with tempfile.TemporaryDirectory() as name, socket.socket() as server, socket.socket(socket.AF_UNIX) as abstract:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "secret").write_text(SECRET, encoding="ascii")
        (folder / "changed").write_text("x", encoding="ascii")
        (folder / "emptied").write_text("x", encoding="ascii")
        (folder / "open").mkdir()
        (folder / "open").chmod(0o777)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        abstract.bind(f"\0hwgrpo-drill-{port}")
        abstract.listen()
        sibling = subprocess.Popen(["/bin/sleep", "120"])
        try:
            pool = SandboxPool(level, LIMITS, WORKERS)
        except ConfigError as error:
            print(json.dumps({"lacks": str(error)}), flush=True)
            sibling.kill()
            return
        values = {"PORT": port, "FOLDER": folder, "TRAINER": os.getpid(), "SIBLING": sibling.pid, "SECRET": SECRET}
        if pool.parts == parts:
            _attack(pool, values)
        else:
            print(json.dumps({"lacks": f"it uses {pool.parts}"}), flush=True)
        pool.close()
        sibling.kill()
        sibling.wait(5)


def _attack(pool: SandboxPool, values: Mapping[str, Any]) -> None:
    isolated = "namespaces" in pool.parts
    own = {"OPEN_NET": repr("HARMLESS" if isolated else "OPEN"), "OPEN_FCNTL": repr("HARMLESS" if isolated else "OPEN")}

    def filled(source: str) -> str:
        for name, value in (*own.items(), *values.items()):
            source = source.replace(name, str(value))
        return source

    jobs: list[dict[str, Any]] = [{"source": filled(source), "inputs": [""]} for source in ROWS.values()]
    jobs += [{"source": source, "tests": TESTS} for source in FORGERIES.values()]
    results = pool.run(jobs)
    for name, (run,) in zip([*ROWS, *FORGERIES], results, strict=True):
        if name in FORGERIES:
            kind = "open" if "passed" in run["outcomes"] else "contained"
        else:
            kind = "open" if "OPEN" in run["stdout"] else "harmless" if "HARMLESS" in run["stdout"] else "contained"
            if name == "kill the harness" and run["detail"] == "its worker ended":
                kind = "harmless"  # a worker is replaced; other programs are not concerned
        _print(name, kind, run)
    deadline = time.monotonic() + 2
    while (left := len(descendants(os.getpid())) - 1 - 3 * len(pool._workers)) > 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    if left > 0 or (os.geteuid() == 0 and _processes_of_programs()):
        _print("leave a daemon behind", "open", left)
    leaves = {"source": filled(LEAVE), "inputs": [""]}
    runs = [pool.run([leaves])[0][0] for _ in range(WORKERS + 1)]
    _print(LEFT, "open" if any("OPEN" in run["stdout"] for run in runs) else "contained", runs[-1])
    _remove_left(values["TRAINER"])
    if pool.run([{"source": "print(input())", "inputs": ["7"]}])[0][0]["stdout"] != "7\n":
        raise SystemExit("a program without fault does not run any more")
    if os.geteuid() == 0 or isolated or "seccomp" in pool.parts or os.geteuid() >= FIRST_PROGRAM_ID:
        print(json.dumps({"begins": ALL}), flush=True)
        run = pool.run([{"source": KILL_ALL, "inputs": [""]}])[0][0]
        _print(ALL, "harmless" if "HARMLESS" in run["stdout"] or run["reason"] == "killed" else "contained", run)


def _remove_left(key: int) -> None:
    """Remove what programs left behind under a key, where nothing did so before."""
    libc = ctypes.CDLL(None)
    libc.shmctl(libc.shmget(key, 0, 0), 0, None)
    libc.semctl(libc.semget(key, 0, 0), 0, 0)
    libc.msgctl(libc.msgget(key, 0), 0, None)


def _print(name: str, kind: str, run: Any) -> None:
    print(json.dumps({"row": name, "kind": kind, "run": str(run)[:300]}), flush=True)


def _processes_of_programs() -> list[str]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = Path(f"/proc/{name}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[1]
            if parent == str(os.getpid()) and os.stat(f"/proc/{name}").st_uid >= FIRST_PROGRAM_ID:
                found.append(name)
        except OSError:
            continue
    return found


def results_of(column: str, user: int | None, verbose: bool = False) -> dict[str, str]:
    """Drill a column in a process of its own; return row -> kind, empty where this host lacks the level."""
    command = [sys.executable, __file__, "--drill", column, *(["--user", str(user)] if user is not None else [])]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file, tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        environment = {**os.environ, "DRILL_SECRET": SECRET, "TMPDIR": folder}  # a killed trainer leaves its files
        process = subprocess.Popen(command, stdout=file, env=environment, start_new_session=True)
        try:
            process.wait(DEADLINE)
        except subprocess.TimeoutExpired as error:
            raise SystemExit(f"the drill of {column} did not end") from error
        finally:
            for each in descendants(process.pid):
                os.kill(each, signal.SIGKILL)
            process.kill()
            if user is not None:
                kill_user(user)
        file.seek(0)
        output = file.read()
    kinds: dict[str, str] = {}
    begun = None
    for line in map(json.loads, output.splitlines()):
        if verbose:
            print(column, user, line, file=sys.stderr)
        if "lacks" in line:
            return {}
        begun = line.get("begins", begun)
        if "row" in line:
            kinds[line["row"]] = line["kind"]
    if begun is not None and begun not in kinds:
        kinds[begun] = "open"  # it killed the trainer
    elif process.returncode:
        raise SystemExit(f"the drill of {column} ended with {process.returncode}")
    return kinds


def become(user: int) -> None:
    """Become a user who can read Python and this repository, also where they are in root's own folder."""
    needed = [os.path.realpath(sys.base_prefix), sys.prefix, str(REPO)]
    hidden = {str(each) for path in needed for each in [Path(path), *Path(path).parents] if not each.stat().st_mode & 1}
    if hidden:
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
        for folder in sorted(hidden):
            below = [path for path in needed if f"{path}/".startswith(f"{folder}/")]
            opened = [os.open(path, os.O_PATH) for path in below]
            linux.mount("tmpfs", folder, "tmpfs", 0, "mode=0755")
            for path, number in zip(below, opened, strict=True):
                os.makedirs(path, exist_ok=True)
                linux.mount(f"/proc/self/fd/{number}", path, None, linux.MS_BIND | linux.MS_REC)
                os.close(number)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    os.environ["HOME"] = "/nonexistent"
    command = [each for each in sys.argv if each != "--user" and each != str(user)]
    os.execv(sys.executable, [sys.executable, *command])


def table(columns: list[str], verbose: bool = False) -> dict[str, dict[str, str]]:
    """Return row -> {column: kind}, kinds of root and of another user separated by " / " where they differ."""
    rows: dict[str, dict[str, str]] = {name: {} for name in (*ROWS, LEFT, ALL, *FORGERIES)}
    users: list[int | None] = [None]
    if os.geteuid() == 0:
        users.append(FIRST_PROGRAM_ID + (1 << 23) + os.getpid())
    cells = [(column, user) for column in columns for user in users]
    with ThreadPoolExecutor(2) as threads:
        # each drill of a user has a user of its own, who is killed after it
        found = list(
            threads.map(
                lambda each: results_of(
                    each[1][0], None if each[1][1] is None else each[1][1] + (each[0] << 23), verbose
                ),
                enumerate(cells),
            )
        )
    for column in columns:
        kinds = [result for (name, _), result in zip(cells, found, strict=True) if name == column and result]
        for row, cell in rows.items():
            seen = [result[row] for result in kinds if row in result]
            if seen:
                cell[column] = seen[0] if len({*seen}) == 1 else " / ".join(seen)
    return rows


def page_table(rows: Mapping[str, Mapping[str, str]]) -> str:
    """Return the table in Markdown."""
    lines = [f"| attempt | {' | '.join(VARIANTS)} |", f"|---|{'---|' * len(VARIANTS)}"]
    lines += [f"| {row} | {' | '.join(cells.get(column, '') for column in VARIANTS)} |" for row, cells in rows.items()]
    return "\n".join(lines) + "\n"


def read_table(text: str) -> dict[str, dict[str, str]]:
    """Return the table of the page."""
    lines = text.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    cells = [[each.strip() for each in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(cells[0][1:], row[1:], strict=True)) for row in cells[2:]} if cells else {}


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the page instead of writing it")
    parser.add_argument("--smoke", action="store_true", help="compare the strongest level alone")
    parser.add_argument("--verbose", action="store_true", help="print every result")
    parser.add_argument("--drill", choices=list(VARIANTS), help=argparse.SUPPRESS)
    parser.add_argument("--user", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.drill:
        if args.user is not None:
            become(args.user)
        drill(args.drill)
        end_descendants(5)
        return 0
    found = table(list(VARIANTS)[:1] if args.smoke else list(VARIANTS), args.verbose)
    text = PAGE.read_text(encoding="utf-8")
    if not args.check and not args.smoke:
        before, _, rest = text.partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{page_table(found)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
        return 0
    expected = read_table(text)
    wrong = []
    for row, cells in found.items():
        for column, kind in cells.items():
            said = expected.get(row, {}).get(column, "nothing")
            if kind != said and not (os.geteuid() and kind == said.split(" / ")[-1]):
                wrong.append(f"{row}, {column}: {kind}; the page says {said}")
    print("\n".join(wrong) or f"{sum(map(len, found.values()))} cells as docs/sandbox.md says")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
