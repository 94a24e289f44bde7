"""Ranks that share the tokens of sequences (trainer.sequence_parallel_size) give what one process gives."""

import json
from pathlib import Path

import pytest
import torch
from launch import ROOT, torchrun
from safetensors.torch import load_file
from sequence_cases import CASES, run_case

from hwgrpo.training.strategies.single import Single

Results = dict[str, torch.Tensor]
WAYS = {2: [("ddp", 2), ("fsdp2", 2)], 4: [("ddp", 4), ("fsdp2", 2), ("fsdp2", 4)]}
"""Ranks -> strategies and sizes of groups."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory):
    known: dict[int, Path] = {}

    def of(ranks: int, name: str, size: int, case: str) -> Results:
        if ranks not in known:
            known[ranks] = tmp_path_factory.mktemp("out")
            done = torchrun(
                ranks, str(ROOT / "tests/support/sequence_cases.py"), str(known[ranks]), json.dumps(WAYS[ranks])
            )
            assert done.returncode == 0, done.stderr[-3000:]
        return load_file(known[ranks] / f"{name} {size} {case}.safetensors")

    return of


@pytest.fixture(scope="module")
def alone():
    """What one process gives, by case."""
    known: dict[str, Results] = {}

    def of(case: str) -> Results:
        if case not in known:
            known[case] = run_case(Single(torch.device("cpu"), "gloo"), CASES[case], 1)
        return known[case]

    return of


RUNS = [(ranks, *way, case) for ranks, ways in WAYS.items() for way in ways for case in CASES]


@pytest.mark.parametrize(
    ("ranks", "name", "size", "case"),
    # two groups have two micro-batches, each with a router loss of its own
    [run for run in RUNS if run[3] != "router loss" or run[0] == run[2]],
)
def test_ranks_that_share_sequences_update_as_one_does(ranks: int, name: str, size: int, case: str, alone, found):
    shared, one = found(ranks, name, size, case), alone(case)
    assert {"loss", "norm", "met", "scored", "some scored", "reference"} < one.keys() == shared.keys()
    assert float(one["norm"]) > 1e-3
    for key, true in one.items():
        assert shared[key].shape == true.shape, key
        error = (shared[key].double() - true.double()).norm() / true.double().norm().clamp_min(1e-12)
        assert error < 1e-5, f"{key}: {error:.2e}"
