"""Attention by parts equals one softmax over all keys of a query, with its gradients, in any tree of prefixes."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from hwgrpo.models import shared_prefix_masks
from hwgrpo.models.shared_prefix_masks import Sequences
from hwgrpo.models.varlen_attention import Part, attend, self_test
from hwgrpo.ragged import offsets_of
from hwgrpo.training.policy import layout_check
from hwgrpo.training.policy.auto_settings import choose_layout
from hwgrpo.training.policy.layout_check import attend_by_lengths, select_supported_layout
from hwgrpo.training.policy.layouts import (
    BRANCHED,
    GROUPED,
    PACKED,
    PACKED_BRANCHED,
    PACKED_BY_LENGTHS,
    PADDED,
    Layout,
    Rows,
    input_lengths,
)
from hwgrpo.training.policy.micro_batch import build_micro_batch, split_micro_batches
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.values import TrainBatch
from tests.support.models.flash_ops import flash_ops
from tests.support.models.tiny import ragged_batch, settings, sharpened, tiny_llama, tiny_qwen3
from tests.support.numbers.rounding import BF16, LOGITS, STEP

HEADS, KEY_HEADS, SIZE = 6, 2, 8


def policy_of(model: Any, dtype: torch.dtype = torch.float32) -> PolicyModel:
    return PolicyModel(model, compute_dtype=dtype, options=HeadOptions())


def offsets(*lengths: int) -> torch.Tensor:
    return offsets_of(torch.tensor(lengths)).int()


def two_levels() -> tuple[list[Part], torch.Tensor]:
    """Return prompts of 3 and 5 tokens with responses of 4, 1 and 2, and of 6; and which token sees which."""
    own = offsets(3, 5, 4, 1, 2, 6)
    everything = slice(0, 21)
    parts = [
        Part(everything, everything, own, own, 6, 6, causal=True),
        Part(slice(8, 21), slice(0, 8), offsets(7, 6), offsets(3, 5), 7, 5, causal=False),
    ]
    return parts, seen([[0], [1], [0, 2], [0, 3], [0, 4], [1, 5]], own)


def side_by_side(window: int | None) -> tuple[list[Part], torch.Tensor]:
    """Return sequences of 3, 1, 7 and 2 tokens that see themselves alone."""
    own = offsets(3, 1, 7, 2)
    everything = slice(0, 13)
    place = torch.arange(13)
    near = place[:, None] - place < (window or 13)
    parts = [Part(everything, everything, own, own, 7, 7, causal=True, window=window)]
    return parts, seen([[0], [1], [2], [3]], own) & near


def three_levels() -> tuple[list[Part], torch.Tensor]:
    """Return a prompt of 4 tokens, two turns of 3 and 2 after it, and after the first of these two turns of 1 and 5."""
    own = offsets(4, 3, 2, 1, 5)
    everything = slice(0, 15)
    parts = [
        Part(everything, everything, own, own, 5, 5, causal=True),
        Part(slice(4, 15), slice(0, 4), offsets(11), offsets(4), 11, 4, causal=False),
        Part(slice(9, 15), slice(4, 7), offsets(6), offsets(3), 6, 3, causal=False),
    ]
    return parts, seen([[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4]], own)


def seen(paths: list[list[int]], own: torch.Tensor) -> torch.Tensor:
    """Return [T, T] bool: a token of a node sees the nodes on the path to it, and its own up to itself."""
    node = torch.repeat_interleave(own.diff().long())
    on_path = torch.tensor([[other in path for other in range(len(paths))] for path in paths])
    same = node[:, None] == node
    return on_path[node][:, node] & (~same | torch.ones_like(same).tril())


def by_one_softmax(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    key, value = (each.repeat_interleave(HEADS // KEY_HEADS, dim=1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.3
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("padded", [False, True], ids=["sums by head", "sums padded"])
@pytest.mark.parametrize(
    "tree",
    [two_levels, three_levels, *(partial(side_by_side, window) for window in (None, 1, 4))],
    ids=["two levels", "three levels", "side by side", "a window of 1", "a window of 4"],
)
def test_parts_are_one_softmax_with_its_gradients(tree, padded: bool):
    parts, visible = tree()
    draw = torch.Generator().manual_seed(0)
    tensors = [
        (3 * torch.randn(len(visible), heads, SIZE, generator=draw, dtype=torch.float64)).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    expected = by_one_softmax(*tensors, visible)
    along = torch.randn(expected.shape, generator=draw, dtype=torch.float64)
    with flash_ops(padded=padded) as called:
        found = attend(*tensors, parts, 0.3)
        gradients = torch.autograd.grad(found, tensors, along)
    assert called == ["forward"] * len(parts) + ["backward"] * len(parts)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for mine, right in zip(gradients, torch.autograd.grad(expected, tensors, along), strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-11)


@pytest.mark.parametrize("wrong", [None, "sums", "part", "gradient"])
def test_the_start_notices_kernels_that_are_wrong(monkeypatch: pytest.MonkeyPatch, wrong: str | None):
    device = torch.device("cpu")
    assert "_flash_attention_forward" in (self_test(device, torch.bfloat16, SIZE) or ""), "a CPU has none"
    forward, backward = torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward

    def wrong_sums(*arguments, **options):
        output, sums, *rest = forward(*arguments, **options)
        return output, sums / math.log(2), *rest  # as to the base of 2

    def wrong_part(query, key, value, *arguments, **options):
        return forward(query, key, value.flip(0), *arguments, **options)

    def wrong_gradient(gradient, *arguments, **options):
        of_query, of_key, of_value = backward(gradient, *arguments, **options)
        return of_query, of_key, 1.1 * of_value

    names = {"sums": "outputs", "part": "outputs", "gradient": "gradients of values"}
    with flash_ops():
        if wrong in ("sums", "part"):
            broken = wrong_sums if wrong == "sums" else wrong_part
            monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", broken)
        elif wrong:
            monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", wrong_gradient)
        said = self_test(device, torch.bfloat16, SIZE)
    assert (said is None) if wrong is None else str(said).startswith(names[wrong])


def losses(policy: PolicyModel, batch: TrainBatch, parts: Sequence[tuple[Layout, Rows]]) -> list[torch.Tensor]:
    """Return a loss over the batch's hidden states in fp32 or wider, summed over micro-batches, and its gradients."""
    policy.zero_grad()
    weights = torch.linspace(-1, 1, len(batch.tokens))
    total = torch.zeros((), dtype=torch.float64)
    for layout, rows in parts:
        micro = build_micro_batch(batch, rows, {}, layout)
        hidden = policy._backbone(micro).last_hidden_state.flatten(0, 1)[micro.hidden_rows]
        loss = (hidden.double().sum(-1) * weights[micro.token_index]).sum()
        loss.backward()
        total += loss.detach()
    return [total, *(p.grad.double().clone() for p in policy.parameters() if p.grad is not None)]


