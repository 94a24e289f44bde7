"""Tokens and floating-point operations of an update."""

from __future__ import annotations

from hwgrpo.bench import work
from hwgrpo.bench.work import Tokens, counted_tokens, update_flops
from hwgrpo.training.update.flops import training_work
from tests.support.models.steps import updater
from tests.support.models.tiny import ragged_batch, tiny_llama, tiny_qwen3


def test_an_untied_head_works_on_response_tokens_only_and_a_table_of_embeddings_on_none():
    policy = updater(tiny_llama()).policy
    weights = {name: p for name, p in policy.base.named_parameters() if p.ndim == 2}
    head, table = weights.pop("lm_head.weight"), weights.pop("model.embed_tokens.weight")
    assert head is not table
    inner = sum(weight.numel() for weight in weights.values())
    assert update_flops(policy, Tokens(fed=7, trained=3)) == 6 * (7 * inner + 3 * head.numel())
    head.requires_grad_(False)
    assert update_flops(policy, Tokens(fed=7, trained=3)) == 6 * 7 * inner + 4 * 3 * head.numel()


def test_an_update_counts_the_same_products_as_a_run(monkeypatch):
    policy = updater(tiny_qwen3()).policy
    known = training_work(policy)
    assert update_flops(policy, Tokens(fed=7, trained=3)) == 7 * known.per_token + 3 * known.per_response_token
    monkeypatch.setattr(work, "training_work", lambda _: None)
    assert update_flops(policy, Tokens(fed=7, trained=3)) is None


def test_all_tokens_of_all_forward_passes_are_counted_until_the_block_ends():
    update, batch = updater(tiny_llama(), "trainer.tokens_per_micro_batch=32"), ragged_batch()
    with counted_tokens(update.policy) as tokens:
        update.accumulate_gradients(batch, range(len(batch)))
    assert tokens.trained == len(batch.tokens)
    prompts = batch.prompt_offsets.diff()[batch.prompt_index]
    assert tokens.fed >= int((prompts + batch.lengths - 1).sum()), "a response's last token is no input"
    before = tokens.fed
    update.accumulate_gradients(batch, range(len(batch)))
    assert tokens.fed == before
