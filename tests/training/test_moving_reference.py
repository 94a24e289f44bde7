"""A reference that follows the policy: moved as TRL moves it, in fp32, saved, resumed, and refused where it cannot."""

import copy
import re
from pathlib import Path

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND
from safetensors.torch import load_file

from hwgrpo.config.schema import KlConfig, LoraConfig
from hwgrpo.errors import ConfigError
from hwgrpo.models.lora import apply_lora, reference_name
from hwgrpo.training.moving_reference import move_reference
from hwgrpo.training.setup import build_run
from tests.resume.test_ranks import start, steps
from tests.support.models.tiny import tiny_qwen3
from tests.support.runs import runs

MOVED = ("algorithm.kl.coef=0.1", "algorithm.kl.sync_every=2", "algorithm.kl.sync_share=0.6", "trainer.save_every=1")
LORA = ("model.lora.rank=2", "model.lora.dropout=0", "optim.lr=1e-2")
MOVED_LORA = ("algorithm.kl.coef=0.1", "algorithm.kl.sync_every=2", "trainer.save_every=1", *LORA)


def test_it_is_moved_every_few_steps_by_its_share_of_the_policy(tmp_path: Path):
    run = build_run(runs.small(tmp_path / "run", *MOVED), BACKEND, 0, 1)
    policy, reference = run.update.policy, run.reference
    run.close()
    assert reference is not None
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01)
    before = copy.deepcopy(dict(reference.policy.model.named_parameters()))
    config = KlConfig(coef=0.1, sync_every=2, sync_share=0.6)
    move_reference(reference, policy, config, 1)
    after = dict(reference.policy.model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items()), "not due"
    move_reference(reference, policy, config, 2)
    for name, trained in policy.model.named_parameters():
        expected = before[name].double() * 0.4 + trained.detach().double() * 0.6  # TRL's SyncRefModelCallback
        torch.testing.assert_close(after[name].double(), expected, rtol=1e-6, atol=1e-7)
    move_reference(reference, policy, KlConfig(coef=0.1, sync_every=2), 4)
    assert all(torch.equal(after[name], trained) for name, trained in policy.model.named_parameters())
    assert not any(p.requires_grad for p in reference.policy.parameters())


def test_a_reference_that_moves_is_fp32_where_products_are_in_16_bits(tmp_path: Path):
    dtypes = {}
    for words in (MOVED, ("algorithm.kl.coef=0.1",)):
        run = build_run(runs.small(tmp_path / str(len(words)), *words, "model.dtype=bfloat16"), BACKEND, 0, 1)
        assert run.reference is not None
        dtypes[len(words)] = {p.dtype for p in run.reference.policy.model.parameters()}
        run.close()
    assert dtypes[len(MOVED)] == {torch.float32}


@pytest.mark.parametrize("way", ["single 1", "ddp 2", "fsdp2 2"])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_resumed_run_has_the_reference_as_it_was_moved(way: str, kind: str, tmp_path: Path):
    moved, lora = (MOVED, ()) if kind == "full" else (MOVED_LORA, LORA)
    start(tmp_path / "whole", way, 4, *moved)
    start(tmp_path / "parts", way, 3, *moved)
    saved = f"trainer.resume={tmp_path}/parts/checkpoints/step-00000003"
    start(tmp_path / "parts", way, 4, *moved, saved)
    start(tmp_path / "fixed", way, 4, "algorithm.kl.coef=0.1", *lora)
    whole, parts, fixed = (steps(tmp_path / each) for each in ("whole", "parts", "fixed"))
    assert parts == whole
    assert [line["actor/kl_loss"] for line in whole[:2]] == [line["actor/kl_loss"] for line in fixed[:2]]
    assert whole[1]["actor/kl_loss"] > 0
    most = 0.5 * fixed[2]["actor/kl_loss"] if kind == "full" else 0  # a copy of the policy has its log-probs
    assert whole[2]["actor/kl_loss"] <= most < fixed[2]["actor/kl_loss"], "moved after step 2"
    assert whole[3]["actor/kl_loss"] > 0
    found, expected = (runs.everything(tmp_path / each)["weights"] for each in ("parts", "whole"))
    assert found == expected


def test_a_frozen_copy_of_an_adapter_costs_no_random_numbers_and_is_not_trained():
    config = LoraConfig(rank=2)
    parameters, drawn = [], []
    for moving in (False, True):
        torch.manual_seed(3)
        model = apply_lora(tiny_qwen3(), config, moving_reference=moving)
        parameters.append({name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad})
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)
    assert parameters[0].keys() == parameters[1].keys()
    assert all(torch.equal(value, parameters[1][name]) for name, value in parameters[0].items())
    assert {name.split(".")[-2] for name in parameters[1]} == {"default"}
    copied = dict(model.named_parameters())
    assert all(torch.equal(value, copied[reference_name(name)]) for name, value in parameters[1].items())


def test_the_copy_of_an_adapter_that_is_trained_further_follows_it(tmp_path: Path):
    start(tmp_path / "first", "single 1", 2, *LORA)
    words = (f"model.lora.adapter={tmp_path}/first/final-adapter", "optim.lr=1e-2", "algorithm.kl.coef=0.1")
    start(tmp_path / "fixed", "single 1", 2, *words)
    start(tmp_path / "moved", "single 1", 2, *words, "algorithm.kl.sync_every=1")
    fixed, moved = ([line["actor/kl_loss"] for line in steps(tmp_path / each)] for each in ("fixed", "moved"))
    assert fixed[0] == moved[0] == moved[1] == 0
    assert fixed[1] > 0


