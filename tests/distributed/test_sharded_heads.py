"""A policy sharded over two ranks, with its head, trains as in one process; unsupported settings are errors."""

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.distributed.sharded_cases import (
    FSDP_CASES,
    ZERO_CASES,
    Case,
    Found,
    assert_same,
    load,
    micro_batches,
    objective_of,
    policy_of,
)
from tests.support.processes.deepspeed_package import with_deepspeed
from tests.support.processes.launch import ROOT, forked


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory) -> list[Found]:
    """What each rank found with FSDP2, from one start of both."""
    return run(forked, "fsdp_worker.py", tmp_path_factory.mktemp("fsdp"))


@pytest.fixture(scope="module")
def zero(tmp_path_factory) -> list[Found]:
    """What each rank found with DeepSpeed ZeRO-3, from one start of both."""
    return run(with_deepspeed, "zero_worker.py", tmp_path_factory.mktemp("zero"))


def run(launch: Callable[..., CompletedProcess[str]], worker: str, out: Path) -> list[Found]:
    done = launch(2, str(ROOT / "tests/distributed" / worker), str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    return load(out)


@pytest.mark.parametrize("case", FSDP_CASES, ids=str)
def test_an_update_with_fsdp2_shards_is_that_of_one_process(fsdp, case):
    assert_same(fsdp, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ZERO_CASES, ids=str)
def test_an_update_with_zero_3_shards_is_that_of_one_process(zero, case):
    assert_same(zero, case)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "model sharded within the policy",
            ["ConfigError: fully_shard was applied to the FSDPQwen3ForCausalLM", "apply it to the PolicyModel"],
        ),
        ("model sharded before", ["ConfigError: the model's model.embed_tokens.weight is sharded already", "DTensor"]),
        ("inputs rounded", ["ConfigError: advantage came as torch.bfloat16", "cast_forward_inputs=False"]),
        (
            "backward twice",
            ["RuntimeError: linear_token_loss computes its gradients in the forward", "call linear_token_loss again"],
        ),
        ("checkpointed", ["RuntimeError: linear_token_loss computes its gradients in the forward", "checkpointing"]),
    ],
)
def test_what_fsdp2_cannot_do_with_a_policy_is_refused_with_the_remedy_on_all_ranks(fsdp, case, words):
    for each in fsdp:
        for part in words:
            assert part in each.refusals[case]


@pytest.mark.slow
def test_a_model_partitioned_as_it_was_made_is_refused_until_it_is_gathered(zero):
    for each in zero:
        assert (
            "model.embed_tokens.weight is sharded already (by deepspeed.zero.Init)"
            in each.refusals["model sharded before"]
        )


def test_a_second_backward_of_a_policys_loss_is_refused():
    case = Case("untied")
    loss = objective_of(case, policy_of(case), micro_batches()[0])
    loss.backward(retain_graph=True)
    with pytest.raises(
        RuntimeError, match=r"backward\(retain_graph=True\) cannot repeat it; call linear_token_loss again"
    ):
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_a_policys_loss_inside_a_checkpointed_region_is_refused(reentrant):
    case, micro = Case("untied"), micro_batches()[0]
    policy, leaf = policy_of(case), torch.ones((), requires_grad=True)
    with pytest.raises(RuntimeError, match="checkpoint the backbone's layers and call linear_token_loss outside"):
        checkpoint(lambda leaf: leaf * objective_of(case, policy, micro), leaf, use_reentrant=reentrant).backward()


def test_a_policy_leaves_its_head_the_forward_it_had_even_where_the_loss_fails():
    policy, micro = policy_of(Case("untied")), micro_batches()[0]
    head, hidden = policy.base.lm_head, torch.ones(2, 32)
    with pytest.raises(ZeroDivisionError):
        policy(micro, lambda stats, rows: 1 / 0)
    assert torch.equal(head(hidden), hidden @ head.weight.T)
    head.forward = lambda hidden: -hidden  # as libraries put one of theirs before a module's own
    policy(micro)
    assert torch.equal(head(hidden), -hidden)
