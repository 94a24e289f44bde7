"""What a test run that also collects other folders sees of this one."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("mark", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_kernels_compile_in_a_process_of_their_own(mark):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", mark, str(Path(__file__).parent)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert result.returncode == 0, result.stdout + result.stderr
