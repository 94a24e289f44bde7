"""Run by torchrun: the updates of sharded_cases.py with FSDP2 shards, and what is refused; each rank saves its part.

torchrun --nproc-per-node 2 fsdp_worker.py FOLDER
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from hwgrpo.cli.process_exit import ended_as_rank
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from tests.distributed.sharded_cases import (
    FSDP_CASES,
    LR,
    Case,
    Values,
    micro_batches,
    objective_of,
    policy_of,
    save,
    score,
    share_of,
)
from tests.support.models.tiny import tiny_qwen3


def shard(policy: PolicyModel, case: Case) -> Any:
    """Shard the policy over all ranks."""
    options = {}
    if case.precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    if case.units != "none":
        for layer in policy.base.model.layers:
            fully_shard(layer, **options)
    if case.units == "head":
        head = policy.base.lm_head
        fully_shard([policy.base.model.embed_tokens, head] if case.head == "tied" else head, **options)
    return fully_shard(policy, **options)


def update(case: Case, rank: int) -> Values:
    """Run one update on this rank's micro-batches."""
    micros, mine = micro_batches(), share_of(rank)
    policy = shard(policy_of(case), case)
    result = score(policy, mine, "before")
    for i in mine:
        policy.set_requires_gradient_sync(i == mine[-1])
        loss = objective_of(case, policy, micros[i])
        loss.backward()
        result[f"loss.{i}"] = loss.detach()
    for name, parameter in policy.named_parameters():
        assert isinstance(parameter, DTensor), name
        if parameter.requires_grad:
            grad = parameter.grad
            assert isinstance(grad, DTensor), name
            assert grad.to_local().shape == parameter.to_local().shape, name
            assert grad.to_local().shape[0] < grad.shape[0], name
            result[f"grad.{name}"] = grad.full_tensor()
    torch.optim.SGD(policy.parameters(), lr=LR).step()
    return result | score(policy, mine, "after")


def refusals() -> dict[str, str]:
    """Try what must be refused; return what is said."""
    said: dict[str, str] = {}

    @contextmanager
    def refused(name: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, RuntimeError) as error:
            said[name] = f"{type(error).__name__}: {error}"

    case, micro = Case("untied"), micro_batches()[0]
    with refused("model sharded within the policy"):
        policy = policy_of(case)
        fully_shard(policy.model)
        objective_of(case, policy, micro)
    with refused("model sharded before"):
        PolicyModel(fully_shard(tiny_qwen3()), compute_dtype=torch.float32, options=HeadOptions())
    with refused("inputs rounded"):
        policy = fully_shard(policy_of(case), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        objective_of(case, policy, micro)
    with refused("backward twice"):
        loss = objective_of(case, shard(policy_of(case), case), micro)
        loss.backward(retain_graph=True)
        loss.backward()
    with refused("checkpointed"):
        policy = shard(policy_of(case), case)
        checkpoint(lambda: objective_of(case, policy, micro), use_reentrant=False)
    return said


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    save(
        Path(sys.argv[1]),
        dist.get_rank(),
        {str(case): update(case, dist.get_rank()) for case in FSDP_CASES},
        refusals(),
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    with ended_as_rank():
        main()
