"""Layouts: where tokens stand, what they see, how rows are cut into micro-batches, and which models may have which."""

import re
from dataclasses import replace

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen3NextConfig

from hwgrpo.errors import ConfigError
from hwgrpo.training.policy.auto_settings import choose_layout, layout_note, may_use_lengths, micro_batch_tokens
from hwgrpo.training.policy.layout_check import select_supported_layout
from hwgrpo.training.policy.layouts import (
    BRANCHED,
    GROUPED,
    GROUPED_MASKED,
    PACKED,
    PACKED_BRANCHED,
    PADDED,
    cheaper_layout,
    responses_per_row,
)
from hwgrpo.training.policy.micro_batch import build_micro_batch, split_micro_batches
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.values import TrainBatch
from tests.support.models.tiny import VOCAB, ragged_batch, settings, tiny_llama, tiny_qwen3

NOTHING: dict[str, str] = {}
LAYOUTS = pytest.mark.parametrize(
    "layout", [PADDED, PACKED, GROUPED, GROUPED_MASKED, BRANCHED], ids=lambda layout: layout.name
)


def policy_of(model) -> PolicyModel:
    return PolicyModel(model, compute_dtype=torch.float32, options=HeadOptions())


@LAYOUTS
def test_hidden_rows_point_at_the_token_that_each_target_follows(layout):
    batch = ragged_batch(empty=True)
    micro = build_micro_batch(batch, layout.rows(batch, range(len(batch)), 1000, 32), NOTHING, layout)
    ids, positions = micro.input_ids.flatten(), micro.position_ids.flatten()
    assert sorted(micro.token_index.tolist()) == list(range(len(batch.tokens)))
    assert torch.equal(batch.tokens[micro.token_index], micro.targets)
    for target, row in zip(micro.token_index.tolist(), micro.hidden_rows.tolist(), strict=True):
        s = int(torch.searchsorted(batch.offsets, target, right=True)) - 1
        prompt = int(batch.prompt_index[s])
        within = target - int(batch.offsets[s])
        before = batch.tokens[target - 1] if within else batch.prompt_tokens[int(batch.prompt_offsets[prompt + 1]) - 1]
        assert ids[row] == before
        assert positions[row] == int(batch.prompt_offsets.diff()[prompt]) + within - 1


def test_the_packed_mask_lets_a_token_see_its_own_past_alone():
    batch = ragged_batch(prompts=2, n=2)
    micro = build_micro_batch(batch, [[0, 2]], NOTHING, PACKED)
    assert micro.attention_mask is not None
    mask = micro.attention_mask[0, 0]
    first = int(batch.prompt_offsets[1]) + int(batch.lengths[0]) - 1
    assert not mask[first:, :first].any()
    assert not mask[:first, first:].any()
    assert torch.equal(mask[:first, :first], torch.ones(first, first).tril().bool())


def test_the_grouped_mask_lets_a_response_see_the_prompt_and_itself():
    batch = ragged_batch(prompts=1, n=3)
    prompt = int(batch.prompt_offsets[1])
    micro = build_micro_batch(batch, [[0, 1, 2]], NOTHING, GROUPED_MASKED)
    assert micro.attention_mask is not None
    mask = micro.attention_mask[0, 0]
    assert torch.equal(mask[:prompt, :prompt], torch.ones(prompt, prompt).tril().bool())
    assert not mask[:prompt, prompt:].any()
    column = prompt
    for length in (batch.lengths - 1).tolist():
        own = slice(column, column + length)
        assert mask[own, :prompt].all()
        assert torch.equal(mask[own, own], torch.ones(length, length).tril().bool())
        assert mask[own].sum() == length * prompt + length * (length + 1) // 2
        column += length


def batch_of(*responses: list[int], prompt: tuple[int, ...] = (7, 8)) -> TrainBatch:
    """Return a group of one prompt."""
    lengths = torch.tensor([len(response) for response in responses])
    return TrainBatch(
        prompt_tokens=torch.tensor(prompt),
        prompt_offsets=torch.tensor([0, len(prompt)]),
        prompt_index=torch.zeros(len(responses), dtype=torch.int64),
        tokens=torch.tensor([token for response in responses for token in response]),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        advantages=torch.ones(len(responses)),
        logprobs=torch.zeros(int(lengths.sum())),
    )


@pytest.mark.parametrize("layout", [GROUPED, GROUPED_MASKED], ids=lambda layout: layout.name)
def test_tokens_with_which_responses_begin_are_fed_once_under_a_mask(layout):
    # last tokens, 9, are no input
    batch = batch_of([1, 2, 3, 9], [4, 9], [1, 2, 9], [1, 2, 3, 9], [1, 5, 6, 9])
    rows = layout.rows(batch, range(5), 1000, 4096)
    assert rows == [[0, 3, 2, 4, 1]]
    micro = build_micro_batch(batch, rows, NOTHING, layout)
    assert micro.input_ids.tolist() == [[7, 8, 1, 2, 3, 5, 6, 4]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 4, 2]]
    assert micro.hidden_rows.tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 1, 2, 5, 6, 1, 7]
    assert micro.attention_mask is not None
    seen = [[column for column, sees in enumerate(row) if sees] for row in micro.attention_mask[0, 0].tolist()]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 5], [0, 1, 2, 5, 6], [0, 1, 7]]


def test_without_a_mask_over_the_row_every_response_feeds_its_own_tokens():
    batch = batch_of([1, 2, 3, 9], [1, 2, 9])
    rows = BRANCHED.rows(batch, range(2), 1000, 4096)
    assert build_micro_batch(batch, rows, NOTHING, BRANCHED).input_ids.tolist() == [[7, 8, 1, 2, 3, 1, 2]]


def test_the_budget_counts_shared_tokens_for_each_response():
    batch = batch_of(*[[1] * 10] * 6)
    parts = split_micro_batches(batch, range(6), 2 + 3 * 9, GROUPED, 4096)
    assert [[len(row) for row in part] for part in parts] == [[3], [3]]
    assert all(len(build_micro_batch(batch, part, NOTHING, GROUPED).targets) == 30 for part in parts)


def test_a_group_feeds_its_prompt_once_and_no_last_token():
    batch = ragged_batch(prompts=4, n=3)
    rows = GROUPED.rows(batch, range(len(batch)), 1000, 4096)
    assert [len(row) for row in rows] == [3] * 4
    micro = build_micro_batch(batch, rows, NOTHING, GROUPED)
    expected = len(batch.prompt_tokens) + len(batch.tokens) - len(batch)
    widths = [int(batch.prompt_offsets.diff()[p] + (batch.lengths - 1)[3 * p : 3 * p + 3].sum()) for p in range(4)]
    assert sum(widths) == expected
    assert micro.input_ids.shape == (4, max(widths))


def test_rows_of_single_responses_need_no_mask():
    batch = ragged_batch(prompts=3, n=1)
    for layout in (GROUPED, PADDED):
        micro = build_micro_batch(batch, layout.rows(batch, range(3), 1000, 32), NOTHING, layout)
        assert micro.attention_mask is None
        # with positions that start anew, transformers would take the padding for further sequences and build a mask
        assert torch.equal(micro.position_ids, torch.arange(micro.input_ids.shape[1]).expand(3, -1))


@LAYOUTS
def test_micro_batches_keep_within_the_budget_and_hold_each_sequence_once(layout):
    batch = ragged_batch(prompts=8, n=4, empty=True)
    parts = split_micro_batches(batch, range(len(batch)), 30, layout, 4096)
    filled = [s for s in range(len(batch)) if batch.lengths[s] > 0]
    assert sorted(s for part in parts for row in part for s in row) == filled
    assert len(parts) > 2
    for part in parts:
        assert build_micro_batch(batch, part, NOTHING, layout).input_ids.numel() <= 30


@pytest.mark.parametrize(("length", "parts"), [(255, [4]), (256, [4]), (259, [4]), (260, [3, 1])])
def test_a_budget_of_rows_with_a_few_more_tokens_each_is_one_micro_batch(length: int, parts: list[int]):
    batch = batch_of(*[[1] * length] * 4)  # with a prompt of 2 tokens, and no last token
    rows = split_micro_batches(batch, range(4), 1024, PADDED, 4096)
    assert [len(part) for part in rows] == parts, "at most 1024 + 16 tokens"


def test_a_row_of_a_group_is_filled_to_the_budget_and_not_beyond():
    batch = ragged_batch(prompts=1, n=4)
    tokens = int(batch.prompt_offsets.diff()[0] + (batch.lengths - 1).sum())
    assert [len(row) for row in BRANCHED.rows(batch, range(4), tokens, 4096)] == [4]
    assert [len(row) for row in BRANCHED.rows(batch, range(4), tokens - 1, 4096)] == [3, 1]


@LAYOUTS
def test_a_sequence_longer_than_the_budget_stands_alone(layout):
    batch = ragged_batch(prompts=2, n=2)
    parts = split_micro_batches(batch, range(len(batch)), 1, layout, 4096)
    assert [len(part) for part in parts] == [1] * 4


@LAYOUTS
def test_no_rows_give_one_token_and_no_target(layout):
    micro = build_micro_batch(ragged_batch(), [], NOTHING, layout)
    assert micro.input_ids.shape == (1, 1)
    assert len(micro.targets) == 0
    assert micro.cu_seqlens.tolist() == [0]


def test_rows_get_fewer_responses_where_attention_would_cost_more_than_the_prompt_saves():
    assert responses_per_row(5, 3, 128) > 8
    assert responses_per_row(256, 512, 896) == 2
    assert responses_per_row(64, 4096, 896) == 1
    batch = ragged_batch(prompts=2, n=6)
    mean = float((batch.lengths - 1).clamp_min(0)[:6].float().mean())
    assert responses_per_row(int(batch.prompt_offsets[1]), mean, 1) == 4
    assert [len(row) for row in GROUPED_MASKED.rows(batch, range(6), 1000, 1)] == [4, 2]
    assert [len(row) for row in GROUPED.rows(batch, range(6), 1000, 1)] == [6]
    costs = {k: (300 + k * 100 + (300 + k * 100) ** 2 / (6 * 64)) / k for k in range(1, 20)}
    assert responses_per_row(300, 100, 64) == min(costs, key=costs.__getitem__)


def test_rows_of_several_sequences_are_refused_where_a_mask_is_not_all_that_a_layer_looks_at():
    window = Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=0, num_hidden_layers=2)
    plain = tiny_qwen3().config
    state = Qwen3NextConfig()
    for name, layout in (("packed", PACKED), ("grouped_masked", GROUPED_MASKED), ("grouped", GROUPED)):
        wanted = settings(f"model.layout={name}")
        assert choose_layout(wanted, plain, "sdpa") is layout
        with pytest.raises(ConfigError, match=rf"layout='{name}' .*linear_attention.*layout=padded"):
            choose_layout(wanted, state, "sdpa")
        with pytest.raises(ConfigError, match=r"sliding_window=\d+ is shorter.*layout=padded"):
            choose_layout(wanted, window, "eager")
    assert choose_layout(settings("model.layout=packed"), window, "sdpa") is PACKED_BRANCHED
    assert choose_layout(settings(), window, "sdpa") is BRANCHED
    assert choose_layout(settings(), window, "eager") is PADDED
    assert choose_layout(settings(), state, "sdpa") is PADDED
    assert choose_layout(settings(), plain, "flash_attention_2") is PADDED
    assert choose_layout(settings(), plain, "eager") is GROUPED_MASKED
    assert choose_layout(settings("model.layout=grouped"), plain, "eager") is GROUPED_MASKED


