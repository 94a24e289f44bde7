"""What our sources ask of torch-npu is in its wheels: read from the files in them, which needs neither torch-npu's
libraries nor an NPU. Wheels are 44 MB each and kept under build/."""

import pytest
from hwgrpo_backends import registry
from hwgrpo_kernels import npu_scoring

from tests.support.numbers import npu_reference_ops
from tests.support.numbers.torch_npu_schema import SCHEMA
from tests.torch_npu import torch_npu_wheel
from tests.torch_npu.torch_npu_uses import Use, uses_in
from tests.torch_npu.torch_npu_wheel import VERSIONS, Wheel

pytestmark = pytest.mark.slow

LACKING = {
    npu_scoring.OP: ({"2.10.0.post4"}, "`npu_scoring.reason_against` looks for it, and scoring takes another way"),
    "get_arch_list": (set(VERSIONS), "`torch_probe` asks the modules of CUDA and ROCm for it, and no other"),
    "amp": (set(VERSIONS), "the ledger asks the module of the accelerator that it claims to be, CUDA's"),
}
"""What some versions have not -> those versions, and why that is no fault of ours."""


@pytest.fixture(scope="module", params=VERSIONS)
def version(request):
    return request.param


@pytest.fixture(scope="module")
def wheel(version):
    return Wheel(torch_npu_wheel.folder(version))


def test_every_use_in_our_sources_fits_the_wheel_or_is_known_to_be_lacking(wheel, version):
    problems = {use.name: f"{use.where}: {problem}" for use in uses_in() if (problem := wheel.problem(use))}
    known = {name for name, (versions, _) in LACKING.items() if version in versions}
    assert problems.keys() == known, problems


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (Use("op", "npu_rms_norm", "", 2, ("eps",)), "does not take 2 by position and eps by keyword"),
        (Use("op", "npu_rms_norm", "", 4), "does not take 4 by position"),
        (Use("op", "npu_rms_norm", "", 1), "does not take 1 by position"),
        (Use("op", "npu_rms_norm", "", 2, ("gamma",)), "does not take 2 by position and gamma by keyword"),
        (Use("op", "npu_layer_norm", ""), "there is no operator npu_layer_norm"),
        (Use("name", "snapshot", ""), "torch.npu has no snapshot"),
        (Use("name", "mem_get_info", "", 0, ("index",)), "is called otherwise"),
        (Use("name", "set_device", "", 0), "is called otherwise"),
        (Use("name", "empty_cache", "", 1), "is called otherwise"),
    ],
)
def test_a_use_that_does_not_fit_is_found(wheel, use, said):
    assert said in (wheel.problem(use) or "")


@pytest.mark.parametrize(
    "use",
    [
        Use("op", "npu_rms_norm", "", 2, ("epsilon",)),
        Use("op", "npu_rms_norm", "", 3),
        Use("name", "Stream", "", 0, ("device",)),
        Use("name", "mem_get_info", "", 1),
    ],
)
def test_a_use_that_fits_is_let_through(wheel, use):
    assert wheel.problem(use) is None


def test_the_library_reads_the_variables_that_are_set_for_it_and_refuses_what_a_server_must_not_get(version):
    library = (torch_npu_wheel.folder(version) / "torch_npu" / "lib" / "libtorch_npu.so").read_bytes()
    backend = registry.get("npu")
    of_torch_npu = {"TASK_QUEUE_ENABLE", "PYTORCH_NPU_ALLOC_CONF", "CPU_AFFINITY_CONF"}
    of_torch_npu |= {"HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT"}
    of_cann = {"HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE", "LD_PRELOAD"}
    assert backend.env_train.keys() == of_torch_npu | of_cann, "a new variable: say here who reads it"
    assert [name for name in of_torch_npu if name.encode() not in library] == []
    assert b"Do not support TASK_QUEUE_ENABLE = 2 during NPU graph capture" in library
    renamed = b"TORCH_HCCL_ASYNC_ERROR_HANDLING" in library
    assert renamed == (version != "2.10.0.post4")


def test_the_fused_head_has_the_schema_our_tests_call_it_by(wheel, version):
    known = [] if version in LACKING[npu_scoring.OP][0] else [SCHEMA]
    assert wheel.schemas.get(npu_scoring.OP, []) == known


@pytest.mark.parametrize("op", npu_reference_ops.SCHEMAS)
def test_the_fused_modules_ops_have_the_schemas_our_tests_call_them_by(wheel, op):
    assert wheel.schemas[op] == [npu_reference_ops.SCHEMAS[op]]
