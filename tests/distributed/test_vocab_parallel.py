"""A vocabulary-parallel head over 2 and 4 ranks gives the results of the full head on one."""

import json
from typing import Any

import pytest
import torch

from tests.distributed.vocab_cases import comparisons
from tests.support.processes.launch import ROOT, forked

LIMITS = {"fp64": 1e-12, "fp32": 1e-5}
CASES = list(comparisons(2))


@pytest.fixture(
    scope="module",
    params=[pytest.param(2, id="two ranks"), pytest.param(4, id="four ranks", marks=pytest.mark.slow)],
)
def found(request, tmp_path_factory) -> list[dict[str, Any]]:
    """What each rank found, from one start of all of them."""
    out = tmp_path_factory.mktemp("ranks")
    done = forked(request.param, str(ROOT / "tests/distributed/vocab_worker.py"), str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(request.param)]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_whole_head_and_the_same_bits_on_all_ranks(found, case, dtype):
    for rank, each in enumerate(found):
        for quantity, error in each[dtype][case]["errors"].items():
            assert error <= LIMITS[dtype], f"{quantity} on rank {rank}: {error:.1e}"
    assert len({each[dtype][case]["same"] for each in found}) == 1


def test_a_nearly_certain_target_keeps_its_digits(found):
    for each in found:
        assert each["certain"] <= 1e-5


def test_in_bf16_the_sum_over_ranks_costs_little_precision(found):
    for each in found:
        assert each["bf16"]["weight"] <= 1.01
        assert each["bf16"]["hidden"] <= 1.5
        exact = torch.tensor(256.0 + len(found) - 1).bfloat16().item()  # bf16 partial sums would stay at 256
        assert each["small and large"] == [exact] * len(found)


def test_the_ranks_talk_once_for_their_sizes_once_per_chunk_and_once_for_the_hidden_gradient(found):
    for each in found:
        assert each["collectives"] == {
            "token": {"all_gather_object": 1, "all_gather": 5, "all_reduce": 1},
            "batch": {"all_gather_object": 1, "all_gather": 5, "all_reduce": 1},
            "frozen hidden": {"all_gather_object": 1, "all_gather": 5, "all_reduce": 0},
        }


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("H of weight", ["weight_VH is [V,H] with H=11, but hidden_NH has H=12"]),
        ("logprob H", ["but hidden has H=11"]),
        ("no tensor", ["targets_N must be a tensor, got NoneType"]),
        ("no hidden states", ["hidden_NH must be a tensor, got list"]),
        ("an error of another type", ["KeyError: 'shape'"]),
        ("pin", ["HWGRPO_KERNELS: row_stats=triton cannot run: needs cuda or npu, have cpu"]),
        ("logprob pin", ["HWGRPO_KERNELS: row_stats=triton cannot run: needs cuda or npu, have cpu"]),
        ("targets", ["targets contains", "outside [0, 101)"]),
        ("targets on one rank", ["a checksum of targets_N is", "on rank 1"]),
        ("N", ["hidden's N is 47 on rank 1 of vocab_group, but 48 on rank 0"]),
        ("row_mask", ["the number of unmasked rows is 32 on rank 1", "but 16"]),
        ("requires_grad", ["hidden_NH's requires_grad is False on rank 1", "but True"]),
        ("chunk_rows", ["chunk_rows is 11 on rank 1", "but 10"]),
        ("logprob chunk_rows", ["chunk_rows is 6 on rank 1", "but 5"]),
        ("another mask", ["a checksum of row_mask is", "on rank 1"]),
        ("order of targets", ["a checksum of targets_N is", "on rank 1"]),
        ("cu_seqlens", ["cu_seqlens is [0, 10, 20, 48] on rank 1", "but [0, 5, 25, 48] on rank 0"]),
        ("an empty error", ["RuntimeError: "]),
        ("scope", ["scope is batch on rank 1", "but token"]),
        ("temperature", ["temperature=-1.0 must be positive"]),
    ],
)
def test_an_argument_that_is_wrong_on_some_rank_is_refused_by_name_on_all(found, case, words):
    for each in found:
        for part in words:
            assert part in each["refusals"][case]


def test_a_target_out_of_range_is_nan_in_its_own_row_on_all_ranks(found):
    for each in found:
        maxima = {"output 2 with kl", "output 7 with kl"}
        for name, is_nan in each["outside"].items():
            assert is_nan == ([False] * 3 if name in maxima else [True, False, True]), name


def test_a_group_without_this_process_is_refused(found):
    for each in found[1:]:
        assert "vocab_group must be a torch.distributed ProcessGroup" in each["refusals"]["group"]


def test_nothing_holds_the_group_when_it_is_destroyed(found):
    """Its threads would outlive it, and abort the process now and then as the interpreter ends."""
    for each in found:
        assert each["threads"] == []
