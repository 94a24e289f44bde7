"""How set-up runs: which Python it takes, in what order it installs, how it recovers. A stand-in plays Python and pip.

The stand-in logs each pip command instead of running it and passes everything else to the real interpreter.
"""

import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "scripts"))
import setup_env  # noqa: E402

STAND_IN = """\
#!/bin/bash
case "$*" in
    *_base_executable*) echo "$0" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; echo venv >>"$LOG" ;;
    "-m pip install --progress-bar off --dry-run "*)
        echo "${RESOLVED:-Collecting torch==2.13.0}"
        exit "${UNRESOLVED:-0}" ;;
    "-m pip "*)
        shift 2
        echo "pip $*" >>"$LOG"
        if [[ -n "$PIP_FAILS" && "$*" == *"$PIP_FAILS"* ]]; then
            echo "first line of trouble"; echo "${PIP_SAYS:-last line of trouble}" >&2; exit 1
        fi ;;
    *import_module*) echo 'problems {}' ;;
    *torch.version*) echo "${TORCH:-{\\"version\\": \\"2.13.0+cpu\\", \\"cuda\\": null, \\"hip\\": null\\}}" ;;
    *) exec -a "$0" REAL "$@" ;;
esac
"""
TORCH_CPU = {"version": "2.13.0+cpu", "cuda": None, "hip": None}
TORCH_CUDA = {"version": "2.13.0", "cuda": "13.0", "hip": None}
TORCH_STEP = "pip install --progress-bar off -c scripts/constraints/{0}.txt torch==2.13.0"
REST_STEP = "pip install --progress-bar off -c scripts/constraints/{0}.txt -e .[{0}]"
PINNED = "pip install --progress-bar off -c scripts/constraints/cpu.txt"
TOOLS_STEPS = [f"{PINNED} -e .[cpu,dev]", f"{PINNED} --no-deps triton; platform_system == 'Linux'"]


