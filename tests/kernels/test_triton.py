"""What can be said of the Triton implementations without Triton: when they are taken, and their tiles."""

import subprocess
import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hwgrpo_kernels import Key, default_registry, resolve, triton_support
from hwgrpo_kernels.tiles import TILES, table_key, tile_for

ON_GPU = "cuda"  # hw: the device type the Triton kernels are registered for
ON_NPU = "npu"  # hw: likewise
KEY = Key("row_stats", ON_GPU, torch.bfloat16, 2**18)
ROW_OPS = ("row_stats", "row_grad")


def triton(op):
    [found] = [each for each in default_registry.implementations(op) if each.name == "triton"]
    return found


def test_importing_the_kernels_imports_no_triton():
    code = "import sys, hwgrpo_kernels; sys.exit('triton' in sys.modules)"
    paths = ":".join(filter(None, sys.path))
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": paths}).returncode == 0


@pytest.mark.parametrize("op", ROW_OPS)
def test_on_the_cpu_torch_is_chosen_and_triton_explained(op):
    assert triton(op).reason_against(KEY._replace(op=op, device_type="cpu")) == f"needs {ON_GPU} or {ON_NPU}, have cpu"
    choice = resolve(op, "cpu", torch.float32, 517, preference=["triton", "torch"])
    assert choice.line == f"{op} -> torch (triton: needs {ON_GPU} or {ON_NPU}, have cpu)"
    assert resolve(op, "cpu", torch.float32, 517, preference=["torch"]).line == f"{op} -> torch"


@pytest.mark.parametrize("op", ROW_OPS)
def test_where_nothing_is_preferred_triton_is_tried_before_torch(op):
    assert [each.name for each in default_registry.implementations(op)][:2] == ["triton", "torch"]


def test_a_missing_triton_is_the_reason_given(monkeypatch):
    monkeypatch.setattr("hwgrpo_kernels.op.importlib.util.find_spec", lambda name: None)
    assert triton("row_grad").reason_against(KEY) == "needs module 'triton', which is not installed"


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a compiler and a GPU of compute capability 9.0."""
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    return monkeypatch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_triton_takes_floating_logits(gpu, dtype):
    assert triton_support.reason_against(KEY._replace(dtype=dtype)) is None


def test_other_dtypes_are_refused_by_name(gpu):
    reason = triton_support.reason_against(KEY._replace(dtype=torch.float8_e4m3fn))
    assert reason == "takes float64, float32, bfloat16, float16, not float8_e4m3fn"


def test_a_machine_without_a_compiler_is_told_what_to_install(gpu):
    gpu.delenv("CC")
    gpu.setenv("PATH", "")
    assert "install gcc or clang, or set CC" in str(triton_support.reason_against(KEY))


def test_a_python_without_headers_is_told_what_to_install(gpu, tmp_path):
    gpu.setattr(triton_support.sysconfig, "get_path", lambda name: str(tmp_path))
    reason = triton_support.reason_against(KEY)
    assert f"{tmp_path} has no Python.h: install python3.{sys.version_info.minor}-dev" in str(reason)
    (tmp_path / "Python.h").touch()
    assert triton_support.reason_against(KEY) is None


def test_a_gpu_triton_has_no_code_for_is_named(gpu):
    gpu.setattr(torch.cuda, "device_count", lambda: 2)
    gpu.setattr(torch.cuda, "get_device_capability", [(9, 0), (7, 5)].__getitem__)
    wanted = (
        "needs compute capability 8.0 or newer, and device 1 has 7.5; "
        "hide it (CUDA_VISIBLE_DEVICES) to use the kernels on the others"
    )
    assert triton_support.reason_against(KEY) == wanted
    gpu.setattr(torch.version, "hip", "7.2")  # AMD counts its capability otherwise
    assert triton_support.reason_against(KEY) is None


def test_tiles_fit_their_architecture():
    for op, itemsize, arch, vocab in product(ROW_OPS, (2, 4, 8), TILES, (1, 517, 32000, 151936)):
        tile = tile_for(op, arch, itemsize, vocab)
        threads, case = tile.warps * TILES[arch].warp_size, (op, itemsize, arch, vocab, tile)
        assert all(number & (number - 1) == 0 for number in (tile.lanes, tile.width, tile.warps)), case
        assert threads <= 1024, case
        assert tile.lanes >= threads, f"a thread without a lane would do another's work again: {case}"
        assert tile.width * itemsize == 16, case
        assert tile.warps == 1 or tile.block < 2 * vocab, f"most of the block would lie beyond the row: {case}"


@pytest.mark.parametrize(
    "arch,key",
    [
        ("sm_90", "sm_90"),
        ("sm_90a", "sm_90"),
        ("sm_75", "sm_80"),
        ("sm_89", "sm_80"),
        ("sm_103", "sm_100"),
        ("sm_121", "sm_120"),
        ("gfx942", "gfx942"),
        ("gfx908", "gfx90a"),
        ("gfx1100", "rdna"),
        ("gfx1201", "rdna"),
    ],
)
def test_an_architecture_without_tiles_takes_those_of_its_family(arch, key):
    assert table_key(arch) == key


def test_a_long_row_takes_the_tile_of_the_table():
    assert tile_for("row_stats", "sm_90", 2, 151936) == TILES["sm_90"].row_stats[2]


ON_ASCEND = KEY._replace(device_type=ON_NPU)


@pytest.fixture
def ascend(monkeypatch):
    """A machine with triton-ascend alone, CANN's compiler and a C++ compiler; returns how to install packages."""

    def install(*names):
        found = [SimpleNamespace(metadata={"Name": name}) for name in names]
        monkeypatch.setattr(triton_support, "distributions", lambda: found)

    install("torch", "triton_ascend")
    tools = ("bishengir-compile", "g++")
    monkeypatch.setattr(triton_support.shutil, "which", lambda name: f"/usr/bin/{name}" if name in tools else None)
    for variable in ("CC", "TRITON_NPU_COMPILER_PATH"):
        monkeypatch.delenv(variable, raising=False)
    return install


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_triton_ascend_takes_floating_logits_but_fp64(ascend, dtype):
    assert triton_support.reason_against(ON_ASCEND._replace(dtype=dtype)) is None
    assert "not float64" in triton_support.reason_against(ON_ASCEND._replace(dtype=torch.float64))


@pytest.mark.parametrize(
    "installed,reason",
    [
        (("torch",), "needs triton-ascend"),
        (("torch", "triton"), "needs triton-ascend"),
        (("triton", "triton-ascend"), "both installed"),
    ],
)
def test_another_triton_than_the_one_for_ascend_is_refused(ascend, installed, reason):
    ascend(*installed)
    assert reason in triton_support.reason_against(ON_ASCEND)


def test_a_vocabulary_beyond_exact_fp32_indices_is_refused_on_ascend(ascend):
    assert triton_support.reason_against(ON_ASCEND._replace(shape_class=2**24)) is None
    assert "16777216" in triton_support.reason_against(ON_ASCEND._replace(shape_class=2**25))


@pytest.mark.parametrize(
    "tools,reason", [(("g++",), "source the set_env.sh of CANN"), (("bishengir-compile",), "needs a C\\+\\+ compiler")]
)
def test_a_missing_compiler_on_ascend_is_told_with_its_remedy(ascend, monkeypatch, tools, reason):
    monkeypatch.setattr(triton_support.shutil, "which", lambda name: f"/usr/bin/{name}" if name in tools else None)
    assert reason.replace("\\", "") in triton_support.reason_against(ON_ASCEND)
