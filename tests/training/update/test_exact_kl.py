"""The KL over the full vocabulary in an update: against fp64 autograd on full logits, cut differently, and refused."""

import pytest

from hwgrpo.training.strategies.single import Single
from tests.support.models.exact_kl import LORA, exact_update
from tests.support.models.steps import CPU, gradients, reference_gradients
from tests.support.models.tiny import ragged_batch, tiny_llama, tiny_qwen3
from tests.support.numbers.rounding import STEP, assert_gradients_close

MODELS = {"tied": tiny_qwen3, "untied": lambda: tiny_qwen3(tied=False), "llama": tiny_llama}


@pytest.mark.parametrize("words", [(), LORA, ("rollout.temperature=0.7", "kernels.chunk_rows=5")])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_whole_step_has_the_gradient_of_fp64_autograd_on_full_logits(words, make):
    update = exact_update(Single(CPU, "gloo"), make, words)
    batch = ragged_batch(old=True, empty=True)
    loss, ours, sums = gradients(update, batch)
    expected_loss, theirs = reference_gradients(update.policy.model, update.config, batch, make())
    assert loss == pytest.approx(expected_loss, rel=STEP, abs=STEP)
    assert_gradients_close(ours, {name: theirs[name] for name in ours})
    assert sums["kl"] / sums["tokens"] > 0.01