@pytest.mark.parametrize(
    ("prompt", "response", "n", "hidden_size", "layout"),
    [
        (9, 512, 8, 896, "packed"),  # saves 2% of the tokens
        (64, 512, 8, 896, "packed"),  # 10%
        (128, 512, 8, 896, "grouped"),  # 18%
        (9, 512, 8, 3584, "packed"),
        (64, 512, 8, 3584, "grouped"),
        (1024, 512, 1, 3584, "packed"),  # one response: nothing to share
        (1024, 512, 2, 3584, "grouped"),
        (512, 32768, 8, 3584, "packed"),  # 1%, beside long responses
        (512, 4096, 8, 3584, "grouped"),  # 10%
        (512, 512, 8, 896, "grouped"),
    ],
)
def test_auto_shares_prompts_where_that_saves_more_than_merging_costs(prompt, response, n, hidden_size, layout):
    assert cheaper_layout(prompt, response, n, hidden_size) == layout
    limits = f"data.max_prompt_tokens={prompt}", f"rollout.max_response_tokens={response}", f"rollout.n={n}"
    config, model = settings(*limits, "algorithm.advantage.singleton=raw"), Qwen2Config(hidden_size=hidden_size)
    assert choose_layout(config, model, "sdpa", by_lengths=True).name == layout
    assert choose_layout(config, model, "sdpa") is GROUPED, "without kernels that read lengths"
    assert choose_layout(config, model, "eager", by_lengths=True) is GROUPED_MASKED
    note = layout_note(config, model, "sdpa", by_lengths=True)
    assert (note is None) == (layout == "grouped")
    assert note is None or re.fullmatch(
        r"layout packed .*: one prompt per group would save [0-3]?\d% of the tokens", note
    )


@pytest.mark.parametrize(
    ("words", "model", "dtype", "device", "may"),
    [
        ((), {}, torch.bfloat16, "cuda", True),
        ((), {}, torch.bfloat16, "cpu", False),
        ((), {}, torch.bfloat16, "npu", False),
        ((), {}, torch.float32, "cuda", False),
        (("trainer.deterministic=true",), {}, torch.bfloat16, "cuda", False),
        (("trainer.sequence_parallel_size=2",), {}, torch.bfloat16, "cuda", False),
        ((), {"hidden_size": 80, "num_attention_heads": 4}, torch.bfloat16, "cuda", False),
        ((), {"head_dim": 512}, torch.bfloat16, "cuda", False),
    ],
)
def test_lengths_are_for_16_bits_on_gpus_and_whole_sequences(words, model, dtype, device: str, may: bool):
    assert may_use_lengths(settings(*words), Qwen2Config(**model), dtype, device) == may


@pytest.mark.parametrize(("window", "grouped"), [(63, False), (64, True)])
def test_a_sliding_window_that_no_sequence_reaches_changes_nothing(window, grouped):
    config = MistralConfig(sliding_window=window, num_hidden_layers=2)
    words = ("data.max_prompt_tokens=40", "rollout.max_response_tokens=24")
    assert choose_layout(settings(*words), config, "eager") is (GROUPED_MASKED if grouped else PADDED)


def test_a_layout_is_tried_on_the_model_before_it_is_used():
    policy = policy_of(tiny_llama())
    assert select_supported_layout(settings(), policy, GROUPED) == (GROUPED, None)
    assert select_supported_layout(settings(), policy, GROUPED_MASKED) == (GROUPED_MASKED, None)
    assert select_supported_layout(settings(), policy, PACKED) == (PACKED, None)


def test_a_model_whose_windows_a_mask_would_not_show_does_not_fall_back_to_one(monkeypatch):
    def refuse(model):
        raise ValueError("no")

    monkeypatch.setattr("hwgrpo.models.shared_prefix_masks.enable", refuse)
    config = MistralConfig(**tiny_llama().config.to_dict() | {"sliding_window": 8, "model_type": "mistral"})
    windowed = policy_of(MistralForCausalLM(config))
    assert select_supported_layout(settings(), windowed, GROUPED)[0] is PADDED
    assert select_supported_layout(settings(), policy_of(tiny_llama()), GROUPED)[0] is GROUPED_MASKED


def test_short_rows_have_a_mask_and_long_ones_branches():
    batch = ragged_batch(prompts=1, n=3)
    micro = build_micro_batch(batch, [[0, 1, 2]], NOTHING, GROUPED)
    width = micro.input_ids.shape[1]
    assert micro.attention_mask is not None
    assert micro.branches is None
    for up_to, dense in ((width, True), (width - 1, False)):
        micro = build_micro_batch(batch, [[0, 1, 2]], NOTHING, replace(GROUPED, dense_up_to=up_to))
        assert (micro.attention_mask is not None) == dense == (micro.branches is None)


