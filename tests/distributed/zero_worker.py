"""Run by torchrun: the updates of sharded_cases.py with DeepSpeed ZeRO-3 shards; each rank saves its part.

torchrun --nproc-per-node 2 zero_worker.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad

from hwgrpo.cli.process_exit import ended_as_rank
from hwgrpo.errors import ConfigError
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from tests.distributed.sharded_cases import (
    LR,
    ZERO_CASES,
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

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,  # 1.0 where nothing is said
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},  # none is too small to be cut
    "zero_allow_untested_optimizer": True,
}
BF16 = {
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "fp32",
}


def shard(policy: PolicyModel, case: Case) -> Any:
    """Shard the policy over all ranks; return DeepSpeed's engine."""
    optimizer = torch.optim.SGD([each for each in policy.parameters() if each.requires_grad], lr=LR)
    config = CONFIG | (BF16 if case.precision == "bf16" else {})
    return deepspeed.initialize(model=policy, optimizer=optimizer, config=config)[0]


def update(case: Case, rank: int) -> Values:
    """Run one update on this rank's micro-batches."""
    policy, micros, mine = policy_of(case), micro_batches(), share_of(rank)
    engine = shard(policy, case)
    result = score(policy, mine, "before")
    for i in mine:
        loss = objective_of(case, engine, micros[i])
        engine.backward(loss, scale_wrt_gas=False)
        result[f"loss.{i}"] = loss.detach()
        if i == mine[-1]:
            for name, parameter in policy.named_parameters():
                assert parameter.numel() == 0, f"{name} is whole after a backward"
                if parameter.requires_grad:
                    result[f"grad.{name}"] = safe_get_full_grad(parameter).clone()
        engine.step()
    return result | score(policy, mine, "after")


def refusals() -> dict[str, str]:
    """Try unsupported settings, then the remedy of the message; return the messages."""
    said = {}
    model = tiny_qwen3()
    deepspeed.zero.Init(module=model, config_dict_or_path=CONFIG)
    try:
        PolicyModel(model, compute_dtype=torch.float32, options=HeadOptions())
    except ConfigError as error:
        said["model sharded before"] = str(error)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        PolicyModel(model, compute_dtype=torch.float32, options=HeadOptions())
    return said


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    save(Path(sys.argv[1]), rank, {str(case): update(case, rank) for case in ZERO_CASES}, refusals())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with ended_as_rank():
        main()
