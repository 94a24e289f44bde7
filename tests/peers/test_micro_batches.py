"""What micro-batches change in a peer's gradient, and nothing here, is what the pages say."""

import sys

import pytest

from tests.peers import micro_batches
from tests.support.processes.launch import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("peer", "cases"), [("verl", micro_batches.VERL), ("TRL", micro_batches.TRL)])
def test_the_page_has_the_table(peer: str, cases: dict[str, object]):
    page = (ROOT / "docs" / f"from-{peer.lower()}.md").read_text(encoding="utf-8").splitlines()
    printed = [*micro_batches.lines()]
    own = [line.replace(f"{peer}, ", "", 1) for line in printed if line.startswith(f"| {peer}, ")]
    assert len(own) == len(cases)
    listed = [*printed[:2], *own]
    assert [line for line in listed if line not in page] == [], "python -m tests.peers.micro_batches prints it"


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
