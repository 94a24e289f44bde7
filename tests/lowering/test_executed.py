"""What row kernels and fused modules are lowered to for Ascend, executed on the CPU, computes the definitions."""

import json

import pytest

from tests.lowering.ascend_environment import run_there
from tests.lowering.ascend_execution_cases import PLANTED, PLANTED_IN_MODULES, missing, names

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, str]:
    lacking = missing()
    if lacking is not None:
        pytest.fail(f"the lowered kernels cannot be executed here: {lacking}", pytrace=False)
    folder = tmp_path_factory.mktemp("executed")
    result = run_there("-m", "tests.lowering.ascend_execution", str(folder / "found.json"), cache=folder / "cache")
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("case", names())
def test_the_lowered_kernel_computes_the_definition(found, case):
    assert found[case] == ""


def test_nothing_else_was_executed_but_planted_faults_and_those_are_seen(found):
    assert found.keys() == {*names(), PLANTED, PLANTED_IN_MODULES}
    assert found[PLANTED].startswith("logprob: ")
    assert found[PLANTED_IN_MODULES]
