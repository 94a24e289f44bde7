"""The row kernels compute the definitions in triton-ascend's own interpreter: its front end is Triton 3.2's."""

import pytest

from tests.lowering.ascend_environment import REPO, run_there


@pytest.mark.slow
def test_the_kernels_pass_their_tests_in_the_interpreter_of_triton_ascend(tmp_path):
    files = [str(REPO / "tests" / "interpreter" / name) for name in ("test_repairs.py", "test_rows_one_lane.py")]
    result = run_there("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, cache=tmp_path)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout
