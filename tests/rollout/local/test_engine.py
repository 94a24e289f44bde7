"""The local engine against transformers' generate and against full forward passes, on tiny random models."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hwgrpo.errors import ConfigError, DataError, RunError
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.rollout.local.decode_rows import ModelRows
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.values import Prompt, PromptBatch, Sampling
from tests.support.numbers.rounding import BF16, STEP, assert_values_close

TOKENIZER = character_tokenizer("")
VOCABULARY = len(TOKENIZER)
EOS = TOKENIZER.get_vocab()["<eos>"]
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": TOKENIZER.pad_token_id,
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"use_sliding_window": False}),
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2-sliding": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
}
WORDS = ("sort 31=", "a", "the quick brown", "sort 12=")
EVEN = ("abcd", "sort", "zzzz")


def model_of(family: str = "qwen3") -> Any:
    kind, config, extra = FAMILIES[family]
    torch.manual_seed(11)
    return kind(config(**SHAPE | extra)).eval()


def prompts_of(*texts: str) -> PromptBatch:
    return PromptBatch(
        tuple(
            Prompt(uid=f"{i}:{t}", text=t, token_ids=tuple(TOKENIZER(t).input_ids), ground_truth=None, columns={})
            for i, t in enumerate(texts)
        )
    )


def engine_of(model, max_sequences: int = 64, dtype: torch.dtype = torch.float32) -> LocalEngine:
    return LocalEngine(model, TOKENIZER, device=torch.device("cpu"), compute_dtype=dtype, max_sequences=max_sequences)


def responses(completions) -> list[list[int]]:
    return [part.tolist() for part in completions.tokens.split(completions.lengths.tolist())]


def assert_same(one, other, limit: float = STEP) -> None:
    assert responses(one) == responses(other)
    assert one.texts == other.texts
    assert torch.equal(one.finished, other.finished)
    assert torch.equal(one.prompt_index, other.prompt_index)
    assert_values_close(one.logprobs, other.logprobs, limit)


@pytest.mark.parametrize("texts", [WORDS, EVEN], ids=["unequal", "equal"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_log_probs_equal_those_of_transformers_generate(family, texts):
    model, batch = model_of(family), prompts_of(*texts)
    ours = engine_of(model).generate(batch, Sampling(1, 20, greedy=True))
    inputs = TOKENIZER(list(texts), padding=True, padding_side="left", return_tensors="pt")
    theirs = model.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=20,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    width = inputs.input_ids.shape[1]
    logprob = torch.stack(theirs.logits, dim=1).log_softmax(-1)
    offsets = ours.offsets.tolist()
    for row, tokens in enumerate(responses(ours)):
        assert tokens == theirs.sequences[row, width : width + len(tokens)].tolist()
        assert bool(ours.finished[row]) == (EOS in tokens)
        assert len(tokens) == 20 or ours.finished[row]
        expected = logprob[row, range(len(tokens)), tokens]
        assert_values_close(ours.logprobs[offsets[row] : offsets[row + 1]], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_those_of_a_full_forward_pass_at_the_sampling_temperature(family):
    model, batch = model_of(family), prompts_of(*WORDS)
    completions = engine_of(model).generate(batch, Sampling(3, 12, temperature=1.3, seed=5))
    offsets = completions.offsets.tolist()
    for i, (prompt, tokens) in enumerate(zip(completions.prompt_index.tolist(), responses(completions))):
        ids = [*batch.prompts[prompt].token_ids, *tokens]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -len(tokens) - 1 : -1] / 1.3
        expected = logits.log_softmax(-1)[range(len(tokens)), tokens]
        assert_values_close(completions.logprobs[offsets[i] : offsets[i + 1]], expected)


def test_log_probs_are_those_of_the_filtered_distribution():
    model, batch = model_of(), prompts_of(*EVEN)
    completions = engine_of(model).generate(batch, Sampling(4, 6, top_k=3, seed=5))
    offsets = completions.offsets.tolist()
    for i, (prompt, tokens) in enumerate(zip(completions.prompt_index.tolist(), responses(completions))):
        ids = [*batch.prompts[prompt].token_ids, *tokens]
        with torch.no_grad():
            best = model(torch.tensor([ids])).logits[0, -len(tokens) - 1 : -1].topk(3, dim=-1)
        for place, token in enumerate(tokens):
            rank = best.indices[place].tolist().index(token)
            expected = best.values[place].log_softmax(-1)[rank]
            assert_values_close(completions.logprobs[offsets[i] + place], expected)


def test_a_prompts_samples_are_the_same_alone_and_in_any_batch_and_order():
    model, batch = model_of(), prompts_of(*WORDS)
    sampling = Sampling(3, 16, seed=9)
    whole = responses(engine_of(model).generate(batch, sampling))
    for i, prompt in enumerate(batch.prompts):
        assert responses(engine_of(model).generate(PromptBatch((prompt,)), sampling)) == whole[3 * i : 3 * i + 3]
    turned = responses(engine_of(model).generate(PromptBatch(batch.prompts[::-1]), sampling))
    assert turned == [response for i in (3, 2, 1, 0) for response in whole[3 * i : 3 * i + 3]]


def test_more_samples_extend_a_group_and_another_seed_or_uid_draws_another_one():
    model, batch = model_of(), prompts_of("sort 31=")
    few = responses(engine_of(model).generate(batch, Sampling(2, 16, seed=1)))
    many = responses(engine_of(model).generate(batch, Sampling(6, 16, seed=1)))
    assert many[:2] == few
    assert len({tuple(tokens) for tokens in many}) == 6
    assert responses(engine_of(model).generate(batch, Sampling(2, 16, seed=2))) != few
    renamed = PromptBatch((Prompt("other", "", batch.prompts[0].token_ids, None, {}),))
    assert responses(engine_of(model).generate(renamed, Sampling(2, 16, seed=1))) != few


@pytest.mark.parametrize("max_sequences", [1, 2, 3, 4, 7, 12])
def test_generation_in_parts_gives_what_one_part_gives(max_sequences):
    model, batch = model_of(), prompts_of(*WORDS)
    sampling = Sampling(3, 10, seed=2)
    assert_same(engine_of(model, max_sequences).generate(batch, sampling), engine_of(model).generate(batch, sampling))


@pytest.mark.parametrize(("max_sequences", "prefills"), [(12, [4]), (8, [2, 2]), (3, [1] * 4), (2, [1] * 8)])
def test_a_group_is_split_over_parts_only_when_it_is_larger_than_a_part(max_sequences, prefills):
    model = model_of()
    engine = engine_of(model, max_sequences)
    fed = []
    model.register_forward_pre_hook(lambda _m, _a, given: fed.append(given["input_ids"].shape), with_kwargs=True)
    engine.generate(prompts_of(*WORDS), Sampling(3, 1))
    assert [shape[0] for shape in fed] == prefills


def test_dropping_finished_rows_changes_nothing(monkeypatch):
    model, batch = model_of(), prompts_of(*WORDS)
    # A sixth of the vocabulary ends a response, so rows finish one by one.
    sampling = Sampling(8, 24, seed=4, stop_token_ids=tuple(range(0, VOCABULARY, 6)))
    results, sizes = {}, {}
    for share in (0.0, 7 / 8, 1.0):
        monkeypatch.setattr(ModelRows, "compact_below", share)
        seen = []
        engine = engine_of(model)
        hook = model.register_forward_hook(lambda _m, _a, output, seen=seen: seen.append(output.logits.shape[0]))
        results[share] = engine.generate(batch, sampling)
        hook.remove()
        sizes[share] = seen[1:]
    assert sizes[0.0][-1] == max(sizes[0.0]) > 8, "rows stay once all are distinct"
    assert sizes[1.0][-1] < 8, "rows really were dropped"
    texts = list(zip(results[1.0].prompt_index.tolist(), responses(results[1.0]), strict=True))
    assert sizes[1.0] == [
        len({(prompt, *tokens[:step]) for prompt, tokens in texts if len(tokens) > step})
        for step in range(1, len(sizes[1.0]) + 1)
    ]
    assert_same(results[0.0], results[7 / 8])
    assert_same(results[0.0], results[1.0])


@pytest.mark.parametrize("texts", [WORDS, EVEN], ids=["unequal", "equal"])
def test_each_distinct_prompt_goes_through_the_model_once_for_all_its_samples(texts):
    model = model_of()
    batch = prompts_of(*texts, texts[0])
    engine = engine_of(model)
    fed = []
    model.register_forward_pre_hook(lambda _m, _a, given: fed.append(given["input_ids"].shape), with_kwargs=True)
    completions = engine.generate(batch, Sampling(5, 4, seed=1, stop_token_ids=()))
    assert fed[0] == (len(texts), max(len(text) for text in texts))
    assert all(shape[1] == 1 for shape in fed[1:])
    assert sum(shape[0] for shape in fed[1:]) <= int((completions.lengths - 1).sum()) * 8 / 7 + 1
    assert len(fed) == int(completions.lengths.max())


def test_the_head_sees_only_the_last_position_of_a_prompt_in_contiguous_states_whose_product_copies_no_weight():
    model = model_of()
    engine = engine_of(model)
    seen = []
    model.lm_head.register_forward_pre_hook(
        lambda _m, given: seen.append((given[0].shape[1], given[0].is_contiguous()))
    )
    engine.generate(prompts_of(*WORDS), Sampling(2, 3))
    assert set(seen) == {(1, True)}


def test_only_unequal_prompts_get_a_mask():
    model = model_of()
    engine = engine_of(model)
    masked = []
    hook = lambda _m, _a, given: masked.append(given["attention_mask"] is not None)  # noqa: E731
    model.register_forward_pre_hook(hook, with_kwargs=True)
    engine.generate(prompts_of(*EVEN), Sampling(1, 3, stop_token_ids=()))
    assert not any(masked)
    masked.clear()
    engine.generate(prompts_of(*WORDS), Sampling(1, 3, stop_token_ids=()))
    assert all(masked)


def test_responses_end_at_the_length_limit_unfinished_or_at_a_stop_token_which_they_keep():
    model, batch = model_of(), prompts_of(*WORDS)
    stop = tuple(range(VOCABULARY // 2, VOCABULARY, 5))
    completions = engine_of(model).generate(batch, Sampling(8, 9, seed=3, stop_token_ids=stop))
    ends = {EOS, *stop}
    assert 0 < completions.finished.sum() < len(completions)
    for tokens, finished, text in zip(responses(completions), completions.finished.tolist(), completions.texts):
        assert not ends & set(tokens[:-1])
        assert finished == (tokens[-1] in ends)
        assert finished or len(tokens) == 9
        assert text == TOKENIZER.decode(tokens[:-1] if finished else tokens, skip_special_tokens=True)
    longer = engine_of(model).generate(batch, Sampling(8, 20, seed=3, stop_token_ids=stop))
    for short, long in zip(responses(completions), responses(longer)):
        assert long[: len(short)] == short


def test_the_generation_config_may_name_several_end_tokens():
    model, batch = model_of(), prompts_of("sort 31=")
    plain = responses(engine_of(model).generate(batch, Sampling(1, 12, greedy=True)))[0]
    model.generation_config.eos_token_id = [EOS, plain[4]]
    ended = engine_of(model).generate(batch, Sampling(1, 12, greedy=True))
    assert responses(ended)[0] == plain[: plain.index(plain[4]) + 1]
    assert ended.finished.tolist() == [True]


def test_a_stop_string_over_several_tokens_cuts_the_text_and_keeps_the_tokens_that_complete_it():
    model, batch = model_of(), prompts_of(*WORDS)
    free = engine_of(model).generate(batch, Sampling(1, 12, greedy=True))
    stop = free.texts[0][3:6]
    stopped = engine_of(model).generate(batch, Sampling(1, 12, greedy=True, stop=("never this", stop)))
    assert len(stop) == 3
    cut = free.texts[0].index(stop)
    assert stopped.texts[0] == free.texts[0][:cut]
    assert TOKENIZER.decode(responses(stopped)[0]) == free.texts[0][: cut + 3]
    assert bool(stopped.finished[0])
    for row in range(1, 4):
        if stop not in free.texts[row]:
            assert responses(stopped)[row] == responses(free)[row]


def test_weights_are_shared_when_dtypes_are_equal_so_a_change_shows_at_once():
    model, batch = model_of(), prompts_of("sort 31=")
    engine = engine_of(model)
    before = engine.generate(batch, Sampling(1, 8, greedy=True))
    with torch.no_grad():
        model.model.norm.weight.mul_(-1)
    after = engine.generate(batch, Sampling(1, 8, greedy=True))
    assert responses(before) != responses(after)


def test_a_copy_in_another_dtype_changes_only_with_update_weights():
    model, batch = model_of(), prompts_of(*WORDS)
    engine = engine_of(model, dtype=torch.bfloat16)
    greedy = Sampling(1, 8, greedy=True)
    before = engine.generate(batch, greedy)
    reference = engine_of(copy.deepcopy(model).to(torch.bfloat16), dtype=torch.bfloat16).generate(batch, greedy)
    # `.to(bfloat16)` rounds the rotary frequencies too, the copy must not: first tokens agree, numbers only nearly.
    assert [tokens[0] for tokens in responses(before)] == [tokens[0] for tokens in responses(reference)]
    with torch.no_grad():
        model.model.norm.weight.mul_(-1)
    assert_same(engine.generate(batch, greedy), before)
    assert before.weight_version == 0
    engine.update_weights(3)
    after = engine.generate(batch, greedy)
    assert responses(after) != responses(before)
    assert after.weight_version == 3
    assert_same(after, engine_of(model, dtype=torch.bfloat16).generate(batch, greedy))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_copy_keeps_ties_and_fp32_rotary_frequencies_and_needs_no_gradient():
    engine = engine_of(model_of("llama"), dtype=torch.bfloat16)
    twin = engine._copy
    assert twin is not None
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert twin.model.rotary_emb.inv_freq.dtype == torch.float32
    assert {(p.dtype, p.requires_grad) for p in twin.parameters()} == {(torch.bfloat16, False)}


def test_sleeping_frees_the_copy_and_an_update_makes_it_from_the_current_weights():
    model, batch = model_of(), prompts_of("a")
    engine = engine_of(model, dtype=torch.bfloat16)
    engine.sleep()
    assert engine._copy is None
    assert not engine.health()
    with pytest.raises(RuntimeError, match="update_weights"):
        engine.generate(batch, Sampling(1, 2))
    with torch.no_grad():
        model.model.norm.weight.mul_(-1)
    engine.update_weights(1)
    assert engine.health()
    fresh = engine_of(model, dtype=torch.bfloat16)
    greedy = Sampling(1, 8, greedy=True)
    assert_same(engine.generate(batch, greedy), fresh.generate(batch, greedy))
    engine.close()
    assert not engine.health()


def test_modes_of_all_modules_are_restored_also_after_an_error_and_dropout_is_off():
    model, batch = model_of(), prompts_of("a", "b")
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    seen = []
    model.register_forward_pre_hook(lambda module, _a: seen.append((module.training, torch.is_grad_enabled())))
    tokens = engine_of(model).generate(batch, Sampling(1, 4)).tokens
    assert set(seen) == {(False, False)}
    assert [module.training for module in model.modules()] == modes
    model.get_input_embeddings()(tokens).sum().backward()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(RunError, match="position 0 are not finite"):
        engine_of(model).generate(batch, Sampling(1, 4))
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_peft_model_samples_with_its_adapter(dtype):
    model, batch = model_of(), prompts_of(*WORDS)
    greedy = Sampling(1, 10, greedy=True)
    plain = engine_of(copy.deepcopy(model), dtype=dtype).generate(batch, greedy)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=True))
    engine = engine_of(wrapped, dtype=dtype)
    assert_same(engine.generate(batch, greedy), plain, STEP if dtype == torch.float32 else BF16)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    engine.update_weights(1)
    adapted = engine.generate(batch, greedy)
    assert responses(adapted) != responses(plain)
    if dtype == torch.float32:
        assert_same(adapted, engine_of(wrapped.merge_and_unload()).generate(batch, greedy))


def test_a_prompt_without_tokens_is_refused_by_its_uid():
    batch = PromptBatch((Prompt("row-7", "", (), None, {}),))
    with pytest.raises(DataError, match="'row-7' has no tokens"):
        engine_of(model_of()).generate(batch, Sampling(1, 2))


def test_a_response_that_cannot_fit_the_models_positions_is_refused_with_both_keys():
    with pytest.raises(ConfigError, match=r"max_response_tokens=128.*8 tokens.*128 positions.*max_prompt_tokens"):
        engine_of(model_of()).generate(prompts_of("sort 31="), Sampling(1, 128))


def test_a_stop_token_outside_the_vocabulary_is_refused():
    with pytest.raises(ConfigError, match=r"rollout.stop_token_ids=\[5000\]"):
        engine_of(model_of()).generate(prompts_of("a"), Sampling(1, 2, stop_token_ids=(3, 5000)))
