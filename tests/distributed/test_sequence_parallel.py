"""Ranks that share the tokens of sequences (trainer.sequence_parallel_size) give what one process gives."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hwgrpo_backends.cpu import BACKEND
from safetensors.torch import load_file

from hwgrpo.errors import ConfigError
from hwgrpo.training import model_setup, setup
from hwgrpo.training.policy.layouts import BRANCHED, PADDED
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.training.policy.sequence_shard import join_sequence_group
from hwgrpo.training.sequence_checks import verify_sequence_parallel
from hwgrpo.training.strategies.single import Single
from tests.distributed.sequence_cases import CASES, kept_bytes, run_all, run_case
from tests.support.models.tiny import tiny_llama
from tests.support.numbers.rounding import assert_updates_close
from tests.support.processes.deepspeed_package import with_deepspeed
from tests.support.processes.launch import ROOT
from tests.support.processes.ranks import forked
from tests.support.runs import runs

Results = dict[str, torch.Tensor]
WAYS = {2: [("ddp", 2), ("fsdp2", 2)], 4: [("ddp", 4), ("fsdp2", 2), ("fsdp2", 4)]}
"""Ranks -> strategies and sizes of groups."""
TITLES = {2: list(CASES), 4: ["padded", "packed", "branched", "a loss of sequences", "window", "LoRA"]}
"""Ranks -> cases. With two groups a router loss is none to compare: each has a micro-batch, and a loss, of its own."""

ZERO_WAYS = [("zero-1", 2), ("zero-2", 2), ("zero-2", 4), ("zero-3", 2)]
ZERO_TITLES = ["branched", "one micro-batch for each row", "a loss of sequences", "layers recomputed", "LoRA"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory):
    known: dict[int, Path] = {}

    def of(ranks: int, name: str, size: int, case: str) -> Results:
        if ranks not in known:
            known[ranks] = tmp_path_factory.mktemp("out")
            assert forked(ranks, lambda rank: run_all(known[ranks], WAYS[ranks], TITLES[ranks])) == [0] * ranks
        return load_file(known[ranks] / f"{name} {size} {case}")

    return of


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what four ranks of DeepSpeed give; they are started once."""
    out = tmp_path_factory.mktemp("zero")
    words = (
        str(ROOT / "tests/distributed/sequence_cases.py"),
        str(out),
        json.dumps(ZERO_WAYS),
        json.dumps(ZERO_TITLES),
    )
    done = with_deepspeed(4, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def alone():
    """What one process gives, by case."""
    known: dict[str, Results] = {}

    def of(case: str) -> Results:
        if case not in known:
            known[case] = run_case(Single(torch.device("cpu"), "gloo"), CASES[case], 1)
        return known[case]

    return of


@pytest.mark.parametrize(
    ("ranks", "name", "size", "case"),
    [
        pytest.param(ranks, *way, case, marks=[pytest.mark.slow] * (ranks == 4))
        for ranks, ways in WAYS.items()
        for way in ways
        for case in TITLES[ranks]
    ],
)
def test_ranks_that_share_sequences_update_as_one_does(ranks: int, name: str, size: int, case: str, alone, found):
    assert_as_alone(found(ranks, name, size, case), alone(case), size, case)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "case"), [(*way, case) for way in ZERO_WAYS for case in ZERO_TITLES])
def test_ranks_of_zero_that_share_sequences_update_as_one_does(name: str, size: int, case: str, alone, zero: Path):
    assert_as_alone(load_file(zero / f"{name} {size} {case}"), alone(case), size, case)


def assert_as_alone(shared: Results, one: Results, size: int, case: str) -> None:
    """Compare what ranks gave, `size` of them to a group, with what one process gave."""
    assert {"loss", "norm", "met", "scored", "squares", "some scored", "reference"} < one.keys() == shared.keys()
    assert float(one["norm"]) > 1e-3
    fed, fed_alone = shared.pop("tokens fed").view(-1, size), one["tokens fed"]
    assert torch.equal(fed, fed[:, :1].expand_as(fed)), "ranks of a group go through the same micro-batches"
    assert float(fed.sum()) < 1.5 * float(fed_alone), "each with a part of the tokens"
    assert_updates_close(shared, {key: one[key] for key in shared}, CASES[case].tolerance)


def test_what_a_pass_keeps_for_its_backward_is_shared_out(tmp_path: Path):
    def body(rank: int) -> None:
        dist.init_process_group("gloo")
        (tmp_path / str(rank)).write_text(str(kept_bytes(2, rank)))
        dist.destroy_process_group()

    assert forked(2, body) == [0, 0]
    whole = kept_bytes(1)
    for rank in range(2):
        share = int((tmp_path / str(rank)).read_text()) / whole
        assert 0.45 < share < 0.6, share


def test_a_model_in_which_tokens_meet_beside_attention_is_refused_on_every_rank():
    def body(rank: int) -> None:
        dist.init_process_group("gloo")
        group = join_sequence_group(2, "gloo")
        policy = PolicyModel(tiny_llama(), compute_dtype=torch.float32, options=HeadOptions())
        for layout in (PADDED, BRANCHED):
            verify_sequence_parallel(policy, layout, group)
        layer = policy.base.model.layers[1]
        # each token takes something of the one before it, as a convolution does
        layer.mlp.register_forward_hook(lambda _, given, output: output + 0.5 * given[0].roll(1, dims=1))
        with pytest.raises(ConfigError, match=r"sequence_parallel_size=2: LlamaForCausalLM: .* would differ by"):
            verify_sequence_parallel(policy, PADDED, group)
        dist.destroy_process_group()

    assert forked(2, body) == [0, 0]


def test_a_run_refuses_before_the_model_is_loaded_and_tries_the_model_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each rank finds the same, so that none is left waiting."""

    def loaded(*given: Any) -> Any:
        raise AssertionError("loaded")

    def tried(*given: Any) -> None:
        raise ConfigError("tried")

    def body(rank: int) -> None:
        dist.init_process_group("gloo")
        shared = ("trainer.strategy=ddp", "trainer.sequence_parallel_size=2")
        eager, usual = (runs.small(tmp_path / "run", *shared, *more) for more in (("model.attention=eager",), ()))
        monkeypatch.setattr(model_setup, "verify_sequence_parallel", tried)
        with pytest.raises(ConfigError, match="tried"):
            setup.build_run(usual, BACKEND, rank, 2)
        monkeypatch.setattr(model_setup, "load_policy", loaded)
        with pytest.raises(ConfigError, match="parallel_size=2: attention eager"):
            setup.build_run(eager, BACKEND, rank, 2)
        dist.destroy_process_group()

    assert forked(2, body) == [0, 0]
