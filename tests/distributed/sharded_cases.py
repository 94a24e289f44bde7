"""One update of a tiny policy over four micro-batches, as one process runs it and as ranks with shards of it do."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from hwgrpo.algorithms.policy_loss import build_loss
from hwgrpo.config.schema import AlgorithmConfig, KlConfig
from hwgrpo.training.policy.layouts import PADDED
from hwgrpo.training.policy.micro_batch import MicroBatch, build_micro_batch
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.training.update.train_batch import loss_signals, with_weights
from tests.support.models.tiny import ragged_batch, tiny_qwen3
from tests.support.numbers.rounding import BF16_FLIP, STEP, assert_updates_close

RANKS = 2
LR = 0.5
HEADS = ("tied", "untied", "frozen")
MICRO_BATCHES = [[[0], [1], [2]], [[3], [4], [5]], [[6], [7], [8], [9], [10], [11]], []]
"""Sequences of each; the first rank takes the first two. The last is empty, as where a rank has less to do."""
Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """How the head is kept, what is computed in, which modules are gathered on their own, and what is trained on.

    Args:
        head: tied to the embeddings, of its own, or of its own and frozen.
        precision: fp32; fp32 weights under autocast; or bf16 weights in the passes, fp32 in sums and optimizer.
        units: what FSDP2 gathers apart from the rest: the layers; the layers and the head; nothing.
        objective: the loss of an update, whose gradients are made in the forward, or the log-probs.
    """

    head: Literal["tied", "untied", "frozen"]
    precision: Literal["fp32", "autocast", "bf16"] = "fp32"
    units: Literal["layers", "head", "none"] = "layers"
    objective: Literal["loss", "logprob"] = "loss"

    def __str__(self) -> str:
        return f"{self.head}-{self.precision}-{self.units}-{self.objective}"


def _fsdp_cases() -> Iterator[Case]:
    for head in HEADS:
        for precision in ("fp32", "autocast", "bf16"):
            yield Case(head, precision)
            yield Case(head, precision, "head")
        yield Case(head, "fp32", "none")
        yield Case(head, "fp32", "head", "logprob")


FSDP_CASES = list(_fsdp_cases())
ZERO_CASES = [Case(head, precision) for head in HEADS for precision in ("fp32", "autocast", "bf16")]
ZERO_CASES += [Case(head, objective="logprob") for head in HEADS]


def policy_of(case: Case) -> PolicyModel:
    """Return the policy in one piece, in fp32."""
    model = tiny_qwen3(tied=case.head == "tied")
    if case.head == "frozen":
        model.lm_head.weight.requires_grad_(False)
    if case.precision == "bf16":  # DeepSpeed's optimizer starts from what bf16 keeps of the weights
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
    dtype = torch.float32 if case.precision == "fp32" else torch.bfloat16
    return PolicyModel(model, compute_dtype=dtype, options=HeadOptions(chunk_rows=5))


def micro_batches() -> list[MicroBatch]:
    """Return the update's micro-batches; weights add up to a mean over its tokens, times the number of ranks."""
    batch = ragged_batch(old=True, ref=True)
    batch = with_weights(batch, range(len(batch)), torch.full((len(batch),), RANKS / len(batch.tokens)))
    return [build_micro_batch(batch, rows, loss_signals(batch, rollout=False), PADDED) for rows in MICRO_BATCHES]


def share_of(rank: int) -> list[int]:
    """Return the indices of a rank's micro-batches."""
    each = len(MICRO_BATCHES) // RANKS
    return list(range(rank * each, (rank + 1) * each))


def objective_of(case: Case, call: Callable[..., Any], micro: MicroBatch) -> torch.Tensor:
    """Return what is trained on: a clipped loss with a KL term and an entropy bonus, or a sum of log-probs."""
    if case.objective == "logprob":
        return 0.01 * call(micro).logprob.sum()
    return call(micro, build_loss(AlgorithmConfig(kl=KlConfig(coef=0.05), entropy_coef=0.01))).loss


def score(call: Callable[[MicroBatch], Any], indices: list[int], name: str) -> Values:
    """Return the log-probs of micro-batches, without gradient."""
    micros = micro_batches()
    with torch.no_grad():
        return {f"{name}.{i}": call(micros[i]).logprob for i in indices}


def alone(case: Case) -> Values:
    """Run the update in this process: log-probs before and after it, the loss of each micro-batch, all gradients."""
    policy, micros = policy_of(case), micro_batches()
    everything = list(range(len(micros)))
    result = score(_for_passes(policy, case), everything, "before")
    for i in everything:
        working = _for_passes(policy, case)
        loss = objective_of(case, working, micros[i])
        loss.backward()
        result[f"loss.{i}"] = loss.detach()
        if working is not policy:
            for master, half in zip(policy.parameters(), working.parameters()):
                if half.grad is not None:
                    master.grad = half.grad.float() + (0 if master.grad is None else master.grad)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, name
                parameter.grad /= RANKS
                parameter -= LR * parameter.grad
                result[f"grad.{name}"] = parameter.grad
    return result | score(_for_passes(policy, case), everything, "after")


def _for_passes(policy: PolicyModel, case: Case) -> PolicyModel:
    """Return the policy with the weights that passes see; buffers stay as they are."""
    if case.precision != "bf16":
        return policy
    working = copy.deepcopy(policy)
    for parameter in working.parameters():
        parameter.data, parameter.grad = parameter.data.bfloat16(), None
    return working


def save(folder: Path, rank: int, values: dict[str, Values], refusals: dict[str, str]) -> None:
    """Write what a rank found, by case."""
    flat = {f"{case}/{name}": each.contiguous() for case, found in values.items() for name, each in found.items()}
    save_file(flat, folder / f"{rank}.safetensors")
    (folder / f"{rank}.json").write_text(json.dumps(refusals))


@dataclass(frozen=True)
class Found:
    """What one rank found: values by case, and the messages of what was refused."""

    values: dict[str, Values]
    refusals: dict[str, str]


def load(folder: Path) -> list[Found]:
    """Read what every rank found."""
    ranks = []
    for rank in range(RANKS):
        values: dict[str, Values] = {}
        for name, each in load_file(folder / f"{rank}.safetensors").items():
            case, _, quantity = name.partition("/")
            values.setdefault(case, {})[quantity] = each
        ranks.append(Found(values, json.loads((folder / f"{rank}.json").read_text())))
    return ranks


def assert_same(ranks: list[Found], case: Case) -> None:
    """Compare what ranks found with what one process does: values of each one's share, and all gradients, on each."""
    expected = alone(case)
    gradients = {name for name in expected if name.startswith("grad.")}
    assert gradients
    for rank, each in enumerate(ranks):
        found = each.values[str(case)]
        kinds = ("before", "loss", "after")
        assert set(found) == gradients | {f"{kind}.{i}" for kind in kinds for i in share_of(rank)}
        true = {name: expected[name] for name in found}
        after = {name for name in found if name.startswith("after.")}
        assert_updates_close(_without(found, after), _without(true, after), what=f"rank {rank}: ")
        limit = STEP if case.precision == "fp32" else BF16_FLIP
        assert_updates_close({name: found[name] for name in after}, {name: true[name] for name in after}, limit)


def _without(values: Values, names: set[str]) -> Values:
    return {name: value for name, value in values.items() if name not in names}
