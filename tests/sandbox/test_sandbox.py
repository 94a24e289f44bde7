"""The sandbox: what a program can reach and use at each level, and how its runs end."""

import contextlib
import errno
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from hwgrpo.catalog import SANDBOX_LEVELS
from hwgrpo.errors import ConfigError
from hwgrpo.sandbox.limits import Limits
from hwgrpo.sandbox.protection import HIDDEN, LEVELS
from hwgrpo.sandbox.sandbox_pool import SandboxPool
from hwgrpo.sandbox.seccomp_filter import (
    ALLOW,
    ALLOWED,
    AND,
    ANY_BIT,
    EQUAL,
    EXTENDED_ATTRIBUTES,
    GREATER_OR_EQUAL,
    LOAD,
    MACHINES,
    PROCESS,
    RETURN,
    WITHOUT_EFFECT,
    seccomp_program,
)
from hwgrpo.support.child_processes import descendants

REPO = Path(__file__).parents[2]
CALLS = {
    "openat": (257, 56),
    "socketpair": (53, 199),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "kill": (62, 129),
    "truncate": (76, 45),
    "fchownat": (260, 54),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
"""Calls that the filter decides by their arguments or does not list -> their numbers on x86_64 and aarch64."""
SHORT = Limits(seconds=1.5, memory_mib=256, output_kib=64)


def host_has_namespaces():
    command = ["unshare", "--user", "--map-root-user", "--mount", "--net", "--pid", "--fork"]
    mounting = ["mount", "-t", "tmpfs", "none", "/tmp"]
    return shutil.which("unshare") and subprocess.run([*command, *mounting], capture_output=True).returncode == 0


@pytest.fixture(scope="module", params=list(LEVELS))
def pool(request):
    """A pool of each level; that of namespaces where util-linux can make them, too."""
    if request.param == "namespaces" and not host_has_namespaces():
        pytest.skip("this host allows no namespaces")
    opened = SandboxPool(request.param, SHORT, 2)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def strongest():
    """A pool of the strongest level."""
    opened = SandboxPool("auto", SHORT, 2)
    yield opened
    opened.close()


def workers():
    """Return the processes of all pools, of this process's descendants, which tests beside these may have, too."""
    found = set()
    for each in descendants(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if b"sandbox" in Path(f"/proc/{each}/cmdline").read_bytes():
                found.add(each)
    return found


def script(source, *inputs):
    return {"source": source, "inputs": list(inputs or ("",))}


def functions(source, *asserts, setup=""):
    return {"source": source, "tests": {"setup": setup, "asserts": list(asserts)}}


def test_programs_get_their_input_and_their_output_comes_back_in_order(pool):
    jobs = [script(f"print(int(input()) * {each})", "2", "3") for each in range(6)]
    outputs = [[run["stdout"] for run in runs] for runs in pool.run(jobs)]
    assert outputs == [[f"{2 * each}\n", f"{3 * each}\n"] for each in range(6)]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("while True: pass", "timeout"),
        ("import time\ntime.sleep(100)", "timeout"),
        ("x = [0] * (1 << 30)", "memory"),
        ("while True: print('x' * 4000)", "output"),
        ("raise ValueError('wrong')", "error"),
        ("import sys\nsys.exit(3)", "error"),
        ("import sys\nsys.exit(0)", ""),
        ("import os\nos.abort()", "killed"),
        ("this is no Python", "error"),
    ],
)
def test_a_run_says_how_it_ended(strongest, source, reason):
    (run,) = strongest.run([script(source)])[0]
    assert run["reason"] == reason
    assert ("ValueError: wrong" in run["detail"]) == ("ValueError" in source)


def test_a_program_that_is_too_slow_does_not_run_with_its_other_inputs(strongest):
    assert [run["reason"] for run in strongest.run([script("while True: pass", "1", "2", "3")])[0]] == ["timeout"]


