"""What micro-batches change in a peer's gradient, and nothing here, is what docs/from-verl.md says."""

import sys

import pytest

from tests.peers import micro_batches
from tests.support.processes.launch import ROOT

pytestmark = pytest.mark.slow


def test_the_page_has_the_table_of_verl():
    page = (ROOT / "docs" / "from-verl.md").read_text(encoding="utf-8").splitlines()
    printed = [*micro_batches.lines()]
    of_verl = [*printed[:2], *(line.replace("verl, ", "", 1) for line in printed if line.startswith("| verl, "))]
    assert len(of_verl) == len(micro_batches.VERL) + 2
    assert [line for line in of_verl if line not in page] == [], "python -m tests.peers.micro_batches prints it"


def test_a_short_table_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["micro_batches", "--smoke"])
    micro_batches.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| verl, the defaults", "| TRL, the defaults (`dapo`)"]
    assert all(line.endswith("| 0 | 0 | 0 |") for line in lines[2:])


@pytest.mark.parametrize("split", [2, 3])
def test_verl_adds_the_means_of_geo_mean(split: int):
    gaps = micro_batches.verl_gaps(micro_batches.VERL["`loss_mode=geo_mean`"])
    assert gaps[micro_batches.SPLITS.index(split)] == pytest.approx(split - 1, abs=1e-6)


def test_verls_width_of_the_micro_batch_divides_in_place_of_the_longest_response():
    gap = micro_batches.verl_gaps(micro_batches.VERL["the same without `loss_scale_factor`"])[0]
    assert gap == pytest.approx(micro_batches.LONGEST / 7 - 1, abs=1e-6)