def alone(batch: TrainBatch) -> list[tuple[Layout, Rows]]:
    """Return a micro-batch for each sequence: plain causal attention, without padding."""
    return [(PADDED, [[s]]) for s in range(len(batch))]


def together(batch: TrainBatch, layout: Layout) -> list[tuple[Layout, Rows]]:
    return [(layout, layout.rows(batch, range(len(batch)), 10_000, 32))]


def adapted() -> Any:
    model = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # not the identity
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def windowed(window: int = 4) -> Any:
    """Return a model with a layer whose window is shorter than most sequences, and a full one."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = tiny_llama().config.to_dict() | {"model_type": "qwen2", "num_key_value_heads": 2}
    sizes |= {
        "use_sliding_window": True,
        "sliding_window": window,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    return sharpened(Qwen2ForCausalLM(Qwen2Config(**sizes)))


class Squares(TorchDispatchMode):
    """Collects operations whose result has a row and a column for each of `width` tokens, or more."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.made = width, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple) else (result,):
            if isinstance(each, torch.Tensor) and sum(size >= self.width for size in each.shape) > 1:
                self.made.append(str(func))
        return result


@pytest.fixture
def serves_all(monkeypatch: pytest.MonkeyPatch):
    """Kernels for every dtype and size."""
    monkeypatch.setattr(shared_prefix_masks, "_is_served", lambda *_: True)


CASES = {
    "grouped": (tiny_qwen3, BRANCHED, 2),
    "grouped, a key head per query head": (tiny_llama, BRANCHED, 2),
    "packed": (tiny_qwen3, PACKED_BY_LENGTHS, 1),
    "packed, adapters": (adapted, PACKED_BY_LENGTHS, 1),
    "packed, a window": (windowed, PACKED_BY_LENGTHS, 1),
}