NUMPY = """
import numpy, os
a = numpy.arange(40000.0).reshape(200, 200)
print(int((a @ a)[0, 1]), int(numpy.linalg.matrix_rank(a)), os.environ["OPENBLAS_NUM_THREADS"])
"""
OF_NUMPY = f"{sum(k * (200 * k + 1) for k in range(200))} 2 1\n"
"""A product of rows and columns, a rank by LAPACK, and one thread."""


@pytest.fixture(scope="module", params=list(LEVELS))
def with_packages(request):
    """A pool of each level whose programs may import packages."""
    if request.param == "namespaces" and not host_has_namespaces():
        pytest.skip("this host allows no namespaces")
    opened = SandboxPool(request.param, Limits(seconds=20), 1, site_packages=True)
    yield opened
    opened.close()


def test_programs_import_numpy_at_each_level_where_packages_are_allowed(with_packages):
    (run,) = with_packages.run([script(NUMPY)])[0]
    assert (run["reason"], run["stdout"]) == ("", OF_NUMPY), run
    asserts = functions("import numpy\ndef total(n): return int(numpy.ones(n).sum())", "assert total(5) == 5")
    (run,) = with_packages.run([asserts])[0]
    assert run["outcomes"] == ["passed"], run


def test_no_package_is_imported_unless_allowed(pool):
    (run,) = pool.run([script("import numpy")])[0]
    assert (run["reason"], "No module named 'numpy'" in run["detail"]) == ("error", True)


DRAWS = "import random\nprint(list({'a', 'b', 'c', 'd', 'e', 'f', 'g'}), random.random(), random.choice('abcdefgh'))"


def test_what_a_program_draws_and_the_order_of_its_sets_are_the_same_in_every_worker_and_after_a_restart():
    outputs = set()
    for _ in range(2):
        pool = SandboxPool("auto", SHORT, 2)
        outputs |= {runs[0]["stdout"] for runs in pool.run([script(DRAWS)] * 4)}
        pool.close()
    assert len(outputs) == 1, outputs


def test_numpy_draws_the_same_in_every_run(with_packages):
    source = "import numpy\nprint(numpy.random.rand(), numpy.random.randint(1 << 30))"
    assert len({runs[0]["stdout"] for runs in with_packages.run([script(source)] * 3)}) == 1


def test_tests_draw_the_same_in_every_run(strongest):
    drawn = functions("def f(x): return x", "import random\nassert f(random.random()) == 0, random.random()")
    details = {runs[0]["detail"] for runs in strongest.run([drawn] * 4)}
    assert len(details) == 1, details


def test_programs_see_neither_files_nor_modules_of_the_program_before(pool):
    leaves = "open('left', 'w').write('x')\nimport os, math\nos.mkdir('deep'); math.pi = 3\nprint('left')"
    looks = "import os, math\nprint(os.listdir('.'), math.pi > 3.1)"
    results = pool.run([script(source) for _ in range(4) for source in (leaves, looks)])
    assert {runs[0]["stdout"] for runs in results} == {"left\n", "[] True\n"}


def test_folders_nested_deeper_than_a_path_can_be_are_removed(pool):
    nested = (
        "import os\nfor _ in range(900):\n    os.mkdir('folder'); os.chdir('folder')\nos.chmod('.', 0)\nprint('done')"
    )
    assert pool.run([script(nested)])[0][0]["stdout"] == "done\n"
    assert [runs[0]["stdout"] for runs in pool.run([script("import os; print(os.listdir('.'))")] * 4)] == ["[]\n"] * 4


