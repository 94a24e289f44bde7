"""The KL over the full vocabulary in an update: against fp64 autograd on full logits, cut differently, and refused."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device

from hwgrpo.algorithms.kl import build_kl
from hwgrpo.config.schema import KlConfig
from hwgrpo.errors import ConfigError
from hwgrpo.training.policy.layouts import BRANCHED, GROUPED, GROUPED_MASKED, PACKED, PADDED, Layout
from hwgrpo.training.strategies.single import Single
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.training.update.token_budget import TokenBudget
from tests.support.models.exact_kl import EXACT, LORA, exact_update
from tests.support.models.steps import CPU, gradients, reference_gradients
from tests.support.models.tiny import VOCAB, ragged_batch, settings, tiny_llama, tiny_qwen3
from tests.support.numbers.rounding import STEP, assert_gradients_close
from tests.support.runs import runs

MODELS = {"tied": tiny_qwen3, "untied": lambda: tiny_qwen3(tied=False), "llama": tiny_llama}
COPY: tuple[str, ...] = ()


def updated(words: Sequence[str] = (), make: Any = tiny_qwen3, layout: Layout = PADDED, **options: Any) -> PolicyUpdate:
    return exact_update(Single(CPU, "gloo"), make, words, layout, **options)


@pytest.mark.parametrize("words", [COPY, LORA, ("rollout.temperature=0.7", "kernels.chunk_rows=5")])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_whole_step_has_the_gradient_of_fp64_autograd_on_full_logits(words, make):
    update = updated(words, make)
    batch = ragged_batch(old=True, empty=True)
    loss, ours, sums = gradients(update, batch)
    expected_loss, theirs = reference_gradients(update.policy.model, update.config, batch, make())
    assert loss == pytest.approx(expected_loss, rel=STEP, abs=STEP)
    assert_gradients_close(ours, {name: theirs[name] for name in ours})
    assert sums["kl"] / sums["tokens"] > 0.01


def test_an_existing_adapter_is_compared_with_its_frozen_copy(tmp_path: Path):
    adapted = updated(LORA)  # whose adapter has left the base model
    adapted.policy.model.save_pretrained(tmp_path)
    update = updated((f"model.lora.adapter={tmp_path}",))
    assert update.reference is not None
    assert update.reference.kind == "frozen_adapter"
    batch = ragged_batch(old=True)
    loss, ours, _ = gradients(update, batch)
    expected_loss, theirs = reference_gradients(update.policy.model, update.config, batch, adapted.policy.model)
    assert loss == pytest.approx(expected_loss, rel=STEP, abs=STEP)
    assert_gradients_close(ours, {name: theirs[name] for name in ours})
    trained = {name for name, parameter in update.policy.model.named_parameters() if parameter.requires_grad}
    assert trained == ours.keys(), "the frozen copy stays frozen, and the adapter trained"


@pytest.mark.parametrize("layout", [PADDED, PACKED, GROUPED, GROUPED_MASKED, BRANCHED], ids=lambda layout: layout.name)
@pytest.mark.parametrize("words", [COPY, LORA], ids=["copy", "adapters"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_does_not_depend_on_micro_batches_layout_or_recomputation(layout, words, checkpointing):
    batch = ragged_batch(old=True, empty=True)
    loss, expected, sums = gradients(updated(words), batch)

    def make() -> Any:
        model = tiny_qwen3()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    update = updated((*words, "trainer.tokens_per_micro_batch=32"), make, layout)
    assert len(update._micro_batches(batch, range(len(batch)))) > 1
    again, ours, again_sums = gradients(update, batch)
    assert again == pytest.approx(loss, rel=STEP, abs=STEP)
    assert_gradients_close(ours, expected)
    assert again_sums == pytest.approx(sums, rel=STEP, abs=STEP * sums["tokens"])


@pytest.mark.parametrize("words", [COPY, LORA], ids=["copy", "adapters"])
def test_a_policy_that_is_its_reference_has_no_kl_and_no_gradient_of_it(words):
    batch = ragged_batch(old=True)
    loss, ours, sums = gradients(updated(words, leaves=False), batch)
    without, expected, _ = gradients(updated((*words, "algorithm.kl.coef=1e-30"), leaves=False), batch)
    assert abs(sums["kl"]) <= STEP * sums["tokens"]
    assert loss == pytest.approx(without, rel=STEP, abs=STEP)
    assert_gradients_close(ours, expected)


def test_its_expectation_is_that_of_k1_and_its_gradient_that_of_k2():
    """One response for each token of the vocabulary, each as often as the policy samples it."""
    update = updated()
    batch = replace(
        ragged_batch(prompts=1, n=VOCAB),
        tokens=torch.arange(VOCAB),
        offsets=torch.arange(VOCAB + 1),
        advantages=torch.zeros(VOCAB),
        logprobs=torch.zeros(VOCAB),
    )
    logprobs = update.score(batch).double()
    assert update.reference is not None
    others = update.score(batch, update.reference.policy)
    _, exact, sums = gradients(update, batch)
    k1 = build_kl(KlConfig(estimator="k1"))(logprobs, others.double())
    assert sums["kl"] / VOCAB == pytest.approx(float((logprobs.exp() * k1).sum()), rel=STEP, abs=STEP)
    estimated = replace(updated(("algorithm.kl.estimator=k2",)), reference=None)
    batch = replace(batch, ref_logprobs=others)
    expected = {name: torch.zeros_like(gradient) for name, gradient in exact.items()}
    for v in range(VOCAB):
        estimated.accumulate_gradients(batch, [v])
        for name, parameter in estimated.policy.model.named_parameters():
            if parameter.grad is not None:
                expected[name] += logprobs[v].exp().float() * parameter.grad
        estimated.strategy.discard_gradients()
    assert_gradients_close(exact, expected)


def test_the_reference_has_no_dropout_and_the_policy_has(tmp_path: Path):
    adapted = updated((*LORA, "model.lora.dropout=0.5"))
    adapted.policy.model.save_pretrained(tmp_path)
    batch, update = ragged_batch(), updated((f"model.lora.adapter={tmp_path}",))
    seen = record_reference(update)
    (_, _, first), (_, _, second) = gradients(update, batch), gradients(update, batch)
    assert first["kl"] != second["kl"], "the policy drops out"
    assert update.policy.training
    once, again = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    assert once


def record_reference(update: PolicyUpdate) -> list[torch.Tensor]:
    """Return a list that gets the hidden states of the reference in each pass."""
    seen: list[torch.Tensor] = []
    update.policy.register_forward_hook(lambda module, given, out: seen.append(out) if torch.is_tensor(out) else None)
    return seen


def test_a_micro_batch_that_does_not_fit_is_halved_and_repeated(monkeypatch: pytest.MonkeyPatch):
    batch = ragged_batch(old=True)
    for words in (COPY, LORA):
        loss, expected, _ = gradients(updated(words), batch)
        update = updated((*words, "trainer.tokens_per_micro_batch=64"))
        update.budget = TokenBudget(64, device=Device(BACKEND))
        assert update.reference is not None
        policy, visits = update.reference.policy, []

        def full(*args: Any, forward: Any = policy.forward, visits: Any = visits, **options: Any) -> Any:
            visits += ["visit"] * ("visit" in options)
            if len(visits) == 2 and "visit" in options:  # the gradient of the first micro-batch is there
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
            return forward(*args, **options)

        monkeypatch.setattr(policy, "forward", full)
        again, ours, _ = gradients(update, batch)
        assert update.budget.pop_restarts() == 1
        assert again == pytest.approx(loss, rel=STEP, abs=STEP)
        assert_gradients_close(ours, expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm.kl.times_ratio=true"], "algorithm.kl.times_ratio=true with algorithm.kl.estimator=exact"),
        (["algorithm.kl.in_reward=true"], "use algorithm.kl.estimator=k1, which is unbiased there"),
        (["algorithm.kl.input_clamp=5"], "algorithm.kl.input_clamp=5.0 has no effect with algorithm.kl.estimator="),
        (["algorithm.kl.output_clamp=5"], "algorithm.kl.output_clamp=5.0 has no effect with algorithm.kl.estimator="),
        (["rollout.top_p=0.9", "rollout.min_p=0.1"], "exact with rollout.top_p=0.9, rollout.min_p=0.1 and rollout.eng"),
        (["rollout.top_k=5", "rollout.engine=local"], "leave the filter out, or use algorithm.kl.estimator=k3"),
        (["algorithm.kl.kwargs={a: 1}"], "algorithm.kl.kwargs={'a': 1} has no effect with algorithm.kl.estimator="),
    ],
)
def test_what_has_no_exact_kl_is_refused_by_name(words: list[str], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        settings(*EXACT, *words)


def test_filters_are_allowed_where_log_probs_stay_those_of_the_full_vocabulary():
    settings(*EXACT, "rollout.top_p=0.9", "rollout.engine=vllm")
    settings("algorithm.kl.coef=0.1", "rollout.top_p=0.9")


RUN = ("algorithm.kl.estimator=exact", "algorithm.kl.coef=0.1", "trainer.save_every=1", "optim.lr=1e-2")


@pytest.mark.parametrize(
    "words",
    [("algorithm.kl.sync_every=2", "algorithm.kl.target=0.01"), (*LORA, "trainer.prompts_per_update=2")],
    ids=["moved copy", "adapters"],
)
def test_a_run_resumes_bit_for_bit(words: tuple[str, ...], tmp_path: Path):
    whole, parts = (*RUN, *words, "trainer.max_steps=4"), (*RUN, *words, "trainer.max_steps=3")
    runs.run(tmp_path / "whole", *whole)
    runs.run(tmp_path / "parts", *parts)
    runs.run(tmp_path / "parts", *whole, f"trainer.resume={tmp_path}/parts/checkpoints/step-00000003")
    steps = [[line for line in runs.metrics(tmp_path / each) if "actor/loss" in line] for each in ("whole", "parts")]
    assert steps[0] == steps[1]
    weights = [runs.everything(tmp_path / each)["weights"] for each in ("whole", "parts")]
    assert weights[0] == weights[1]
    kl = [line["actor/kl_loss"] for line in steps[0]]
    nothing = [abs(value) < 1e-6 for value in kl]
    moves = "algorithm.kl.sync_every=2" in words  # the reference is the policy before steps 1 and 3, in one update each
    assert nothing == [moves, False, moves, False], kl


SURPLUS = (
    *("algorithm.filter_groups.enable=true", "algorithm.filter_groups.replay_groups=8"),
    "algorithm.correction.name=token_truncate",
)
PREFETCHED = ("rollout.max_staleness=1", "algorithm.correction.name=token_truncate")


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (SURPLUS, "groups kept for later steps are left out: {}"),
        (PREFETCHED, "prefetched responses are sampled again from step 3 on: {}"),
    ],
    ids=["groups", "prefetched"],
)
def test_stored_responses_of_a_truncated_distribution_are_left_out(words, note, tmp_path: Path, monkeypatch):
    """A run that was resumed with the exact KL ended in a traceback of the kernels when it reached such responses."""
    notes: list[str] = []
    monkeypatch.setattr("hwgrpo.observe.observer.Observer.note", lambda self, text: notes.append(text))
    runs.run(tmp_path / "run", *words, "rollout.top_k=3", "trainer.save_every=2", "trainer.max_steps=4")
    first = f"trainer.resume={tmp_path}/run/checkpoints/step-00000002"
    hard = ("algorithm.filter_groups.min_std=0.9",) if words is SURPLUS else ()  # no group passes: steps are replayed
    notes.clear()
    runs.run(tmp_path / "run", *words, *hard, *RUN[:2], "trainer.max_steps=4", first)
    reason = "algorithm.kl.estimator=exact needs responses that were sampled from the full vocabulary"
    assert any(each.endswith(note.format(reason)) for each in notes), notes
    steps = [line for line in runs.metrics(tmp_path / "run") if "actor/kl_loss" in line]
    assert [line["step"] for line in steps] == [3, 4]