@pytest.mark.parametrize(("make", "layout", "parts"), CASES.values(), ids=CASES)
def test_a_model_by_lengths_computes_what_it_does_of_each_sequence_alone(serves_all: None, make, layout, parts: int):
    batch = ragged_batch(prompts=4, n=3)
    policy = policy_of(make().double())
    expected = losses(policy, batch, alone(batch))
    shared_prefix_masks.use_lengths(policy.base)
    tokens = int(input_lengths(batch).sum()) if layout is PACKED_BY_LENGTHS else 10_000
    with flash_ops() as called, Squares(tokens) as squares:
        found = losses(policy, batch, together(batch, layout))
    layers = policy.base.config.num_hidden_layers
    assert (called.count("forward"), called.count("backward")) == (parts * layers, parts * layers)
    assert squares.made == [], "no mask, no scores"
    for mine, right in zip(found, expected, strict=True):
        # norms and rotations of transformers compute in fp32
        torch.testing.assert_close(mine, right, rtol=0, atol=STEP * float(right.abs().max()) + 1e-9)


def test_packed_rows_by_lengths_in_bf16_differ_by_rounding_alone():
    batch = ragged_batch(prompts=4, n=3)
    model = tiny_qwen3()
    expected = losses(policy_of(model), batch, alone(batch))
    policy = policy_of(model, torch.bfloat16)
    shared_prefix_masks.use_lengths(policy.base)
    with flash_ops() as called:
        found = losses(policy, batch, together(batch, PACKED_BY_LENGTHS))
    assert called.count("backward") == 2
    for mine, right in zip(found[1:], expected[1:], strict=True):
        assert float((mine - right).norm()) < BF16 * float(right.norm())


@pytest.mark.parametrize("make", [tiny_qwen3, windowed])
def test_packed_rows_that_the_kernels_do_not_serve_have_a_mask_for_each_window(make):
    batch = ragged_batch(prompts=4, n=3)
    policy = policy_of(make())
    expected = losses(policy, batch, alone(batch))
    shared_prefix_masks.use_lengths(policy.base)
    rows = [[0, 3, 6], [1], [2, 4, 5, 7, 8, 9, 10, 11]]
    with flash_ops() as called:
        found = losses(policy, batch, [(PACKED_BY_LENGTHS, rows)])
    assert called == [], "in fp32"
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=STEP * float(right.abs().max()) + 1e-6)


@pytest.mark.parametrize("layout", [BRANCHED, PACKED_BY_LENGTHS], ids=["grouped", "packed"])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 2, 1), (2, 2, 1)])
def test_responses_of_one_token_feed_none(serves_all: None, lengths: tuple[int, ...], layout: Layout):
    tokens = torch.tensor(lengths)
    batch = TrainBatch(
        prompt_tokens=torch.tensor([7, 8, 9]),
        prompt_offsets=torch.tensor([0, 2, 3]),
        prompt_index=torch.tensor([0] * (len(lengths) - 1) + [1]),
        tokens=torch.arange(20, 20 + sum(lengths)),
        offsets=offsets_of(tokens),
        advantages=torch.ones(len(lengths)),
        logprobs=torch.zeros(sum(lengths)),
    )
    policy = policy_of(tiny_qwen3())
    expected = losses(policy, batch, alone(batch))
    shared_prefix_masks.use_lengths(policy.base)
    with flash_ops():
        found = losses(policy, batch, together(batch, layout))
    torch.testing.assert_close(found[0], expected[0], rtol=STEP, atol=STEP * LOGITS)


def test_layers_that_the_kernels_do_not_serve_keep_their_masks():
    batch = ragged_batch(prompts=2, n=3)
    grouped, packed = (
        build_micro_batch(batch, layout.rows(batch, range(len(batch)), 10_000, 32), {}, layout).branches
        for layout in (BRANCHED, PACKED_BY_LENGTHS)
    )
    assert grouped is not None
    assert packed is not None
    half = torch.zeros(1, 2, 4, 64, dtype=torch.bfloat16)

    def parts(query: torch.Tensor, branches: Any = grouped, window: int | None = None, **options: object) -> list:
        found = shared_prefix_masks._parts(query, query, branches, window, options)
        return [part.window for part in found]

    longest = grouped.packed.longest_prompt + grouped.packed.longest
    assert parts(half) == parts(half, window=longest) == [None, None]
    assert parts(half, window=longest - 1) == [], "a window cannot span a prompt and its responses"
    longest = packed.packed.longest
    assert parts(half, packed) == parts(half, packed, window=longest) == [None]
    assert parts(half, packed, window=longest - 1) == [longest - 1]
    assert parts(half, dropout=0.1) == parts(half.float()) == parts(half[..., :60]) == []
    assert parts(torch.zeros(1, 2, 4, 320, dtype=torch.bfloat16)) == []


