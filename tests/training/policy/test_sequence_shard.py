"""What each rank of a group gets of a micro-batch, of a pool, and which models and settings may be shared at all."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND
from transformers import (
    Gemma2Config,
    GPT2Config,
    Phi3Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from hwgrpo.errors import ConfigError
from hwgrpo.models import shared_prefix_masks, ulysses_attention
from hwgrpo.models.ulysses_attention import Exchange
from hwgrpo.models.ulysses_attention import exchanged_attention as attend_exchanged
from hwgrpo.planning.dry_run import make_plan
from hwgrpo.training import sequence_checks
from hwgrpo.training.policy.auto_settings import AttentionSelection, choose_layout, micro_batch_tokens
from hwgrpo.training.policy.layouts import BRANCHED, PADDED, Layout
from hwgrpo.training.policy.micro_batch import MicroBatch, build_micro_batch
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.training.policy.sequence_shard import SINGLE_RANK, SequenceGroup, shard_micro_batch
from hwgrpo.training.sequence_checks import check_sequence_parallel
from hwgrpo.training.strategies.single import Single
from hwgrpo.training.update.group_batch import gather_group_batch
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.training.update.train_batch import loss_signals, with_weights
from tests.support.models.tiny import ragged_batch, settings, tiny_llama, tiny_qwen3
from tests.support.runs import runs

SDPA = AttentionSelection("sdpa")


def shards(size: int, layout: Layout, *, full_sequences: bool) -> tuple[MicroBatch, list[MicroBatch]]:
    batch = ragged_batch(empty=True)
    batch = with_weights(batch, range(len(batch)), torch.ones(len(batch)))
    signals = loss_signals(batch, rollout=True)
    rows = [[0], [2], [3]] if layout is PADDED else [[0, 1, 2], [3, 4, 6]]
    micro = build_micro_batch(batch, rows, signals, layout, multiple=size)
    return micro, [shard_micro_batch(micro, SequenceGroup(size, r), full_sequences=full_sequences) for r in range(size)]


@pytest.mark.parametrize("full_sequences", [False, True])
@pytest.mark.parametrize("layout", [PADDED, BRANCHED], ids=lambda layout: layout.name)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_shards_together_are_the_micro_batch(size: int, layout: Layout, full_sequences: bool):
    micro, parts = shards(size, layout, full_sequences=full_sequences)
    for name in ("input_ids", "position_ids", "is_token"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts], dim=1), getattr(micro, name))
        assert {getattr(part, name).shape[1] for part in parts} == {micro.input_ids.shape[1] // size}
    for name in ("targets", "token_index", "hidden_rows"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(micro, name))
    for name, values in micro.signals.items():
        assert torch.equal(torch.cat([part.signals[name] for part in parts]), values)
    lengths = sum(part.cu_seqlens.diff() for part in parts)
    assert torch.equal(lengths, micro.cu_seqlens.diff())
    whole = [int((part.cu_seqlens.diff() > 0).sum()) for part in parts]
    assert (sum(whole) == int((micro.cu_seqlens.diff() > 0).sum())) or not full_sequences


@pytest.mark.parametrize("size", [2, 3, 5])
def test_losses_of_tokens_are_shared_out_evenly_and_hidden_states_meet_their_tokens(size: int):
    micro, parts = shards(size, BRANCHED, full_sequences=False)
    counts = [len(part.targets) for part in parts]
    assert max(counts) - min(counts) <= 1
    # a hidden state's number in the whole micro-batch stands for it
    numbers = torch.arange(micro.input_ids.numel()).view(micro.input_ids.shape)
    width = micro.input_ids.shape[1] // size
    given = [part.shard for part in parts]
    for taker, part in enumerate(parts):
        came = []
        for holder, shard in enumerate(given):
            assert shard is not None
            here = numbers[:, holder * width : (holder + 1) * width].flatten()
            first = sum(shard.send[:taker])
            came.append(here[shard.rows][first : first + shard.send[taker]])
            assert part.shard is not None
            assert part.shard.receive[holder] == shard.send[taker]
        assert part.shard is not None
        assert torch.equal(torch.cat(came)[part.shard.order], part.hidden_rows)
        assert part.shard.total == len(micro.targets)


def test_a_rank_alone_keeps_batch_and_micro_batch_as_they_are():
    batch = ragged_batch()
    micro = build_micro_batch(batch, [[0]], {}, PADDED)
    assert shard_micro_batch(micro, SINGLE_RANK, full_sequences=False) is micro
    given = gather_group_batch(SINGLE_RANK, batch, [1, 3])
    assert given.batch is batch
    assert given.scatter_back(torch.arange(len(batch.tokens))).tolist() == given.own_tokens.tolist()
    assert len(given.own_tokens) == int(batch.lengths[[1, 3]].sum())


def test_a_shard_moves_with_its_micro_batch():
    _, parts = shards(2, PADDED, full_sequences=False)
    shard = parts[0].to(torch.device("meta")).shard
    assert shard is not None
    assert {shard.rows.device.type, shard.order.device.type} == {"meta"}


def test_ranks_that_share_sequences_take_the_layout_without_masks_and_budgets_of_their_part():
    assert choose_layout(settings(), Qwen3Config(), "sdpa").name == "grouped"
    assert choose_layout(settings("trainer.sequence_parallel_size=2"), Qwen3Config(), "sdpa") is PADDED
    named = settings("trainer.sequence_parallel_size=2", "model.layout=grouped")
    assert choose_layout(named, Qwen3Config(), "sdpa").name == "grouped"
    long = "rollout.max_response_tokens=20000"
    assert micro_batch_tokens(settings(long, "trainer.sequence_parallel_size=2"), torch.device("cpu")) == 10008


@pytest.mark.parametrize(
    ("model", "attention", "said"),
    [
        (Qwen3Config(num_attention_heads=6, num_key_value_heads=2), SDPA, "divide the model's 6 attention heads"),
        (
            Qwen3NextConfig(),
            SDPA,
            "tokens of a qwen3_next model depend on each other beyond attention .linear_attention.",
        ),
        (Qwen3Config(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), SDPA, "length .dynamic."),
        (
            Gemma2Config(num_attention_heads=8),
            AttentionSelection("eager", skipped=(("sdpa", "the model soft-caps"),)),
            "attention eager .sdpa: the model soft-caps.: .* needs one that accepts masks as sdpa does",
        ),
    ],
)
def test_models_whose_tokens_cannot_be_shared_out_are_refused_before_they_are_loaded(model, attention, said: str):
    config = settings("trainer.sequence_parallel_size=4")
    with pytest.raises(ConfigError, match=rf"trainer.sequence_parallel_size=4: .*{said}.*; use trainer.seq"):
        check_sequence_parallel(config, model, attention)
    check_sequence_parallel(settings(), model, attention)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            Qwen3Config(num_attention_heads=6),
            "divide the model's 6 attention heads; use trainer.tensor_p.*=2, or 1, or",
        ),
        (
            Qwen3Config(num_key_value_heads=2),
            "divide the model's 2 key-value heads; use trainer.tensor_p.*=2, or 1, or",
        ),
        (Qwen3Config(intermediate_size=6), "divide the model's 6 intermediate units; use trainer.tensor_p.*=2, or 1"),
        (
            Qwen3MoeConfig(),
            "qwen3_moe: its tensor-parallel plan has moe_tp_experts, packed_colwise; supported are colwise",
        ),
        (Qwen2MoeConfig(), "qwen2_moe: its 60 experts would not be sharded"),
        (Phi3Config(), "phi3: its tensor-parallel plan has colwise_gather_output, rowwise_split_input; supported are"),
        (GPT2Config(), "gpt2: transformers has no tensor-parallel plan for it"),
        (Qwen3Config(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "length .dynamic."),
    ],
)
def test_models_whose_layers_cannot_be_cut_are_refused_before_they_are_loaded(model: Any, said: str):
    config = settings("trainer.strategy=fsdp2", "trainer.tensor_parallel_size=4")
    with pytest.raises(ConfigError, match=rf"trainer.tensor_parallel_size=4: .*{said}.*trainer.sequence_parallel_size"):
        check_sequence_parallel(config, model, SDPA)
    check_sequence_parallel(config, Qwen3Config(), SDPA)


def test_a_loss_that_compares_all_tokens_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sequence_checks, "build_loss", lambda spec: SimpleNamespace(scope="batch"))
    with pytest.raises(ConfigError, match=r"algorithm.loss.name='ppo_clip' compares all tokens of a micro-batch"):
        check_sequence_parallel(settings("trainer.sequence_parallel_size=4"), Qwen3Config(), SDPA)


def test_branches_stay_inside_of_the_exchange_whichever_comes_first():
    first, second = tiny_llama(), tiny_llama()
    ulysses_attention.enable(first)
    shared_prefix_masks.enable(first)
    shared_prefix_masks.enable(second)
    ulysses_attention.enable(second)
    ulysses_attention.enable(second)
    assert first.config._attn_implementation == second.config._attn_implementation == "exchanged_sdpa_branched"


def test_attention_that_cannot_be_exchanged_is_refused():
    model = tiny_llama()
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="eager attention does not accept masks as sdpa does"):
        ulysses_attention.enable(model)


def test_a_forward_without_exchange_is_the_models_own():
    model, ids = tiny_qwen3().eval(), torch.arange(1, 9)[None]
    expected = model(input_ids=ids).logits
    ulysses_attention.enable(model)
    assert torch.equal(model(input_ids=ids).logits, expected)


@pytest.mark.parametrize(
    ("heads", "options", "said"),
    [(3, {}, "its 3 attention heads cannot be shared out among 2 ranks"), (4, {"s_aux": 1}, "has s_aux, a value for")],
)
def test_heads_that_cannot_be_shared_out_are_refused_in_the_forward(heads: int, options: dict[str, Any], said: str):
    query = torch.zeros(1, heads, 2, 4)
    with pytest.raises(ValueError, match=said):
        attend_exchanged(
            torch.nn.Identity(), query, query, query, None, attend=None, exchange=Exchange(None, 2), **options
        )


def test_a_pool_of_one_group_keeps_the_columns_of_what_is_computed(monkeypatch: pytest.MonkeyPatch):
    batches = [
        with_weights(ragged_batch(prompts=2, n=2, seed=seed), range(4), torch.arange(4.0) + 1) for seed in (0, 1)
    ]
    sent: list[Any] = []
    monkeypatch.setattr(SequenceGroup, "gather", lambda self, value: sent.append(value) or [value, value])
    for batch in batches:
        gather_group_batch(SequenceGroup(2, 0), batch, [0, 3])
    monkeypatch.setattr(SequenceGroup, "gather", lambda self, value: sent)
    given = gather_group_batch(SequenceGroup(2, 1), batches[1], [0, 3])
    assert given.batch.weights is not None
    assert given.batch.weights.tolist() == [1, 4, 1, 4]
    assert given.batch.prompt_index.tolist() == [0, 1, 2, 3]
    assert len(given.sequences) == 4
    expected = torch.cat([b.rollout_logprobs[torch.repeat_interleave(b.lengths) % 3 == 0] for b in batches])
    assert torch.equal(given.batch.rollout_logprobs, expected)
    assert torch.equal(given.batch.rollout_logprobs[given.positions], batches[1].rollout_logprobs[given.own_tokens])


def test_a_size_that_divides_the_heads_is_named():
    with pytest.raises(ConfigError, match=r"use trainer.sequence_parallel_size=2 or 3, or 1"):
        check_sequence_parallel(settings("trainer.sequence_parallel_size=4"), Qwen3Config(num_attention_heads=6), SDPA)


def test_a_dry_run_refuses_what_the_run_would_and_says_what_is_shared(tmp_path: Path):
    words = ("trainer.strategy=ddp", "trainer.sequence_parallel_size=2")
    text = make_plan(runs.small(tmp_path / "run", *words), BACKEND, 2).text
    assert "per micro-batch on each of the 2 devices that share sequences" in text
    assert "padded layout" in text
    with pytest.raises(ConfigError, match="sequence_parallel_size=2: attention eager"):
        make_plan(runs.small(tmp_path / "run", *words, "model.attention=eager"), BACKEND, 2)


def test_under_autocast_no_more_is_sent_than_attention_reads(monkeypatch: pytest.MonkeyPatch):
    sent: list[torch.dtype] = []
    monkeypatch.setattr(ulysses_attention, "all_to_all", lambda tensor, *_: sent.append(tensor.dtype) or tensor)
    query = torch.randn(1, 4, 3, 8)

    def attend(module: Any, query: torch.Tensor, *rest: Any, **options: Any) -> tuple[torch.Tensor, None]:
        return query.transpose(1, 2), None

    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = attend_exchanged(
            torch.nn.Identity(), query, query, query.bfloat16(), None, attend=attend, exchange=Exchange(None, 2)
        )
    assert sent == [torch.bfloat16, torch.bfloat16]
    assert output.shape == (1, 3, 4, 8)


def test_a_micro_batch_has_as_many_tokens_as_its_ranks_may_hold_together():
    def parts(tokens: int, size: int) -> int:
        strategy = Single(torch.device("cpu"), "gloo")
        strategy.sequence_group = SequenceGroup(size)
        policy = PolicyModel(tiny_llama(), compute_dtype=torch.float32, options=HeadOptions())
        longest = ("data.max_prompt_tokens=8", "rollout.max_response_tokens=8")
        config = settings(*longest, f"trainer.tokens_per_micro_batch={tokens}")
        update = PolicyUpdate(config, strategy, policy, torch.device("cpu"), PADDED, total_updates=1)
        return len(update._micro_batches(ragged_batch(), range(12)))

    assert parts(16, 2) == parts(32, 1) < parts(16, 1)
