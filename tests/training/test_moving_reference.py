"""A reference that follows the policy: moved as TRL moves it, in fp32, saved, resumed, and refused where it cannot."""

import copy
import re
from pathlib import Path

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND
from safetensors.torch import load_file

from hwgrpo.config.optional_settings import KlConfig
from hwgrpo.errors import ConfigError
from hwgrpo.training.moving_reference import move_reference
from hwgrpo.training.setup import build_run
from tests.resume.test_ranks import start, steps
from tests.support.processes import ranks
from tests.support.runs import runs

MOVED = ("algorithm.kl.coef=0.1", "algorithm.kl.sync_every=2", "algorithm.kl.sync_share=0.6", "trainer.save_every=1")


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
def test_a_resumed_run_has_the_reference_as_it_was_moved(way: str, tmp_path: Path):
    start(tmp_path / "whole", way, 4, *MOVED)
    start(tmp_path / "parts", way, 3, *MOVED)
    saved = f"trainer.resume={tmp_path}/parts/checkpoints/step-00000003"
    start(tmp_path / "parts", way, 4, *MOVED, saved)
    start(tmp_path / "fixed", way, 4, "algorithm.kl.coef=0.1")
    whole, parts, fixed = (steps(tmp_path / each) for each in ("whole", "parts", "fixed"))
    assert parts == whole
    assert [line["actor/kl_loss"] for line in whole[:2]] == [line["actor/kl_loss"] for line in fixed[:2]]
    assert whole[2]["actor/kl_loss"] < 0.5 * fixed[2]["actor/kl_loss"], "moved after step 2"
    found, expected = (runs.everything(tmp_path / each)["weights"] for each in ("parts", "whole"))
    assert found == expected


def test_ranks_with_a_shard_each_move_it_as_one_process_does(tmp_path: Path):
    start(tmp_path / "one", "single 1", 3, *MOVED)
    start(tmp_path / "two", "fsdp2 2", 3, *MOVED)
    one, two = steps(tmp_path / "one"), steps(tmp_path / "two")
    assert two[2]["actor/kl_loss"] == pytest.approx(one[2]["actor/kl_loss"], rel=1e-3)
    folders = [tmp_path / each / "checkpoints/step-00000003" for each in ("one", "two")]
    whole = load_file(folders[0] / "reference-rank0.safetensors")
    shards = [load_file(folders[1] / f"reference-rank{rank}.safetensors") for rank in range(2)]
    for name, value in whole.items():
        joined = torch.cat([shard[name] for shard in shards])
        torch.testing.assert_close(joined, value, rtol=1e-4, atol=1e-5)


def test_another_number_of_shards_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture):
    start(tmp_path / "run", "fsdp2 2", 2, *MOVED)
    words = (*MOVED, "trainer.max_steps=3", "trainer.strategy=fsdp2")
    assert ranks.forked(4, lambda rank: runs.run(tmp_path / "run", *words)) == [70] * 4
    assert "has the moved reference in 2 parts, and this run needs 4" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.lora.rank=2"], "algorithm.kl.sync_every=2 with model.lora.rank=2"),
        (["trainer.strategy=deepspeed"], "algorithm.kl.sync_every=2 with trainer.strategy='deepspeed'"),
        (["algorithm.kl.sync_every=0"], "algorithm.kl.sync_share=0.6 has no effect with algorithm.kl.sync_every=0"),
        (["algorithm.kl.sync_share=0"], "algorithm.kl.sync_share=0"),
    ],
)
def test_what_cannot_be_moved_is_refused_by_name(overrides, message, tmp_path: Path):
    with pytest.raises(ConfigError, match=re.escape(message)):
        runs.small(tmp_path, *MOVED, *overrides)