class Machine:
    """A repository with the real set-up scripts and a made-up PATH and /dev."""

    def __init__(self, folder):
        self.repo = folder / "my repo"
        for part in ("scripts", "backends"):
            shutil.copytree(REPO / part, self.repo / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(REPO / "pyproject.toml", self.repo)
        self.venv = self.repo / ".venv"
        self.log = folder / "log"
        self.root = folder / "root"
        (self.root / "dev").mkdir(parents=True)
        self.bin = folder / "bin"
        self.bin.mkdir()

    def script(self, name, text):
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def setup(self, *arguments, torch=TORCH_CPU, **env):
        """Run set-up; return (result, what it did)."""
        self.log.write_text("")
        if not any(self.bin.glob("python*")):
            self.script("python3.12", STAND_IN.replace("REAL", sys.executable))
        result = subprocess.run(
            ["bash", self.repo / "scripts" / "setup.sh", "--root", self.root, *arguments],
            env={
                "PATH": f"{self.bin}:/usr/bin:/bin",
                "HOME": str(self.repo),
                "LOG": str(self.log),
                "PIP_FAILS": "",
                "TORCH": json.dumps(torch),
                **({} if "HWGRPO_TORCH_INDEX" in env else {"HWGRPO_TORCH_INDEX": ""}),
                **{name: value for name, value in env.items() if value is not None},
            },
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        return result, self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def steps(backend):
    return ["venv", TORCH_STEP.format(backend), REST_STEP.format(backend)]


def test_torch_is_installed_before_everything_else(machine):
    result, done = machine.setup()
    assert result.returncode == 0, result.stderr
    assert done == steps("cpu")


def test_running_it_again_does_nothing(machine):
    machine.setup()
    result, done = machine.setup()
    assert result.returncode == 0
    assert done == []
    assert result.stdout == "hwgrpo set-up: .venv is up to date (backend cpu: no device node of an accelerator found)\n"


def test_developers_tools_are_installed_at_once_added_or_left(machine):
    assert machine.setup("--dev")[1] == ["venv", TORCH_STEP.format("cpu"), *TOOLS_STEPS]
    assert machine.setup()[1] == []
    assert machine.setup("--fresh")[1] == steps("cpu")
    result, done = machine.setup("--dev", PIP_FAILS="dev")
    assert (result.returncode, done) == (1, TOOLS_STEPS[:1])
    assert machine.setup()[1] == [], "the user's packages are complete"
    assert TOOLS_STEPS[0].replace("'", "") in machine.setup("--dev", "--dry-run")[0].stdout.replace("'", "")
    result, done = machine.setup("--dev")
    assert done == TOOLS_STEPS
    assert "tools        pytest, hypothesis, " in result.stdout
    assert machine.setup("--dev")[1] == machine.setup()[1] == []
    project = machine.repo / "pyproject.toml"
    project.write_text(project.read_text().replace('"pytest>=8"', '"pytest>=9"'))
    assert machine.setup()[1] == [], "what a user needs is there"
    assert machine.setup("--dev")[1] == TOOLS_STEPS
    with (machine.repo / "scripts" / "constraints" / "common.txt").open("a") as file:
        file.write("einops==0.8.1\n")
    assert machine.setup()[1] == steps("cpu")[1:]
    assert machine.setup("--dev")[1] == TOOLS_STEPS


@pytest.mark.parametrize("show", [False, True])
def test_a_long_step_prints_lines_of_progress(monkeypatch, tmp_path, show):
    printed = tmp_path / "printed"

    class Output(io.StringIO):
        def write(self, text: str) -> int:
            if " after " in text:
                printed.touch()  # ends the command
            return super().write(text)

    monkeypatch.setattr(setup_env, "PROGRESS_S", 0.1)
    monkeypatch.setattr(sys, "stdout", output := Output())
    code = (
        "import pathlib, time\nprint('Installing collected packages: numpy', flush=True)\n"
        f"for _ in range(1000):\n    time.sleep(0.01)\n    if pathlib.Path({str(printed)!r}).exists(): break"
    )
    setup_env._run("installing", "the rest", [sys.executable, "-c", code], {}, show=show)
    doing = "installing the rest" if show else "(Installing collected packages: numpy|installing the rest)"
    assert re.search(rf"  installing the rest \.\.\.\n    after \d+ s: {doing}", output.getvalue())


def test_the_interpreter_of_a_complete_environment_is_asked_first(machine):
    machine.setup()
    other = machine.bin / "other"
    shutil.copy(machine.bin / "python3.12", other)
    (machine.venv / "pyvenv.cfg").write_text(f"home = {machine.bin}\nexecutable = {other}\n")
    machine.script("python3.13", '#!/bin/sh\necho "asked python3.13" >>"$LOG"\nexit 1\n')
    assert machine.setup()[1] == []
    assert machine.setup("--fresh")[1] == ["asked python3.13", *steps("cpu")]


def test_an_active_environment_and_python_path_do_not_leak_in(machine):
    result, done = machine.setup(VIRTUAL_ENV="/nowhere", PYTHONPATH="/nowhere", PYTHONHOME="/nowhere")
    assert result.returncode == 0, result.stderr
    assert done == steps("cpu")


def test_changed_pins_or_requirements_are_installed_into_the_same_environment(machine):
    machine.setup()
    with (machine.repo / "scripts" / "constraints" / "common.txt").open("a") as file:
        file.write("einops==0.8.1\n")
    assert machine.setup()[1] == steps("cpu")[1:]
    project = machine.repo / "pyproject.toml"
    project.write_text(project.read_text().replace('"rich>=13.7"', '"rich>=14"'))
    assert machine.setup()[1] == steps("cpu")[1:]
    assert machine.setup()[1] == []


def test_a_change_that_needs_no_install_causes_none(machine):
    machine.setup()
    project = machine.repo / "pyproject.toml"
    project.write_text(project.read_text().replace("line-length = 120", "line-length = 100"))
    assert machine.setup()[1] == []


def test_a_failed_step_shows_all_of_pips_output_and_is_done_again_from_the_start(machine):
    result, done = machine.setup(PIP_FAILS="-e .[")
    assert result.returncode == 1
    assert done == steps("cpu")
    assert "first line of trouble\nlast line of trouble\n" in result.stderr
    assert "installing hwgrpo[cpu] failed" in result.stderr
    result, done = machine.setup()
    assert result.returncode == 0
    assert done == steps("cpu")


def test_a_full_disk_is_named_with_what_is_free(machine):
    result, _ = machine.setup(PIP_FAILS="-e .[", PIP_SAYS="ERROR: OSError: [Errno 28] No space left on device")
    assert result.returncode == 1
    assert "installing hwgrpo[cpu] failed: the disk is full (now " in result.stderr
    assert re.search(r"\d+ MiB free in \S.*/my repo, \d+ MiB free in ", result.stderr)


def test_set_up_that_was_cut_off_starts_over(machine):
    machine.setup()
    stamp = machine.venv / "hwgrpo-setup.json"
    stamp.write_text(stamp.read_text()[:20])
    (machine.venv / "left over").touch()
    result, done = machine.setup()
    assert "removing the old environment" in result.stdout
    assert done == steps("cpu")
    assert not (machine.venv / "left over").exists()


def test_an_environment_that_set_up_did_not_make_is_left_alone(machine):
    machine.venv.mkdir()
    (machine.venv / "precious").touch()
    result, done = machine.setup()
    assert result.returncode == 1
    assert "was not made by this script" in result.stderr
    assert done == []
    assert (machine.venv / "precious").exists()


def test_a_repository_that_was_moved_gets_a_new_environment(machine):
    machine.setup()
    machine.repo = machine.repo.rename(machine.repo.with_name("moved"))
    assert machine.setup()[1] == steps("cpu")


def test_new_hardware_replaces_an_environment_that_was_chosen_by_detection(machine):
    machine.setup()
    (machine.root / "dev" / "nvidia0").touch()
    assert machine.setup(torch=TORCH_CUDA)[1] == steps("cuda")
    assert machine.setup()[1] == []


def test_a_backend_once_named_is_kept_until_auto_is_asked_for(machine):
    (machine.root / "dev" / "nvidia0").touch()
    machine.setup("--backend", "cpu")
    assert machine.setup()[1] == []
    assert machine.setup("--backend", "auto", torch=TORCH_CUDA)[1] == steps("cuda")


def test_asking_for_the_cpu_keeps_an_accelerators_environment(machine):
    (machine.root / "dev" / "nvidia0").touch()
    machine.setup(torch=TORCH_CUDA)
    result, done = machine.setup("--backend", "cpu")
    assert done == []
    assert "the cuda build already there runs on the CPU too" in result.stdout
    assert machine.setup()[1] == []


def test_fresh_makes_the_environment_anew(machine):
    machine.setup()
    assert machine.setup("--fresh")[1] == steps("cpu")


def test_a_build_of_torch_that_cannot_drive_the_hardware_is_refused_before_the_rest(machine):
    (machine.root / "dev" / "davinci0").touch()
    result, done = machine.setup(torch=TORCH_CUDA)
    assert result.returncode == 1
    assert "torch 2.13.0 is a CUDA build, but this hardware needs a CPU build" in result.stderr
    assert "HWGRPO_TORCH_INDEX=URL" in result.stderr
    assert done == steps("npu")[:2]


def test_pip_options_that_install_elsewhere_are_undone(machine):
    machine.script(
        "python3.12", STAND_IN.replace("REAL", sys.executable).replace('"pip $*"', '"$PIP_USER,$PIP_TARGET"')
    )
    assert machine.setup(PIP_USER="1", PIP_TARGET="/nowhere")[1] == ["venv", "0,", "0,"]


def test_a_python_that_is_too_old_or_broken_is_passed_over(machine):
    machine.script("python3.13", "#!/bin/sh\necho 'shim: not installed' >&2\nexit 127\n")
    machine.script("python3.12", "#!/bin/sh\necho 'is Python 3.12 in name only' >&2\nexit 1\n")
    machine.script("python3.11", STAND_IN.replace("REAL", sys.executable))
    result, done = machine.setup()
    assert result.returncode == 0, result.stderr
    assert f"({machine.bin / 'python3.11'})" in result.stdout
    assert done == steps("cpu")


def probe_of_setup_sh():
    text = (REPO / "scripts" / "setup.sh").read_text()
    return text.split("probe='", 1)[1].split("\n'\n", 1)[0]


def run_probe(preamble):
    return subprocess.run([sys.executable, "-c", f"{preamble}\n{probe_of_setup_sh()}"], capture_output=True, text=True)


def test_the_probe_refuses_an_old_python_and_one_without_venv_and_names_the_package():
    assert run_probe("").returncode == 0
    old = run_probe("import sys; sys.version_info = (3, 10, 4)")
    assert old.stderr == "is Python 3.10, and hwgrpo needs 3.11 or newer\n"
    bare = run_probe("import sys; sys.modules['ensurepip'] = None")
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert f"apt-get install python{version}-venv" in bare.stderr


def test_no_usable_python_is_an_error_that_says_what_was_tried_and_what_to_install(machine):
    for name in ("python3.13", "python3.12", "python3.11", "python3", "python"):
        machine.script(name, "#!/bin/sh\necho 'is Python 3.9, and hwgrpo needs 3.11 or newer' >&2\nexit 1\n")
    result, done = machine.setup()
    assert result.returncode == 1
    assert "  python3: is Python 3.9, and hwgrpo needs 3.11 or newer\n" in result.stderr
    assert "apt-get install python3 python3-venv" in result.stderr
    assert done == []


def test_a_named_python_is_the_only_one_tried(machine):
    machine.script("python3.12", STAND_IN.replace("REAL", sys.executable))
    result, done = machine.setup(HWGRPO_PYTHON="/nowhere/python")
    assert result.returncode == 1
    assert "  /nowhere/python: not found\n" in result.stderr
    assert "python3.12" not in result.stderr
    assert done == []


@pytest.mark.slow
def test_two_set_ups_at_once_install_once(machine):
    slow = STAND_IN.replace("REAL", sys.executable).replace('mkdir -p "$3/bin"', 'sleep 0.5 && mkdir -p "$3/bin"')
    machine.script("python3.12", slow)
    machine.log.write_text("")
    env = {
        "PATH": f"{machine.bin}:/usr/bin:/bin",
        "LOG": str(machine.log),
        "HWGRPO_TORCH_INDEX": "",
        "TORCH": json.dumps(TORCH_CPU),
        "HOME": os.environ["HOME"],
    }
    command = ["bash", machine.repo / "scripts" / "setup.sh", "--root", machine.root]
    running = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert machine.log.read_text().splitlines() == steps("cpu")
    assert sum("done" in output for output in outputs) == 1


DOWNLOADS = """echo "  Downloading https://there/torch-2.13.0-cp312-none.whl (530.1 MB)"
            echo "  Downloading filelock-3.1-py3-none-any.whl (16 kB)"
            echo "  Downloading https://there/torch-2.13.0-cp312-none.whl.metadata (29 kB)" """


def test_a_large_download_is_shown_before_it_begins_and_a_small_one_is_not(machine):
    text = STAND_IN.replace("REAL", sys.executable).replace(
        'if [[ -n "$PIP_FAILS"', f'{DOWNLOADS}; if [[ -n "$PIP_FAILS"'
    )
    machine.script("python3.12", text)
    result, _ = machine.setup()
    assert (
        "\n  installing torch==2.13.0 ...\n    downloading torch-2.13.0-cp312-none.whl (530.1 MB) ... 0 s\n"
        in result.stdout
    )
    assert "filelock" not in result.stdout


def test_on_a_terminal_pip_shows_its_own_bar(machine):
    machine.setup()
    env = {"PATH": f"{machine.bin}:/usr/bin:/bin", "LOG": str(machine.log), "HWGRPO_TORCH_INDEX": "", "HOME": "/"}
    ours, theirs = pty.openpty()
    command = ["bash", machine.repo / "scripts" / "setup.sh", "--root", machine.root, "--fresh"]
    machine.log.write_text("")
    assert subprocess.run(command, env=env, stdout=theirs, stderr=theirs).returncode == 0
    os.close(theirs)
    os.close(ours)
    assert machine.log.read_text().splitlines()[1] == TORCH_STEP.format("cpu").replace("bar off", "bar on")


@pytest.mark.parametrize(
    ("node", "resolved", "words"),
    [
        (
            "null",
            "Collecting nvidia-cublas==13.0",
            ["would be a CUDA build", "needs a CPU build", "HWGRPO_SETUP_FORCE=1"],
        ),
        ("davinci0", "Downloading torch-2.13.0+cu128-cp312.whl.metadata (29 kB)", ["CUDA build", "needs a CPU build"]),
        ("nvidia0", "Processing /wheels/torch-2.13.0%2Bcpu-cp312.whl", ["would be a CPU build", "needs a CUDA build"]),
        ("kfd", "Collecting cuda-bindings<14", ["would be a CUDA build", "backend rocm needs a ROCm build"]),
    ],
)
def test_a_torch_for_other_hardware_is_refused_before_it_is_downloaded(machine, node, resolved, words):
    (machine.root / "dev" / node).touch()
    result, done = machine.setup(RESOLVED=f"Collecting torch==2.13.0\n{resolved}")
    assert (result.returncode, done) == (1, ["venv"])
    for word in (*words, "HWGRPO_TORCH_INDEX=URL"):
        assert word in result.stderr
    if node == "null":
        assert machine.setup(RESOLVED=resolved, HWGRPO_SETUP_FORCE="1")[0].returncode == 0


def test_pip_says_itself_why_it_finds_no_torch(machine):
    result, done = machine.setup(RESOLVED="", UNRESOLVED="1", PIP_FAILS="torch==")
    assert (result.returncode, done) == (1, ["venv", TORCH_STEP.format("cpu")])
    assert "last line of trouble" in result.stderr


@pytest.mark.parametrize(
    ("driver", "tried"),
    [
        ("580.95.05", ["torch==2.13.0"]),
        ("575.57.08", ["torch==2.13.0+cu128", "torch==2.13.0+cu126"]),
        ("560.35.03", ["torch==2.13.0+cu126"]),
        ("525.60.13", ["torch==2.13.0+cu126"]),
        (None, ["torch==2.13.0"]),
    ],
)
def test_the_cuda_build_is_one_that_the_driver_runs(machine, driver, tried):
    (machine.root / "dev" / "nvidia0").touch()
    if driver:
        nvidia(machine, driver)
    log = """echo "dry ${@: -1}" >>"$LOG"; exit "${UNRESOLVED:-0}" ;;"""
    text = STAND_IN.replace("REAL", sys.executable).replace('exit "${UNRESOLVED:-0}" ;;', log)
    machine.script("python3.12", text)
    away = {"https_proxy": "http://127.0.0.1:9", "HWGRPO_TORCH_INDEX": None}
    _, done = machine.setup(torch=TORCH_CUDA, UNRESOLVED="1", RESOLVED="", **away)
    assert [line.removeprefix("dry ") for line in done if line.startswith("dry ")] == tried
    result, done = machine.setup("--fresh", torch=TORCH_CUDA, **away)
    assert result.returncode == 0, result.stderr
    assert done[2] == TORCH_STEP.format("cuda").replace("torch==2.13.0", tried[0])
    assert (f"for the driver {driver}" in result.stdout) == ("+" in tried[0])


def nvidia(machine, driver):
    record = machine.root / "proc/driver/nvidia/version"
    record.parent.mkdir(parents=True)
    record.write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Tue Sep 23\n")


def test_a_driver_too_old_for_every_build_is_an_error_before_anything_is_installed(machine):
    (machine.root / "dev" / "nvidia0").touch()
    nvidia(machine, "470.82.01")
    result, done = machine.setup(HWGRPO_TORCH_INDEX=None)
    assert (result.returncode, done) == (1, [])
    assert "the NVIDIA driver 470.82.01 is too old" in result.stderr
    assert "525 or newer" in result.stderr
