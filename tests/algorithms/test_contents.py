"""The table of contents: every name loads, and naming costs nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from hwgrpo import catalog

REPOSITORY = Path(__file__).resolve().parents[2]
REGISTRIES = ["ADVANTAGES", "AGGREGATIONS", "CORRECTIONS", "KL_ESTIMATORS", "POLICY_LOSSES"]


@pytest.mark.parametrize("registry", REGISTRIES)
def test_every_registered_name_loads_and_is_documented(registry):
    table = getattr(catalog, registry)
    assert table.names()
    for name in table.names():
        loaded = table.load(name)
        assert callable(loaded)
        assert getattr(loaded, "function", loaded).__doc__


def test_the_table_of_contents_imports_no_torch():
    code = "import sys, hwgrpo.catalog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0
