"""Attention by parts equals one softmax over all keys of a query, with its gradients, in any tree of prefixes."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hwgrpo.models import shared_prefix_masks
from hwgrpo.models.varlen_attention import Part, attend, self_test
from hwgrpo.ragged import offsets_of
from hwgrpo.training.policy import layout_check
from hwgrpo.training.policy.layout_check import attend_by_lengths, select_supported_layout
from hwgrpo.training.policy.layouts import BRANCHED, GROUPED, PADDED, Layout
from hwgrpo.training.policy.micro_batch import build_micro_batch
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.values import TrainBatch
from tests.support.models.flash_ops import flash_ops
from tests.support.models.tiny import ragged_batch, settings, tiny_llama, tiny_qwen3

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
@pytest.mark.parametrize("tree", [two_levels, three_levels])
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


def losses(policy: PolicyModel, batch: TrainBatch, layout: Layout) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a loss over the batch's log-probs, and its gradients."""
    policy.zero_grad()
    micro = build_micro_batch(batch, layout.rows(batch, range(len(batch)), 10_000, policy.hidden_size), {}, layout)
    weights = torch.linspace(-1, 1, len(micro.targets))[torch.argsort(torch.argsort(micro.token_index))]
    loss = (policy.hidden_states(micro).sum(-1) * weights).sum()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in policy.parameters() if p.grad is not None]


@pytest.mark.parametrize("model", [tiny_qwen3, tiny_llama])
def test_a_model_computes_its_branches_by_lengths_as_by_masks(monkeypatch: pytest.MonkeyPatch, model):
    monkeypatch.setattr(shared_prefix_masks, "_packed", lambda module, query, value, branches, options: branches.packed)
    batch = ragged_batch(prompts=4, n=3)
    policy = policy_of(model())
    by_masks = losses(policy, batch, BRANCHED)
    assert policy.base.config._attn_implementation == shared_prefix_masks.NAME
    shared_prefix_masks.use_lengths(policy.base, on=True)
    with flash_ops() as called:
        by_lengths = losses(policy, batch, BRANCHED)
        again = losses(policy, batch, PADDED)
    layers = policy.base.config.num_hidden_layers
    assert (called.count("forward"), called.count("backward")) == (2 * layers, 2 * layers), "and none for rows of one"
    for found in (by_lengths, again):
        torch.testing.assert_close(found[0], by_masks[0], rtol=1e-5, atol=1e-4)
        for mine, right in zip(found[1], by_masks[1], strict=True):
            torch.testing.assert_close(mine, right, rtol=0, atol=1e-5 * float(right.abs().max()) + 1e-7)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 2, 1), (2, 2, 1)])
def test_responses_of_one_token_feed_none(monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...]):
    monkeypatch.setattr(shared_prefix_masks, "_packed", lambda module, query, value, branches, options: branches.packed)
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
    by_masks = losses(policy, batch, PADDED)
    shared_prefix_masks.enable(policy.base)
    shared_prefix_masks.use_lengths(policy.base, on=True)
    with flash_ops():
        by_lengths = losses(policy, batch, BRANCHED)
    torch.testing.assert_close(by_lengths[0], by_masks[0], rtol=1e-5, atol=1e-4)


def test_layers_that_the_kernels_do_not_serve_keep_their_masks():
    batch = ragged_batch(prompts=2, n=3)
    rows = BRANCHED.rows(batch, range(len(batch)), 10_000, 32)
    branches = build_micro_batch(batch, rows, {}, BRANCHED).branches
    assert branches is not None
    layer = SimpleNamespace(config=SimpleNamespace(layer_types=["sliding_attention"]), layer_idx=0)
    full = SimpleNamespace(config=SimpleNamespace(layer_types=["full_attention"]), layer_idx=0)
    half = torch.zeros(1, 2, 4, 64, dtype=torch.bfloat16)

    def packed(module: SimpleNamespace, query: torch.Tensor, **options: object) -> bool:
        return shared_prefix_masks._packed(module, query, query, branches, options) is not None

    longest = branches.packed.longest_prompt + branches.packed.longest
    assert packed(full, half)
    assert packed(layer, half, sliding_window=longest)
    assert not packed(layer, half, sliding_window=longest - 1)
    assert not packed(full, half, dropout=0.1)
    assert not packed(full, half.float())
    assert not packed(full, half[..., :60])
    assert not packed(full, torch.zeros(1, 2, 4, 320, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("words", "dtype", "said"),
    [
        ([], torch.bfloat16, "grouped rows: flash attention by lengths"),
        ([], torch.float32, "by masks, not by lengths: flash kernels compute in 16 bits"),
        (["trainer.deterministic=true"], torch.bfloat16, "by masks, not by lengths: trainer.deterministic=true"),
    ],
)
def test_the_start_takes_lengths_where_the_device_has_the_kernels(
    monkeypatch: pytest.MonkeyPatch, words: list[str], dtype: torch.dtype, said: str
):
    policy = policy_of(tiny_qwen3(), dtype)
    assert select_supported_layout(settings(), policy, GROUPED) == (GROUPED, None)
    device = torch.device("cpu")
    assert attend_by_lengths(settings(*words), policy, GROUPED, device) is None, "not on a CPU"
    monkeypatch.setattr(layout_check, "has_flash_operator", lambda device_type: True)
    with flash_ops():
        note = attend_by_lengths(settings(*words), policy, GROUPED, device)
        assert attend_by_lengths(settings(*words), policy, PADDED, device) is None
    assert said in str(note)
    taken = policy.base.config._attn_implementation == shared_prefix_masks.BY_LENGTHS
    assert taken == ("flash attention by lengths" in said)


def test_kernels_that_are_missing_leave_the_masks(monkeypatch: pytest.MonkeyPatch):
    policy = policy_of(tiny_qwen3(), torch.bfloat16)
    select_supported_layout(settings(), policy, GROUPED)
    monkeypatch.setattr(layout_check, "has_flash_operator", lambda device_type: True)
    note = attend_by_lengths(settings(), policy, GROUPED, torch.device("cpu"))
    assert "by masks, not by lengths: NotImplementedError" in str(note)
    assert policy.base.config._attn_implementation == shared_prefix_masks.NAME


def test_a_model_that_differs_by_lengths_keeps_its_masks(monkeypatch: pytest.MonkeyPatch):
    policy = policy_of(tiny_qwen3(), torch.bfloat16)
    select_supported_layout(settings(), policy, GROUPED)
    monkeypatch.setattr(layout_check, "has_flash_operator", lambda device_type: True)
    monkeypatch.setattr(layout_check, "reason_against_layout", lambda *_: "its hidden states would differ")
    with flash_ops():
        note = attend_by_lengths(settings(), policy, GROUPED, torch.device("cpu"))
    assert "by masks, not by lengths: its hidden states would differ" in str(note)
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
    fed = [*range(10), 20, 22, 23, 25, 26, 27, 29]  # no last token
    assert micro.input_ids.flatten()[packed.tokens].tolist() == fed
    assert packed.place[packed.tokens].tolist() == list(range(17))
    assert packed.offsets.tolist() == [0, 9, 10, 11, 13, 16, 17]
    assert packed.responses_of_rows.tolist() == [0, 3, 7]
    assert (packed.prompts, packed.longest_prompt, packed.longest, packed.most_in_row) == (10, 9, 9, 4)
