"""Muon for the matrices of the layers and AdamW for the rest: torch's own steps, saved, resumed, refused by name."""

import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.config.schema import OptimConfig
from hwgrpo.errors import CheckpointError, ConfigError
from hwgrpo.planning.planner import Planner
from hwgrpo.training.setup import build_run
from hwgrpo.training.strategies.muon import MuonAdamW
from hwgrpo.training.strategies.optimizer import build_optimizer
from tests.resume.test_ranks import start, steps
from tests.support.runs import runs

MUON = ("optim.name=muon", "optim.weight_decay=0.1", "trainer.save_every=1")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory):
    run = build_run(runs.small(tmp_path_factory.mktemp("run") / "run"), BACKEND, 0, 1)
    run.close()
    return run.update.policy


def test_a_step_is_that_of_torchs_optimizers(policy):
    ours, theirs = copy.deepcopy(policy), copy.deepcopy(policy)
    config = OptimConfig(name="muon", lr=1e-2, weight_decay=0.1)
    optimizer = build_optimizer(ours, config)
    assert isinstance(optimizer, MuonAdamW)
    named = dict(theirs.model.named_parameters())
    matrices = {n: p for n, p in named.items() if ".layers." in n and p.dim() == 2}
    rest = [p for n, p in named.items() if n not in matrices]
    assert matrices
    assert any(p.dim() == 2 for p in rest), "the embeddings are AdamW's"
    reference = [
        torch.optim.Muon(matrices.values(), lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in rest if p.dim() > 1], lr=1e-2, weight_decay=0.1, fused=True),
        torch.optim.AdamW([p for p in rest if p.dim() < 2], lr=1e-2, weight_decay=0.0, fused=True),
    ]
    generator = torch.Generator().manual_seed(0)
    for lr in (1e-2, 5e-3):
        for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        for each in (optimizer, *reference):
            for group in each.param_groups:
                group["lr"] = lr
            each.step()
    for (name, one), other in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("way", ["single 1", "ddp 2"])
@pytest.mark.parametrize("adapters", [(), ("model.lora.rank=2",)], ids=["full", "lora"])
def test_a_resumed_run_changes_no_bit(way: str, adapters: tuple[str, ...], tmp_path: Path):
    start(tmp_path / "whole", way, 3, *MUON, *adapters)
    start(tmp_path / "parts", way, 2, *MUON, *adapters)
    saved = f"trainer.resume={tmp_path}/parts/checkpoints/step-00000002"  # by name: not from step 0 if it is damaged
    start(tmp_path / "parts", way, 3, *MUON, *adapters, saved)
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")
    found, expected = (runs.everything(tmp_path / each)["weights"] for each in ("parts", "whole"))
    assert found == expected


def test_a_checkpoint_of_one_rank_is_continued_on_two(tmp_path: Path):
    start(tmp_path / "run", "single 1", 1, *MUON)
    start(tmp_path / "run", "ddp 2", 2, *MUON, "trainer.strategy=ddp")
    start(tmp_path / "whole", "single 1", 2, *MUON)
    several, one = steps(tmp_path / "run"), steps(tmp_path / "whole")
    assert several[1]["reward"] == one[1]["reward"]
    assert several[1]["actor/grad_norm"] == pytest.approx(one[1]["actor/grad_norm"], rel=1e-4)


def test_the_states_of_one_optimizer_are_not_given_to_the_other(tmp_path: Path):
    runs.run(tmp_path / "run", "trainer.max_steps=1")
    with pytest.raises(CheckpointError, match=r"optim.name='muon', but .* was saved with 'adamw'"):
        runs.run(tmp_path / "run", "optim.name=muon", "trainer.max_steps=2")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.strategy=fsdp2"], "optim.name='muon' with trainer.strategy='fsdp2': Muon needs full matrices"),
        (["trainer.strategy=deepspeed"], "optim.name='muon' with trainer.strategy='deepspeed'"),
        (["trainer.offload=optimizer"], "optim.name='muon' with trainer.offload='optimizer'"),
        (["optim.momentum=1"], "optim.momentum=1"),
    ],
)
def test_what_muon_cannot_do_is_refused_by_name(overrides, message, tmp_path: Path):
    with pytest.raises(ConfigError, match=re.escape(message)):
        runs.small(tmp_path, *MUON, *overrides)


def test_the_plan_counts_one_state_of_the_matrices(tmp_path: Path, policy):
    plans = [
        Planner(config).memory(BACKEND, 1, replace(config.trainer, strategy="single"), separate=False).always
        for config in (runs.small(tmp_path, *words) for words in (("optim.name=muon",), ()))
    ]
    muon, adamw = (sum(v for k, v in plan.items() if k.startswith("optimizer states")) for plan in plans)
    matrices = sum(p.numel() for n, p in policy.model.named_parameters() if ".layers." in n and p.dim() == 2)
    assert adamw - muon == 4 * matrices