def test_calls_arrive_with_the_values_of_their_arguments_and_return_theirs(pool):
    source = """
import collections, fractions
def same(*values, **named): return (*values, named)
def double(numbers): numbers[:] = [2 * each for each in numbers]
def fails(): raise KeyError('absent')
class Point:
    def __init__(self, x): self.x = x
    def moved(self, by): return Point(self.x + by)
    def __eq__(self, other): return self.x == other.x
def points(): return [Point(1), Point(2)]
def numbers():
    yield from (1, 2, 3)
"""
    values = "1, -2**80, 1.5, float('inf'), 'é', b'\\0', None, True, [1, (2,)], {1: {2}}, 1j, Fraction(1, 3)"
    asserts = [
        f"from fractions import Fraction\nassert same({values}, a=[1]) == ({values}, {{'a': [1]}})",
        "numbers_ = [1, 2]\ndouble(numbers_)\nassert numbers_ == [2, 4]",
        "try: fails()\nexcept KeyError as error: assert 'absent' in str(error)\nelse: assert False",
        "assert points()[0].moved(1) == points()[1] and points()[0] != points()[1]",
        "assert list(numbers()) == [1, 2, 3]",
        "from solution import double as other\nassert other([1]) is None",
        "assert math.isclose(same(1.0)[0], 1)",
        "assert same(1)[0] == 2",
        "assert absent(1)",
        "assert same(print)",
    ]
    (run,) = pool.run([functions(source, *asserts)])[0]
    assert run["outcomes"] == ["passed"] * 7 + ["failed", "error", "error"], run


def test_tests_that_ended_count_when_a_later_one_does_not_end(strongest):
    source = "def f(x):\n    while x: pass\n    return 0"
    (run,) = strongest.run([functions(source, "assert f(0) == 0", "assert f(1) == 0", "assert f(0) == 0")])[0]
    assert (run["outcomes"], run["reason"]) == (["passed"], "timeout")


def test_tests_are_in_no_memory_that_a_program_inherits(pool):
    # the frames of the processes that it is a fork of, and what an earlier program of the worker was tested by
    source = """
import gc, sys
def f():
    frame, texts = sys._getframe(), []
    while frame:
        texts.append(repr(frame.f_locals)); frame = frame.f_back
    return any(''.join(reversed('eulav-detcepxe')) in each for each in [*texts, repr(gc.get_objects())])
"""
    jobs = [functions(source, "'expected-value'; assert f() is False") for _ in range(4)]
    assert [runs[0]["outcomes"] for runs in pool.run(jobs)] == [["passed"]] * 4


def test_a_program_without_a_process_of_its_own_left_costs_its_worker_alone(pool, soon):
    for each in workers():
        with contextlib.suppress(ProcessLookupError):  # it has ended with the first
            os.kill(each, signal.SIGKILL)
    before = pool.replaced
    first = pool.run([script("print(1)")] * 4)
    assert [runs[0]["stdout"] for runs in pool.run([script("print(1)")] * 4)] == ["1\n"] * 4
    assert all(runs[0]["stdout"] == "1\n" or runs[0]["reason"] == "killed" for runs in first)
    assert pool.replaced > before


def test_no_process_and_no_file_is_left_when_a_pool_is_closed(tmp_path, monkeypatch, soon):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pool = SandboxPool("none", SHORT, 2)
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.closerange(0, 99)\n    time.sleep(99)"
    pool.run([script(daemon)] * 2)
    started = [each._process.pid for each in pool._workers]
    own = {each for worker in started for each in (worker, *descendants(worker))}
    assert len(own) > len(started)
    assert any(tmp_path.iterdir())
    pool.close()
    soon(lambda: not own & set(descendants(os.getpid())))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"])
def test_a_worker_has_namespaces_of_its_own(strongest, kind):
    if not host_has_namespaces():
        pytest.skip("this host allows no namespaces")
    assert "namespaces" in strongest.parts
    strongest.run([script("")])
    workers = [each for each in descendants(os.getpid()) if _namespace(each, "user") != _namespace(os.getpid(), "user")]
    assert workers
    children = [each for worker in workers for each in descendants(worker)] or workers
    assert _namespace(os.getpid(), kind) not in {_namespace(each, kind) for each in children}


def _namespace(process, kind):
    try:
        return os.readlink(f"/proc/{process}/ns/{kind}")
    except FileNotFoundError:
        return None


def test_every_system_call_that_is_not_listed_fails_at_level_seccomp():
    source = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
