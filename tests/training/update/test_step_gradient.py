"""One whole update against an independent fp64 computation on full logits, and against itself cut differently."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hwgrpo.errors import RunError
from hwgrpo.training.policy.layouts import BRANCHED, GROUPED, GROUPED_MASKED, PACKED, PADDED, Layout
from hwgrpo.values import TrainBatch
from tests.support.models.steps import gradients, reference_gradients, updater
from tests.support.models.tiny import ragged_batch, tiny_llama, tiny_qwen3
from tests.support.numbers.rounding import BF16, STEP, assert_gradients_close, assert_values_close

LOSS_OF_MINE = """
from hwgrpo.algorithms.scope import scoped

@scoped("token")
def f(x, config):
    return -x.advantage * x.extras["mine"] * x.log_ratio.exp(), {}
"""

CASES = {
    "on policy": ([], {}),
    "several updates: clipping both ways": (["algorithm.loss.clip_high=0.28"], {"old": True}),
    "dual clip off": (["algorithm.loss.dual_clip=null"], {"old": True}),
    "KL": (["algorithm.kl.coef=0.1"], {"ref": True}),
    "entropy bonus at another temperature": (["algorithm.entropy_coef=0.02", "rollout.temperature=0.7"], {"old": True}),
    "sequence means": (["algorithm.aggregation.name=seq-mean-token-mean"], {"old": True, "empty": True}),
    "Dr. GRPO": (
        ["algorithm.aggregation.name=seq-mean-token-sum-norm", "algorithm.aggregation.norm_length=16"],
        {"old": True, "ref": True, "empty": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "make", [tiny_qwen3, lambda: tiny_qwen3(tied=False), tiny_llama], ids=["tied", "untied", "llama"]
)
def test_a_whole_step_has_the_gradient_of_fp64_autograd_on_full_logits(case: str, make):
    words, kinds = CASES[case]
    model, batch = make(), ragged_batch(**kinds)
    update = updater(model, *words)
    loss, ours, _ = gradients(update, batch)
    expected_loss, theirs = reference_gradients(model, update.config, batch)
    assert loss == pytest.approx(expected_loss, rel=STEP, abs=STEP)
    assert_gradients_close(ours, theirs)


@pytest.mark.parametrize("layout", [PADDED, PACKED, GROUPED, GROUPED_MASKED, BRANCHED], ids=lambda layout: layout.name)
@pytest.mark.parametrize("budget", [32, 64, 10_000])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("alike", [False, True], ids=["", "alike"])
def test_the_gradient_does_not_depend_on_layout_budget_or_recomputation(
    layout: Layout, budget: int, checkpointing: bool, alike: bool
):
    batch = ragged_batch(n=6 if alike else 3, old=True, ref=True, empty=True, alike=alike)
    words = ["algorithm.kl.coef=0.05", "algorithm.entropy_coef=0.01"]
    loss, expected, sums = gradients(updater(tiny_qwen3(), *words), batch)
    model = tiny_qwen3()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    other = updater(model, *words, f"trainer.tokens_per_micro_batch={budget}", layout=layout)
    assert len(other._micro_batches(batch, range(len(batch)))) > (1 if budget == 32 else 0)
    again, ours, again_sums = gradients(other, batch)
    assert again == pytest.approx(loss, rel=STEP, abs=STEP)
    assert_gradients_close(ours, expected)
    assert again_sums == pytest.approx(sums, rel=STEP, abs=STEP * sums["tokens"])


@pytest.mark.parametrize("layout", [PADDED, PACKED, GROUPED, GROUPED_MASKED, BRANCHED], ids=lambda layout: layout.name)
@pytest.mark.parametrize(
    ("aggregation", "loss_words"),
    [
        ("token-mean", []),
        ("seq-mean-token-mean", []),
        ("seq-mean-token-mean", ["algorithm.loss.name=gspo"]),
    ],
    ids=["token-mean", "seq-mean-token-mean", "gspo"],
)
def test_tokens_that_were_not_sampled_are_inputs_without_loss(layout: Layout, aggregation: str, loss_words: list[str]):
    batch = ragged_batch(old=True, ref=True, empty=True, alike=True)
    mask = torch.rand(len(batch.tokens), generator=torch.Generator().manual_seed(2)) > 0.4
    mask[: int(batch.offsets[1])] = False  # a sequence without loss
    batch = replace(batch, loss_mask=mask)
    words = [f"algorithm.aggregation.name={aggregation}", "algorithm.kl.coef=0.05", "algorithm.entropy_coef=0.01"]
    words += loss_words
    model = tiny_qwen3()
    update = updater(model, *words, "trainer.tokens_per_micro_batch=64", layout=layout)
    loss, ours, sums = gradients(update, batch)
    expected_loss, theirs = reference_gradients(model, update.config, batch)
    assert loss == pytest.approx(expected_loss, rel=STEP, abs=STEP)
    assert_gradients_close(ours, theirs)
    assert sums["tokens"] == sums["trained"] == int(mask.sum())
    scored, everything = update.score(batch), update.score(replace(batch, loss_mask=None))
    assert not scored[~mask].any()
    assert_values_close(scored[mask], everything[mask])


@pytest.mark.parametrize("layout", [PADDED, PACKED, GROUPED], ids=lambda layout: layout.name)
def test_further_values_of_tokens_reach_a_loss_of_ones_own(layout: Layout, tmp_path: Path):
    batch = ragged_batch(old=True, empty=True)
    # a selection of them by the loss shows that each value is with its token
    mine = batch.tokens.float() % 3
    given = replace(batch, token_extras={"mine": mine, "advantage": 0 * mine, "weights": 0 * mine})
    (tmp_path / "losses.py").write_text(LOSS_OF_MINE)
    loss, ours, _ = gradients(
        updater(tiny_qwen3(), f"algorithm.loss.name={tmp_path}/losses.py:f", layout=layout), given
    )
    model = tiny_qwen3()
    update = updater(
        model, "algorithm.loss.dual_clip=null", "algorithm.loss.clip_low=0.999", "algorithm.loss.clip_high=99"
    )
    scaled = replace(batch, token_advantages=batch.advantages_R * mine)
    expected, theirs = reference_gradients(model, update.config, scaled)
    assert loss == pytest.approx(expected, rel=STEP, abs=STEP)
    assert_gradients_close(ours, theirs)


def test_a_mask_of_all_tokens_changes_no_bit():
    batch = ragged_batch(old=True)
    loss, expected, _ = gradients(updater(tiny_qwen3()), batch)
    all_of_them = replace(batch, loss_mask=torch.ones(len(batch.tokens), dtype=torch.bool))
    again, ours, _ = gradients(updater(tiny_qwen3()), all_of_them)
    assert again == loss
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_sequences_without_tokens_change_nothing():
    full = ragged_batch(prompts=2, n=2, old=True)
    lengths = torch.tensor([full.lengths[0], 0, *full.lengths[1:], 0])
    with_empty = TrainBatch(
        **{**vars(full)}
        | {
            "prompt_index": torch.tensor([0, 0, 0, 1, 1, 1]),
            "offsets": torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            "advantages": torch.tensor([full.advantages[0], 5.0, *full.advantages[1:], -5.0]),
        }
    )
    words = ["algorithm.aggregation.name=seq-mean-token-mean"]
    loss, expected, _ = gradients(updater(tiny_qwen3(), *words), full)
    again, ours, _ = gradients(updater(tiny_qwen3(), *words), with_empty)
    assert again == pytest.approx(loss, rel=STEP, abs=STEP)
    assert_gradients_close(ours, expected)


def test_an_update_without_any_token_has_a_zero_gradient_for_every_parameter():
    batch = ragged_batch(prompts=1, n=1)
    nothing = TrainBatch(
        **{**vars(batch)}
        | {"offsets": torch.tensor([0, 0]), "tokens": batch.tokens[:0], "logprobs": batch.rollout_logprobs[:0]}
    )
    loss, ours, _ = gradients(updater(tiny_qwen3()), nothing)
    assert loss == 0
    assert ours
    assert all(not g.any() for g in ours.values())


def test_scoring_gives_the_log_probs_that_training_sees():
    batch = ragged_batch()
    update = updater(tiny_qwen3(), "trainer.tokens_per_micro_batch=40")
    scored = update.score(batch)
    seen = torch.zeros(len(batch.tokens))
    update.accumulate_gradients(batch, range(len(batch)), seen)
    assert_values_close(scored, seen)
    assert scored.max() < 0


def test_bf16_compute_keeps_fp32_masters_and_gives_nearly_the_same_gradient():
    batch = ragged_batch(old=True)
    _, expected, _ = gradients(updater(tiny_qwen3()), batch)
    update = updater(tiny_qwen3(), dtype=torch.bfloat16)
    _, ours, _ = gradients(update, batch)
    assert {g.dtype for g in ours.values()} == {torch.float32}
    assert_gradients_close(ours, expected, BF16)


def test_several_updates_per_batch_use_their_own_prompts_and_counts():
    batch = ragged_batch(old=True)
    update = updater(tiny_qwen3(), "trainer.prompts_per_update=2", "trainer.epochs_per_batch=2", "optim.lr=1e-3")
    assert update.needs_old_logprobs
    metrics = update(batch)
    assert update.updates_done == 4
    assert metrics["actor/lr"] == pytest.approx(1e-3)
    assert metrics["actor/pg_clipfrac"] > 0


def test_a_gradient_that_is_not_finite_stops_before_it_reaches_the_weights():
    batch = ragged_batch(old=True)
    broken = TrainBatch(**{**vars(batch)} | {"advantages": batch.advantages.clone().fill_(float("nan"))})
    update = updater(tiny_qwen3(), "trainer.max_skipped_updates=0")
    before = [p.clone() for p in update.policy.parameters()]
    with pytest.raises(RunError, match="not finite"):
        update(broken)
    assert all(torch.equal(a, b) for a, b in zip(before, update.policy.parameters(), strict=True))