def joined(folder: Path) -> dict[str, torch.Tensor]:
    """Return name -> elements of a checkpoint's reference, from the shards of all ranks."""
    shards: dict[str, dict[int, torch.Tensor]] = {}
    for path in folder.glob("reference-rank*.safetensors"):
        tensors = load_file(path)
        for name in (name for name in tensors if not name.endswith(".start")):
            start = int(tensors[f"{name}.start"])
            assert start not in shards.setdefault(name, {}), "two ranks save the same elements"
            shards[name][start] = tensors[name]
    assert shards
    return {name: torch.cat([each[start] for start in sorted(each)]) for name, each in shards.items()}


def test_ranks_with_a_shard_each_move_it_as_one_process_does(tmp_path: Path):
    start(tmp_path / "one", "single 1", 3, *MOVED)
    start(tmp_path / "two", "fsdp2 2", 3, *MOVED)
    one, two = steps(tmp_path / "one"), steps(tmp_path / "two")
    assert two[2]["actor/kl_loss"] == pytest.approx(one[2]["actor/kl_loss"], rel=1e-3)
    expected, found = (joined(tmp_path / each / "checkpoints/step-00000003") for each in ("one", "two"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


WIDE = "model.path=builtin://tiny?task=sort&hidden=128&layers=1&steps=30&batch=32&digits=3"
"""A model with two key-value heads, for tensor parallelism."""
OTHER_RANKS = ("fsdp2 2", "fsdp2 4", "ddp 2", "fsdp2 4 tensor", "single 1")


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_other_ranks_and_strategies_resume_it_bit_for_bit(kind: str, tmp_path: Path):
    common = ("algorithm.kl.coef=0.1", "trainer.save_every=1", *(LORA if kind == "lora" else (WIDE,)))
    start(tmp_path / "run", "single 1", 1, *common, "algorithm.kl.sync_every=1")
    first = joined(tmp_path / "run/checkpoints/step-00000001")
    kept = (*common, "algorithm.kl.sync_every=100")
    ways = [way for way in OTHER_RANKS if kind == "full" or "tensor" not in way]  # not with adapters
    for step, way in enumerate(ways, start=2):
        strategy, processes, *tensor = way.split()
        parallel = ("trainer.tensor_parallel_size=2",) if tensor else ()
        start(tmp_path / "run", f"{strategy} {processes}", step, *kept, *parallel)
        found = joined(tmp_path / f"run/checkpoints/step-{step:08d}")
        assert found.keys() == first.keys(), way
        assert all(torch.equal(found[name], value.flatten()) for name, value in first.items()), way
    start(tmp_path / "alone", "single 1", 1, *common, "algorithm.kl.sync_every=1")
    start(tmp_path / "alone", "single 1", len(ways) + 1, *kept)
    losses = [[line["actor/kl_loss"] for line in steps(tmp_path / each)] for each in ("run", "alone")]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[1][-1] > 0


def test_a_resume_with_a_fixed_reference_says_that_it_is_another(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert runs.run(tmp_path / "run", *MOVED, "trainer.max_steps=2") == "completed"
    words = ("algorithm.kl.coef=0.1", "trainer.max_steps=3", "observe.progress=plain")
    assert runs.run(tmp_path / "run", *words) == "completed"
    said = capsys.readouterr().out
    assert "step-00000002 is left out: with algorithm.kl.sync_every=0 it is the model of the start" in said


def test_a_reference_beside_quantized_weights_follows_the_policy(tmp_path: Path):
    words = (*MOVED_LORA, "model.quantize=nf4", "model.dtype=float32")
    start(tmp_path / "run", "single 1", 3, *words)
    losses = [line["actor/kl_loss"] for line in steps(tmp_path / "run")]
    assert losses[0] == losses[2] == 0 < losses[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.lora.rank=2"], "algorithm.kl.sync_share=0.6 with model.lora.rank=2"),
        (
            ["trainer.strategy=deepspeed", "trainer.deepspeed.stage=3"],
            "algorithm.kl.sync_every=2 with trainer.strategy='deepspeed' and trainer.deepspeed.stage=3",
        ),
        (["algorithm.kl.sync_every=0"], "algorithm.kl.sync_share=0.6 has no effect with algorithm.kl.sync_every=0"),
        (["algorithm.kl.sync_share=0"], "algorithm.kl.sync_share=0"),
    ],
)
def test_what_cannot_be_moved_is_refused_by_name(overrides, message, tmp_path: Path):
    with pytest.raises(ConfigError, match=re.escape(message)):
        runs.small(tmp_path, *MOVED, *overrides)


NO_EFFECT = "warning: algorithm.kl.coef=0.1 has no effect: with algorithm.kl.sync_every=1, sync_share=1 and one update"


@pytest.mark.parametrize(
    ("overrides", "noted"),
    [
        ((), True),
        (("algorithm.kl.sync_every=2",), False),
        (("algorithm.kl.sync_share=0.5",), False),
        (("trainer.prompts_per_update=2",), False),
        (("trainer.epochs_per_batch=2",), False),
    ],
)
def test_a_reference_that_is_always_the_policy_is_noted(overrides, noted, tmp_path: Path, capsys):
    words = ("algorithm.kl.coef=0.1", "algorithm.kl.sync_every=1", "trainer.max_steps=2", "observe.progress=plain")
    assert runs.run(tmp_path / "run", *words, *overrides) == "completed"
    assert (NO_EFFECT in capsys.readouterr().out) == noted
    assert all(line["actor/kl_loss"] == 0 for line in steps(tmp_path / "run")) == noted
