"""What a test run that also collects other folders sees of this one."""

import subprocess
import sys
from pathlib import Path


def test_the_kernels_pass_their_tests_in_a_process_where_triton_interprets():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert result.returncode == 0, result.stdout + result.stderr
