"""The catalog: every name that a setting may choose loads, and naming costs nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from hwgrpo import catalog
from hwgrpo.registry import Registry

REPOSITORY = Path(__file__).resolve().parents[2]
REGISTRIES = {name: table for name, table in vars(catalog).items() if isinstance(table, Registry)}


@pytest.mark.parametrize("registry", REGISTRIES)
def test_every_name_loads_and_is_documented(registry):
    table = REGISTRIES[registry]
    assert table.names() or table in (catalog.METRICS, catalog.STAGES)  # all of these are users'
    for name in table.names():
        loaded = table.load(name)
        assert getattr(loaded, "function", loaded).__doc__


def test_the_catalog_imports_no_torch():
    code = "import sys, hwgrpo.catalog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0
