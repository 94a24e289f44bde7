"""docs/config.md is what the schema says now."""

import subprocess
import sys

from tests.docs.pages import REPO


def test_the_config_reference_is_current():
    command = [sys.executable, "scripts/generate_config_reference.py", "--check"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
