"""What triton-ascend makes of every case, lowered once for all tests here, in an environment of its own."""

import json

import pytest

from tests.lowering.ascend_environment import run_there
from tests.lowering.ascend_lowering import Lowered


@pytest.fixture(scope="session")
def lowered(tmp_path_factory) -> dict[str, Lowered]:
    folder = tmp_path_factory.mktemp("ascend")
    result = run_there("-m", "tests.lowering.ascend_lowering", str(folder / "lowered.json"), cache=folder / "cache")
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return {name: Lowered(*each) for name, each in json.loads((folder / "lowered.json").read_text()).items()}
