"""Containers, WSL, schedulers, CANN's records, entry points, drivers: tier 0 against made-up root folders."""

from pathlib import Path

import pytest
from hwgrpo_backends import nvidia_driver, registry, surroundings
from hwgrpo_backends.tier0 import gather_tier0

BACKENDS = tuple(registry.get(name) for name in registry.BUILTIN)


def write(file: Path, text: str = "") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def tier0(root, site, **environ):
    return gather_tier0(root, environ, BACKENDS, [str(site)])


@pytest.mark.parametrize(
    ("file", "text", "environ", "kind"),
    [
        (".dockerenv", "", {}, "docker"),
        ("run/.containerenv", "", {}, "podman"),
        ("proc/1/cgroup", "12:cpu:/kubepods/burstable/pod1\n", {}, "kubernetes"),
        ("proc/1/cgroup", "0::/system.slice/containerd.service\n", {}, "containerd"),
        ("proc/1/cgroup", "0::/init.scope\n", {}, None),
        (".dockerenv", "", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ("nothing", "", {"APPTAINER_CONTAINER": "/a.sif"}, "apptainer"),
        ("nothing", "", {}, None),
    ],
)
def test_a_container_is_known_by_its_files_its_groups_or_its_variables(tmp_path, file, text, environ, kind):
    write(tmp_path / file, text)
    assert tier0(tmp_path, tmp_path / "site", **environ).container == kind


@pytest.mark.parametrize(
    ("release", "wsl"), [("5.15.167.4-microsoft-standard-WSL2", True), ("4.4.0-Microsoft", True), ("6.8.0", False)]
)
def test_wsl_is_known_by_its_kernel(tmp_path, release, wsl):
    write(tmp_path / "proc/sys/kernel/osrelease", release + "\n")
    assert (tier0(tmp_path, tmp_path).wsl, tier0(tmp_path, tmp_path).wsl_gpu) == (wsl, False)
    write(tmp_path / "dev/dxg")
    assert tier0(tmp_path, tmp_path).wsl_gpu


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SLURM_JOB_ID": "7", "RANK": "1", "WORLD_SIZE": "4"}, "slurm job 7, rank 1 of 4"),
        ({"RAY_JOB_ID": "01"}, "ray job 01"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "rank 0 of 2"),
        ({}, None),
    ],
)
def test_what_started_a_process_is_told(environ, words):
    assert surroundings.scheduler(environ) == words


def test_files_that_may_not_be_read_are_as_good_as_absent(tmp_path):
    (tmp_path / "folder").mkdir()
    assert surroundings.read(tmp_path / "folder") == ""
    assert surroundings.search(tmp_path / "nothing", "(x)") is None
    assert surroundings.search(write(tmp_path / "empty"), "(x)") == "unknown"
    assert surroundings.search(write(tmp_path / "file", "a=1"), r"a=(\d)") == "1"
    assert surroundings.search(write(tmp_path / "other", "b"), r"a=(\d)") == "unknown"


def test_cann_is_the_one_whose_environment_is_sourced_and_its_script_is_found(tmp_path):
    home = "/usr/local/Ascend/ascend-toolkit/latest"
    write(tmp_path / home.lstrip("/") / "aarch64-linux/ascend_toolkit_install.info", "package_name=x\nversion=9.1.0\n")
    write(tmp_path / "usr/local/Ascend/driver/version.info", "Version=25.2.0\nascendhal=7\n")
    unsourced = tier0(tmp_path, tmp_path)
    assert (unsourced.cann_version, unsourced.cann_script, unsourced.npu_driver) == (None, None, "25.2.0")
    write(tmp_path / "usr/local/Ascend/ascend-toolkit/set_env.sh")
    facts = tier0(tmp_path, tmp_path, ASCEND_HOME_PATH=home)
    assert facts.cann_version == "9.1.0"
    assert facts.cann_script == "/usr/local/Ascend/ascend-toolkit/set_env.sh"
    assert tier0(tmp_path, tmp_path, ASCEND_HOME_PATH="/elsewhere").cann_version is None


def test_entry_points_are_told_with_the_distribution_that_brings_them(tmp_path):
    info = tmp_path / "acme_chip-1.0.dist-info"
    write(info / "METADATA", "Metadata-Version: 2.1\nName: acme-chip\nVersion: 1.0\n")
    write(
        info / "entry_points.txt",
        "[hwgrpo.backends]\nacme = acme:B\n[torch.backends]\nacme = acme:a\n[other]\nx = y:z\n",
    )
    facts = tier0(tmp_path, tmp_path)
    assert facts.entry_points == {"torch.backends": ("acme (acme-chip)",), "hwgrpo.backends": ("acme (acme-chip)",)}
    assert facts.torch_plugins == ("acme",)


@pytest.mark.parametrize(("kind", "version"), [("cuda", "13.0"), ("hip", "7.1.25424")])
def test_the_toolkit_torch_was_built_with_is_read_without_importing_it(tmp_path, kind, version):
    write(tmp_path / "torch/version.py", f"__version__ = '2.13.0'\n{kind}: str = {version!r}\n")
    assert tier0(tmp_path, tmp_path).torch_toolkit == version


@pytest.mark.parametrize(
    ("driver", "toolkit", "too_old"),
    [
        ("580.65.06", "13.0", False),
        ("580", "13.0", False),
        ("575.57.08", "13.0", True),
        ("595.10", "13.1", False),
        ("525.60.13", "12.8", False),
        ("520.61.05", "12.1", True),
        ("450.80.02", "11.8", False),
        ("450.51.05", "11.8", True),
        ("580.65.06", "14.0", None),
        ("unknown", "13.0", None),
        ("580.65.06", None, None),
    ],
)
def test_a_driver_is_old_or_new_enough_by_the_vendors_table(driver, toolkit, too_old):
    assert nvidia_driver.is_too_old(driver, toolkit) is too_old
