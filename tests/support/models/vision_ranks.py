"""How far an update of vision-language families on two ranks is from that of one, and which settings are refused.

All families and cases are run by one launch of two processes; each compares with what this process computed before.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hwgrpo.catalog import LAYOUTS, STRATEGIES
from hwgrpo.config import Config
from hwgrpo.errors import ConfigError
from hwgrpo.models.lora import apply_lora
from hwgrpo.models.vision import freeze_vision, vision_parameters
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.training.vision_checks import check_vision
from hwgrpo.values import Prompt
from tests.distributed.strategy_worker import gradients
from tests.support.models.image_sequences import Sequences
from tests.support.models.tiny import settings
from tests.support.models.vision_families import VISION_FAMILIES, model_of
from tests.support.numbers.rounding import gaps
from tests.support.processes.ranks import forked

CPU = torch.device("cpu")
WAYS: dict[str, tuple[str, ...]] = {
    "ddp": ("trainer.strategy=ddp",),
    "fsdp2": ("trainer.strategy=fsdp2",),
    "fsdp2, in each pass": ("trainer.strategy=fsdp2", "trainer.fsdp2.sync_every=micro_batch"),
}
"""Strategies of two ranks -> settings."""
TRAINED: dict[str, tuple[str, ...]] = {
    "all": ("model.train_vision=all",),
    "projector": ("model.train_vision=projector",),
    "none": (),
    "adapters": ("model.lora.rank=2", "model.lora.vision=all"),
}
"""What of the tower is trained -> settings."""
SHARES = {"images on both": ((0, 2), (1,)), "text alone on one": ((0, 1), (2,))}
"""Prompts of each rank: 0 has an image, 1 has two, 2 is text. They have different numbers of tokens."""
STEP_OF_ONE = ("optim.eps=1", "optim.grad_clip=1", "algorithm.aggregation.name=token-mean")
"""An update with a learning rate of 1 moves no weight by more than its gradient's error: lr / (|g| + eps) <= 1."""

REFUSED: dict[str, tuple[str, ...]] = {
    "trainer.sequence_parallel_size=2": ("trainer.strategy=ddp",),
    "trainer.tensor_parallel_size=2": ("trainer.strategy=fsdp2",),
    "trainer.deepspeed.stage=3": ("trainer.strategy=deepspeed",),
}
"""Settings of ranks that a model that reads images is refused with -> further ones."""


class Case(NamedTuple):
    """What is run for a family on two ranks: keys of `WAYS`, `TRAINED` and `SHARES`."""

    way: str
    trained: str
    share: str


CASES = (
    *(Case(way, trained, share) for way in ("ddp", "fsdp2") for trained in TRAINED for share in SHARES),
    Case("fsdp2, in each pass", "all", "text alone on one"),
)


@dataclass(frozen=True)
class RankDifference:
    """How far an update on two ranks is from that of one rank with all prompts."""

    gradient: float
    """By `gaps`: of the gradients, of all parameters that are trained."""
    weight: float
    """By `gaps`: of all weights after the step."""
    after_text: float
    """By `gaps`: of all weights after another step, on text alone."""
    moved: float
    """Of the tower's weights, the largest change by the step."""