@pytest.fixture
def has_operators(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that says it has torch's flash operators."""
    monkeypatch.setattr(layout_check, "has_flash_operator", lambda device_type: True)
    return torch.device("cpu")


def started(policy: PolicyModel, layout: Layout, device: torch.device, *words: str) -> tuple[Layout, str | None]:
    """Return the layout after the startup checks, and what they say about lengths."""
    config = settings(f"model.layout={layout.name}", *words)
    assert select_supported_layout(config, policy, layout) == (layout, None)
    return attend_by_lengths(config, policy, layout, device)


@pytest.mark.parametrize("layout", [GROUPED, PACKED, PADDED], ids=lambda layout: layout.name)
def test_without_the_operators_there_is_nothing_to_choose(layout: Layout):
    policy = policy_of(tiny_qwen3(), torch.bfloat16)
    assert started(policy, layout, torch.device("cpu")) == (layout, None)


def test_other_attention_keeps_its_masks(has_operators):
    policy = policy_of(tiny_qwen3(), torch.bfloat16)
    policy.base.set_attn_implementation("eager")
    assert started(policy, PACKED, has_operators) == (PACKED, None)
    assert policy.base.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("make", "layout", "used", "said"),
    [
        (tiny_qwen3, GROUPED, GROUPED, "grouped rows: flash attention by lengths, without masks and padding"),
        (tiny_qwen3, PACKED, PACKED_BY_LENGTHS, "packed rows: flash attention by lengths, without masks and padding"),
        (windowed, PACKED_BRANCHED, PACKED_BY_LENGTHS, "packed rows: flash attention by lengths, without masks"),
        (windowed, BRANCHED, BRANCHED, "and padding; layers with a sliding window in reach keep their masks"),
        (tiny_qwen3, PADDED, PADDED, None),
    ],
    ids=["grouped", "packed", "packed with windows", "grouped with windows", "padded"],
)
def test_the_start_takes_lengths_where_the_device_has_the_kernels(has_operators, make, layout, used, said):
    policy = policy_of(make(), torch.bfloat16)
    with flash_ops() as called:
        found, note = started(policy, layout, has_operators)
        assert started(policy, layout, has_operators) == (found, note), "as a comparison of layouts starts them in turn"
    assert found == used
    assert (said in note) if said else (note is None)
    assert bool(called) == bool(said)
    assert (policy.base.config._attn_implementation == shared_prefix_masks.BY_LENGTHS) == bool(said)


@pytest.mark.parametrize("layout", [GROUPED, PACKED], ids=lambda layout: layout.name)
@pytest.mark.parametrize(
    ("words", "dtype", "reason"),
    [
        ([], torch.float32, "flash kernels compute in 16 bits"),
        (["trainer.deterministic=true"], torch.bfloat16, "trainer.deterministic=true"),
        ([], torch.bfloat16, "NotImplementedError"),
    ],
    ids=["fp32", "deterministic", "no operators"],
)
def test_what_the_kernels_cannot_do_leaves_the_masks(has_operators, layout: Layout, words, dtype, reason: str):
    policy = policy_of(tiny_qwen3(), dtype)
    found, note = started(policy, layout, has_operators, *words)
    assert found is layout
    assert f"{layout.name} rows: attention by masks, not by lengths: {reason}" in str(note)
    assert policy.base.config._attn_implementation == ("sdpa" if layout is PACKED else shared_prefix_masks.NAME)


@pytest.mark.parametrize("layout", [GROUPED, PACKED], ids=lambda layout: layout.name)
def test_a_model_that_differs_by_lengths_keeps_its_masks(
    monkeypatch: pytest.MonkeyPatch, has_operators, layout: Layout
):
    reason = layout_check.reason_against_layout

    def differs(policy: PolicyModel, *arguments: Any) -> str | None:
        by_lengths = policy.base.config._attn_implementation == shared_prefix_masks.BY_LENGTHS
        return "they differ" if by_lengths else reason(policy, *arguments)

    monkeypatch.setattr(layout_check, "reason_against_layout", differs)
    policy = policy_of(tiny_qwen3(), torch.bfloat16)
    with flash_ops():
        found, note = started(policy, layout, has_operators)
    assert found is layout
    assert f"{layout.name} rows: attention by masks, not by lengths: they differ" in str(note)
    assert policy.base.config._attn_implementation == ("sdpa" if layout is PACKED else shared_prefix_masks.NAME)


def test_operators_without_windows_leave_packed_rows_their_masks(monkeypatch: pytest.MonkeyPatch, has_operators):
    forward = torch.ops.aten._flash_attention_forward

    def ignores_windows(*arguments: Any, scale: float | None, **_: int) -> Any:
        return forward(*arguments, scale=scale)

    policy = policy_of(windowed(), torch.bfloat16)
    with flash_ops():
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", ignores_windows)
        found, note = started(policy, PACKED_BRANCHED, has_operators)
    assert found is PACKED_BRANCHED
    assert "packed rows: attention by masks, not by lengths: with a sliding window outputs differ" in str(note)