def test_packed_rows_end_where_attention_would_cost_more_than_matrix_products():
    batch = ragged_batch(prompts=4, n=3)
    rows = PACKED.rows(batch, range(12), 1000, 4)
    widths = [build_micro_batch(batch, [row], NOTHING, PACKED).input_ids.shape[1] for row in rows]
    assert len(widths) > 3
    assert max(widths) <= 24 < sum(widths)


def test_a_model_that_honours_branches_but_no_mask_gets_branches_in_every_row(monkeypatch):
    policy = policy_of(tiny_llama())
    hidden_states = policy.hidden_states
    monkeypatch.setattr(policy, "hidden_states", lambda micro: hidden_states(replace(micro, mask_spans=None)))
    assert select_supported_layout(settings(), policy, GROUPED) == (BRANCHED, None)


def test_a_micro_batch_moves_with_all_it_has():
    batch = ragged_batch(prompts=1, n=3)
    for layout in (BRANCHED, GROUPED_MASKED):
        micro = build_micro_batch(batch, [[0, 1, 2]], NOTHING, layout)
        if micro.branches:
            assert micro.branches.masks(None, torch.float32, 1)[1].device.type == "cpu"
        micro = micro.to(torch.device("meta"))
        if micro.branches:
            assert micro.branches.masks(None, torch.float32, 1)[1].device.type == "meta"
        parts = [*vars(micro).values(), *(vars(micro.branches).values() if micro.branches else ())]
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        on_host = [micro.token_index, micro.cu_seqlens]
        assert [tensor.device.type for tensor in on_host] == ["cpu", "cpu"]
        assert {each.device.type for each in tensors if not any(each is kept for kept in on_host)} == {"meta"}


def test_a_model_that_does_not_honour_a_layout_gets_the_padded_one_or_an_error():
    refuses = policy_of(BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)))
    ignores = policy_of(tiny_llama())
    hidden_states = ignores.hidden_states
    ignores.hidden_states = lambda micro: hidden_states(replace(micro, mask_spans=None, branches=None))
    for policy, said in ((refuses, "Bloom.* does not accept such a mask"), (ignores, "Llama.* differ")):
        layout, reason = select_supported_layout(settings(), policy, GROUPED)
        assert layout is PADDED
        assert policy.base.config._attn_implementation == "sdpa" or policy is refuses
        assert re.search(said, reason or "")
        with pytest.raises(ConfigError, match="layout=padded"):
            select_supported_layout(settings("model.layout=grouped"), policy, GROUPED)


def test_the_default_budget_suits_the_device_a_prompt_with_its_responses_and_the_longest_sequence():
    cpu, other = torch.device("cpu"), torch.device("meta")
    assert micro_batch_tokens(settings(), cpu) == 1024
    group = "data.max_prompt_tokens=1000", "rollout.n=8"
    assert micro_batch_tokens(settings(*group, "rollout.max_response_tokens=100"), cpu) == 1800
    assert micro_batch_tokens(settings(*group, "rollout.max_response_tokens=1000"), cpu) == 4096
    assert micro_batch_tokens(settings(), other) == 16384
    assert micro_batch_tokens(settings("trainer.tokens_per_micro_batch=100"), cpu) == 100
    assert micro_batch_tokens(settings("rollout.max_response_tokens=20000"), cpu) == 20016


def test_a_model_that_lets_padding_behind_a_sequence_into_it_is_refused():
    policy = policy_of(tiny_llama())
    hidden_states = policy.hidden_states

    def disturbed(micro):
        return hidden_states(micro) * (1.0 + 0.1 * (micro.is_token.logical_not().any()))

    policy.hidden_states = disturbed
    with pytest.raises(ConfigError, match=r"Llama.*: hidden states of a sequence change by .* when padding follows it"):
        select_supported_layout(settings(), policy, PADDED)
