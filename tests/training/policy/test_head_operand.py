"""The LM head's weight in the compute dtype: cast once per update, never stale, and gone when the optimizer steps."""

import pytest
import torch

from hwgrpo.training.policy import policy_model
from hwgrpo.training.policy.policy_model import HeadOperand
from tests.support.models.steps import updater
from tests.support.models.tiny import ragged_batch, tiny_qwen3

BF16 = torch.bfloat16


@pytest.fixture
def casts(monkeypatch):
    """The weights that were cast, as they were then."""
    seen = []
    real = policy_model.weight_operand

    def counted(weight, *dtypes):
        seen.append(weight.detach().clone())
        return real(weight, *dtypes)

    monkeypatch.setattr(policy_model, "weight_operand", counted)
    return seen


def trained(tied: bool, once: bool = True):
    """Two updates of several micro-batches after scoring; returns the weights, and the update."""
    update = updater(tiny_qwen3(tied=tied), "optim.lr=0.01", "trainer.tokens_per_micro_batch=32", dtype=BF16)
    if not once:
        update.policy.head_operand = None
    batch = ragged_batch(old=True)
    assert len(update._micro_batches(batch, range(len(batch)))) > 1
    scores = []
    for _ in range(2):
        scores.append(update.score(batch))
        update(batch)
    return [*scores, *(p.detach() for p in update.policy.parameters())], update


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_scoring_and_all_micro_batches_of_an_update_share_one_cast_of_the_head_and_compute_bitwise_the_same(
    casts, tied
):
    shared, _ = trained(tied)
    assert len(casts) == 2
    assert not torch.equal(casts[0], casts[1]), "the second update casts what the first has written"
    separate, _ = trained(tied, once=False)
    assert len(casts) == 2
    assert all(torch.equal(each, other) for each, other in zip(shared, separate, strict=True))


def test_the_cast_head_is_freed_before_the_optimizer_steps_and_with_discarded_gradients():
    update = updater(tiny_qwen3(), dtype=BF16)
    batch, operand = ragged_batch(old=True), update.policy.head_operand
    assert operand is not None
    during = []
    update.strategy.optimizer.register_step_pre_hook(lambda *_: during.append(operand._operand))
    update.accumulate_gradients(batch, range(len(batch)))
    assert operand._operand is not None
    update.strategy.step(1e-3)
    assert during == [None]
    update.accumulate_gradients(batch, range(len(batch)))
    update.strategy.discard_gradients()
    assert operand._operand is None


def test_weights_that_a_checkpoint_overwrites_are_cast_again():
    update = updater(tiny_qwen3(), dtype=BF16)
    batch = ragged_batch(old=True)
    before = update.score(batch)
    for shard in update.strategy.param_shards():
        shard.values["parameter"].data.mul_(0.5)  # .data hides the write from autograd
    update.strategy.refresh_from_shards()
    found = update.score(batch)
    assert not torch.equal(found, before)
    update.policy.head_operand = None
    assert torch.equal(update.score(batch), found)


def test_a_write_that_torch_counts_is_noticed_and_a_weight_of_the_dtype_is_not_copied():
    weight, operand = torch.randn(7, 3), HeadOperand()
    first = operand.of(weight, BF16, BF16)
    assert operand.of(weight, BF16, BF16) is first
    assert operand.of(weight, BF16, torch.float32).dtype == torch.float32
    weight.mul_(2)
    assert torch.equal(operand.of(weight, BF16, BF16), weight.to(BF16))
    frozen = weight.to(BF16)
    assert operand.of(frozen, BF16, BF16).data_ptr() == frozen.data_ptr()