def test_windows_that_the_check_is_too_short_for_are_checked(monkeypatch: pytest.MonkeyPatch, has_operators):
    monkeypatch.setattr(Sequences, "parts", lambda sequences, window: sequences.packed.parts)
    policy = policy_of(windowed(30), torch.bfloat16)
    with flash_ops():
        found, note = started(policy, PACKED_BRANCHED, has_operators)
    assert found is PACKED_BRANCHED
    assert "packed rows: attention by masks, not by lengths: its hidden states would differ" in str(note)


def test_auto_chooses_again_where_packed_rows_would_need_a_mask(has_operators):
    policy = policy_of(tiny_qwen3(), torch.bfloat16)
    config = settings("data.max_prompt_tokens=1")
    layout = choose_layout(config, policy.base.config, "sdpa", by_lengths=True)
    assert layout is PACKED
    layout, _ = select_supported_layout(config, policy, layout)
    found, note = attend_by_lengths(config, policy, layout, has_operators)
    assert found is GROUPED
    assert "layout grouped, not packed rows by lengths: NotImplementedError" in str(note)
    assert policy.base.config._attn_implementation == shared_prefix_masks.NAME


def test_packed_tokens_have_the_bounds_of_prompts_and_responses_and_no_padding():
    lengths, prompts = torch.tensor([2, 3, 4, 2]), torch.tensor([9, 1])
    batch = TrainBatch(
        prompt_tokens=torch.arange(10),
        prompt_offsets=offsets_of(prompts),
        prompt_index=torch.tensor([0, 0, 1, 1]),
        tokens=torch.arange(20, 31),
        offsets=offsets_of(lengths),
        advantages=torch.ones(4),
        logprobs=torch.zeros(11),
    )
    micro = build_micro_batch(batch, [[0, 1], [2, 3]], {}, BRANCHED)
    assert micro.branches is not None
    packed = micro.branches.packed
    assert packed.tokens is not None
    assert packed.place is not None
    fed = [*range(10), 20, 22, 23, 25, 26, 27, 29]  # no last token
    assert micro.input_ids.flatten()[packed.tokens].tolist() == fed
    assert packed.place[packed.tokens].tolist() == list(range(17))
    assert packed.offsets.tolist() == [0, 9, 10, 11, 13, 16, 17]
    assert packed.responses_of_rows.tolist() == [0, 3, 7]
    assert (packed.prompts, packed.longest_prompt, packed.longest, packed.most_in_row) == (10, 9, 9, 4)


def test_packed_rows_by_lengths_are_one_row_without_padding_up_to_the_budget():
    batch = ragged_batch(prompts=4, n=3)
    lengths = input_lengths(batch)
    budget = int(lengths.sum()) // 2
    micros = [
        build_micro_batch(batch, rows, {}, PACKED_BY_LENGTHS)
        for rows in split_micro_batches(batch, range(12), budget, PACKED_BY_LENGTHS, 1)
    ]
    assert sum(micro.input_ids.numel() for micro in micros) == int(lengths.sum())
    for micro in micros:
        assert micro.input_ids.shape == (1, int(micro.is_token.sum()))
        assert micro.mask_spans is None
        if len(micro.cu_seqlens) == 2:
            assert micro.branches is None, "one sequence: plain causal attention"
            continue
        assert isinstance(micro.branches, Sequences)
        packed = micro.branches.packed
        assert packed.tokens is None
        assert packed.offsets[:-1].tolist() == (micro.position_ids[0] == 0).nonzero()[:, 0].tolist()
        assert int(packed.offsets[-1]) == packed.total == micro.input_ids.numel()
    assert len(micros) == 3, "the first two hold up to half the tokens"


def test_packed_rows_of_unequal_length_are_read_without_their_padding():
    batch = ragged_batch(prompts=4, n=3)
    lengths = input_lengths(batch).tolist()
    micro = build_micro_batch(batch, [[0, 3], [1]], {}, PACKED_BY_LENGTHS)
    assert isinstance(micro.branches, Sequences)
    packed = micro.branches.packed
    assert packed.tokens is not None
    assert packed.tokens.tolist() == micro.is_token.flatten().nonzero()[:, 0].tolist()
    assert packed.offsets.diff().tolist() == [lengths[0], lengths[3], lengths[1]]
    heads = torch.arange(micro.input_ids.numel()).view(2, 1, -1, 1)
    there = packed.unpack(packed.pack(heads), 2)[..., 0, 0]
    assert torch.equal(there[micro.is_token], heads[:, 0, :, 0][micro.is_token])