def rank_differences(
    cases: Mapping[str, Sequence[Case]], folder: Path, *, limit_s: float = 240
) -> dict[str, dict[Case, RankDifference]]:
    """Compare updates of families on two ranks with those of one, in one launch of two processes.

    Args:
        cases: of each family by its name.
        folder: for the results.
        limit_s: seconds after which the processes are killed.
    """
    expected = {
        (name, trained): updated(name, ("trainer.strategy=single",), trained, ((0, 1, 2),))
        for name, of_family in cases.items()
        for trained in {case.trained for case in of_family}
    }

    def on_rank(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        found = []
        for name, of_family in cases.items():
            for case in of_family:
                values = updated(name, WAYS[case.way], case.trained, SHARES[case.share])
                if rank == 0:
                    found.append((name, case, asdict(_difference(values, expected[name, case.trained]))))
        if rank == 0:
            (folder / "ranks.json").write_text(json.dumps(found))
        dist.destroy_process_group()

    statuses = forked(2, on_rank, limit_s=limit_s)
    assert statuses == [0, 0], statuses
    result: dict[str, dict[Case, RankDifference]] = {name: {} for name in cases}
    for name, case, values in json.loads((folder / "ranks.json").read_text()):
        result[name][Case(*case)] = RankDifference(**values)
    return result


def updated(name: str, way: Sequence[str], trained: str, shares: Sequence[tuple[int, ...]]) -> dict[str, Tensor]:
    """Return what two updates on this rank's share of the prompts give, the second one of text alone.

    `grad.*` and `weight.*` are of the first, `after_text.*` the weights after the second; `moved` is the largest change
    of a weight of the tower by the first.

    Args:
        name: of the family.
        way: the strategy's settings.
        trained: key of `TRAINED`.
        shares: numbers of the prompts of each rank.
    """
    more = ("trainer.tokens_per_micro_batch=48", "optim.lr=1", *STEP_OF_ONE)
    config = settings(*TRAINED[trained], *more, *way)
    strategy = STRATEGIES.load(config.trainer.strategy).make(CPU, "gloo")
    strategy.prepare(config)
    policy = PolicyModel(_trained_model(name, config.model), compute_dtype=torch.float32, options=HeadOptions())
    assert policy.images is not None
    ids, images = VISION_FAMILIES[name].prompt(99)
    policy.images.sample = Prompt("sample", "", tuple(ids), None, {}, images=images)
    of_tower = {id(parameter) for _, _, parameter in vision_parameters(policy.base)}
    tower = {key: p.detach().clone() for key, p in policy.model.named_parameters() if id(p) in of_tower}
    strategy.wrap(policy, config)
    layout = LAYOUTS.load(VISION_FAMILIES[name].layouts[0])
    update = PolicyUpdate(config, strategy, policy, CPU, layout, total_updates=1)
    sequences = Sequences(name, observes=False, prompts=shares[strategy.rank])
    batch = sequences.batch()
    update.accumulate_gradients(batch, range(len(batch)))
    result = gradients(strategy, all_used=False)
    weights = _stepped(strategy, config)
    result["moved"] = torch.stack([(weights[key] - before).abs().max() for key, before in tower.items()]).max()
    result |= {f"weight.{key}": weight for key, weight in weights.items()}
    text = [s for s, prompt in enumerate(sequences.index) if sequences.prompts[prompt].images is None]
    update.accumulate_gradients(batch, text)
    return result | {f"after_text.{key}": weight for key, weight in _stepped(strategy, config).items()}


def _stepped(strategy: Strategy, config: Config) -> dict[str, Tensor]:
    """Apply an update's gradients; return all weights."""
    strategy.clip_gradients(config.optim.grad_clip)
    strategy.step(config.optim.lr)
    return {key: weight.clone() for key, weight in strategy.gather_full_parameters()}


def _trained_model(name: str, settings: Any) -> Any:
    """Return a family's model with the parts that the `model` settings train, and adapters that change something."""
    model = copy.deepcopy(model_of(name))
    if not settings.lora.rank:
        freeze_vision(model, settings.train_vision)
        return model
    torch.manual_seed(0)
    model = apply_lora(model, settings.lora)
    with torch.no_grad():  # of factors that are 0 half of the gradients were 0
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    return model


def _difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> RankDifference:
    far = []
    for kind in ("grad.", "weight.", "after_text."):
        ours, theirs = (
            {key: value for key, value in values.items() if key.startswith(kind)} for values in (found, expected)
        )
        far.append(max(gaps(ours, theirs).values()))
    return RankDifference(*far, moved=float(found["moved"]))


def refusals(name: str) -> dict[str, str]:
    """Return why a family's model is refused with each of the settings `REFUSED`; "" where it is not."""
    reasons = {}
    for setting, more in REFUSED.items():
        try:
            check_vision(_config(setting, *more), VISION_FAMILIES[name].config())
        except ConfigError as error:
            reasons[setting] = str(error)
        else:
            reasons[setting] = ""
    return reasons


@cache
def _config(*words: str) -> Config:
    return settings(*words)