done = []
for number in (29, 41, 42, 49, 50, 56, 57, 59, 64, 68, 76, 92, 101, 133, 157, 165, 240, 272, 310, 321, 425, 448, 460):
    ctypes.set_errno(0)
    if libc.syscall(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() not in (1, 38): done.append(number)
print(done)
"""
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers of x86_64")
    pool = SandboxPool("seccomp", SHORT, 1)
    (run,) = pool.run([script(source)])[0]
    pool.close()
    assert run["stdout"] == "[]\n", run


FILES = """
import io, os, shutil, tarfile, tempfile, zipfile
os.makedirs('from/inner')
open('from/inner/a', 'w').write('text')
os.chmod('from/inner/a', 0o640)
os.utime('from/inner/a')
shutil.copy('from/inner/a', 'b'), shutil.copy2('b', 'c'), shutil.copytree('from', 'to'), shutil.move('c', 'd')
with tarfile.open('t.tar', 'w') as file: file.add('from')
with tarfile.open('t.tar') as file: file.extractall('tarred')
with zipfile.ZipFile('t.zip', 'w') as file: file.write('d')
with zipfile.ZipFile('t.zip') as file: file.extractall('zipped')
with tempfile.NamedTemporaryFile('w+') as file: file.write('x'), file.truncate(0), os.isatty(file.fileno())
print([open(each).read() for each in ('b', 'd', 'to/inner/a', 'tarred/from/inner/a', 'zipped/d')])
"""


@pytest.mark.parametrize("level", ["auto", "seccomp"])
def test_programs_copy_move_and_unpack_files_within_the_filter(level):
    pool = SandboxPool(level, SHORT, 1)
    (run,) = pool.run([script(FILES)])[0]
    pool.close()
    assert run["stdout"] == f"{['text'] * 5}\n", run


FILE_CALLS = {
    "truncate by path": "os.truncate('file', 0)",
    "truncate while opening to read": "os.open('file', os.O_RDONLY | os.O_TRUNC)",
    "open without rights to read or write": "os.open('file', 3)",
    "an attribute": "os.setxattr('file', 'user.x', b'x')",
    "a flag": "fcntl.ioctl(os.open('file', os.O_RDONLY), 0x40086602, struct.pack('l', 0x40))",
    "a lease": "fcntl.fcntl(os.open('file', os.O_RDONLY), 1024, 0)",
    "the group": "os.chown('file', -1, os.getgid())",
}
UNCHANGED = "os.chmod('file', 0o777), os.utime('file', (7, 7)), os.fchmod(os.open('file', os.O_RDONLY), 0o777)"


def test_no_program_changes_a_file_that_it_has_not_opened_for_writing(monkeypatch):
    monkeypatch.setenv(HIDDEN, "landlock")  # which does not know of all of these, or not in each version
    pool = SandboxPool("seccomp", SHORT, 1)
    begin = "import fcntl, os, struct\nopen('file', 'w').write('text')\n"
    jobs = [script(f"{begin}try: {call}\nexcept OSError: print('failed')") for call in FILE_CALLS.values()]
    look = "(lambda s: (s.st_mode, s.st_mtime))(os.stat('file'))"
    jobs.append(script(f"{begin}before = {look}\n{UNCHANGED}\nprint(before == {look})"))
    outputs = dict(zip([*FILE_CALLS, "modes and times"], (runs[0]["stdout"] for runs in pool.run(jobs)), strict=True))
    pool.close()
    assert outputs == {**dict.fromkeys(FILE_CALLS, "failed\n"), "modes and times": "True\n"}


def decision(machine, name, *arguments):
    """Return what the filter of process 7 answers to a call: "allowed", or the number of the error."""
    column = 0 if machine == "x86_64" else 1
    number = {**CALLS, **ALLOWED, **WITHOUT_EFFECT, **EXTENDED_ATTRIBUTES}[name][column]
    data = struct.pack("IIQ6Q", number, MACHINES[machine], 0, *arguments, *[0] * (6 - len(arguments)))
    program = [list(each) for each in struct.iter_unpack("HBBI", seccomp_program(machine)[0])]
    place = value = 0
    while True:
        code, true, false, constant = program[place]
        constant = 7 if constant == PROCESS else constant
        place += 1
        if code == LOAD:
            value = struct.unpack_from("I", data, constant)[0]
        elif code == AND:
            value &= constant
        elif code == RETURN:
            return "allowed" if constant == ALLOW else constant & 0xFFFF
        else:
            met = {EQUAL: value == constant, ANY_BIT: value & constant, GREATER_OR_EQUAL: value >= constant}[code]
            place += true if met else false


@pytest.mark.parametrize("machine", list(MACHINES))
@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        *[("openat", (0, 0, flags), "allowed") for flags in (0, 0x80000, 1, 2, 0x241, 0x242)],
        *[("openat", (0, 0, flags), errno.EPERM) for flags in (0x200, 3, 0x203, 0x240)],
        *[("socketpair", (1, kind), "allowed") for kind in (1, 0x80001)],
        *[("socketpair", each, errno.EPERM) for each in ((1, 2), (1, 5), (30, 1), (40, 1), (0, 1))],
        *[("fcntl", (0, command), "allowed") for command in (0, 4, 7, 9, 1030, 1034)],
        *[("fcntl", (0, command), errno.EPERM) for command in (8, 10, 15, 1024, 1026, 2000)],
        *[("ioctl", (0, command), "allowed") for command in (0x5401, 0x5421, 0x40049409)],
        *[("ioctl", (0, command), errno.ENOTTY) for command in (0x40086602, 0x5412, 0x8901, 0x40806685, 0)],
        *[(name, (), 0) for name in ("fchmod", "fchmodat", "fchmodat2", "utimensat")],
        *[(name, (), errno.ENOTSUP) for name in ("fsetxattr", "llistxattr", "removexattr")],
        *[(name, (), errno.EPERM) for name in ("truncate", "shmget", "msgget", "semget", "mq_open", "fchownat")],
        *[("kill", (7,), "allowed"), ("kill", (8,), errno.EPERM), ("ftruncate", (), "allowed")],
    ],
)
def test_the_filter_decides_by_the_arguments_on_each_machine(machine, name, arguments, expected):
    assert decision(machine, name, *arguments) == expected


@pytest.mark.parametrize("machine", list(MACHINES))
def test_the_filter_fits_the_kernels_limit_and_holds_the_process_number(machine):
    program, places = seccomp_program(machine)
    assert len(program) % 8 == 0
    assert len(program) // 8 <= 4096
    assert {program[each : each + 4] for each in places} == {b"\xff" * 4}
    assert len(places) >= 4


def test_a_run_can_set_every_level():
    assert ("auto", *LEVELS) == SANDBOX_LEVELS


def test_a_host_without_the_level_asked_for_gets_the_reason_and_remedies(monkeypatch):
    monkeypatch.setenv(HIDDEN, "namespaces")
    with pytest.raises(ConfigError, match=r"reward.sandbox.level=namespaces: this host does not allow it .*=none"):
        SandboxPool("namespaces", SHORT, 1)
    pool = SandboxPool("auto", SHORT, 1)
    assert pool.level == "seccomp"
    pool.close()
    monkeypatch.setenv(HIDDEN, "namespaces,seccomp")
    with pytest.raises(ConfigError, match=r"level=auto: .*seccomp: .*reward.sandbox.level=none"):
        SandboxPool("auto", SHORT, 1)


def test_what_a_host_lacks_of_a_level_is_said(monkeypatch):
    monkeypatch.setenv(HIDDEN, "landlock")
    pool = SandboxPool("seccomp", SHORT, 1)
    assert pool.parts == ("seccomp",)
    assert "missing: landlock" in pool.description
    pool.close()


def test_the_table_of_what_programs_achieve_is_current():
    done = subprocess.run(
        [sys.executable, "scripts/drill_sandbox.py", "--check"], cwd=REPO, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
