"""Every fault of tests/planted_faults can be planted, and its tests exist."""

import ast
from pathlib import Path

import pytest

from tests.planted_faults import FAULTS
from tests.planted_faults.fault import Fault

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault):
    source = (ROOT / "hwgrpo" / fault.file).read_text()
    assert source.count(fault.text) == 1
    ast.parse(source.replace(fault.text, fault.planted))
    assert (ROOT / "tests" / fault.tests.split()[0]).exists()


def test_faults_have_different_names():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
