"""The Triton sampling kernels give the tokens, log-probs and floors of `draw`, and what their definitions give."""

from collections.abc import Iterator

import pytest
import torch
from hwgrpo_kernels import Implementation, Shape, default_registry, sampling_triton

from hwgrpo.rollout.local import token_sampling
from hwgrpo.rollout.local.token_sampling import Drawn, draw, filter_logits, logprob_floor
from tests.support.numbers.op_agreement import assert_agrees
from tests.support.numbers.row_cases import DEVICE

NAMES = ("block_sums", "kept_sums", "pick")
OPS = {op.name: op for op in default_registry.ops() if op.name in NAMES}
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
IN_16_BITS = ("plain", "scaled", "all_filters")
CASES = [
    pytest.param(op, case, dtype, id=f"{op.name}-{case}-{str(dtype)[6:]}")
    for op in OPS.values()
    for case in op.cases
    for dtype in ((FP32, BF16, FP16) if case in IN_16_BITS else (FP32,))
]
VOCABULARIES = [(vocabulary, FP32) for vocabulary in (1, 152, 255, 256, 257, 5003)] + [(257, BF16), (257, FP16)]
"""Sides of a block's end and several programs; a dtype changes a conversion alone."""
ROUNDING = 64 * 2.0**-24
"""More than fp32 sums of exponentials err, of a total of 1: 18 halvings to 2^18 terms, and some units of exp."""
EDGE = 2.0**-24
"""The engine's least uniform; the largest is 1 less this."""
_OF_DTYPE = {FP32: 0.6, BF16: 1.0, FP16: 0.6}
FILTERS = [
    *(
        (filters, dtype, temperature)
        for filters in ({"top_k": 5}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02})
        for dtype, temperature in _OF_DTYPE.items()
    ),
    ({"top_k": 1}, BF16, 1.0),
    ({"top_k": 300}, BF16, 1.0),
    ({"top_p": 0.99}, FP16, 0.6),
    ({"top_p": 1e-6}, FP32, 0.6),
    ({"min_p": 0.1}, BF16, 1.0),
    ({"min_p": 1.0}, FP32, 0.6),
]
"""Filters, dtype, temperature: searches in every dtype, whose thresholds have other bits; edges in one."""


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    for name in NAMES:
        default_registry.register(Implementation(name, "interpreted", f"hwgrpo_kernels.sampling_triton:{name}"))
    with default_registry.pinned(dict.fromkeys(NAMES, "interpreted")):
        yield
    for name in NAMES:
        del default_registry._implementations[name]["interpreted"]


def rows(vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
    """Return logits [N,V] that sums, searches and boundaries may stumble over; the last three rows have no token."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(15, vocabulary, generator=generator)
    logits[1] = logits[1].round()  # ties
    logits[2, ::3] = -torch.inf
    logits[2, vocabulary // 2] = 0.5
    logits[3, -1] = 90.0  # one token, behind all others
    logits[4] = 0.0
    logits[5] = -torch.inf
    logits[5, -1] = -7.0
    logits[6] = torch.linspace(0, -300, vocabulary)  # most of them underflow
    logits[7] = torch.where(logits[7] > 0, 0.0, -0.0)
    logits[8] = -torch.inf
    logits[8, 255:258] = logits[8, :1] = 2.0  # both sides of a block's end
    logits[9] += 2000.0
    logits[10] = logits[10, 0]
    logits[10, vocabulary // 3] -= 1e-3
    logits[11] = torch.linspace(-300, 0, vocabulary)
    logits[12, vocabulary // 2] = torch.nan
    logits[13, 0] = torch.inf
    logits[14] = -torch.inf
    return logits.to(dtype)


DEAD = 3


def on_device(logits: torch.Tensor, uniform: torch.Tensor | None, **options: float) -> Drawn:
    """Draw as on a GPU."""
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    uniform = None if uniform is None else uniform.to(DEVICE)
    drawn = token_sampling._draw_in_kernels(logits.to(DEVICE), uniform, *settings.values())  # pyright: ignore
    return Drawn(*(None if each is None else each.cpu() for each in drawn))


def assert_draws(logits: torch.Tensor, uniform: torch.Tensor, temperature: float = 1.0, **filters: float) -> None:
    """Hold the kernels to `draw`, but for uniforms at a token's boundary, where the next token is as right."""
    found = on_device(logits, uniform, temperature=temperature, **filters)
    present = draw(logits, uniform, temperature=temperature, **filters)
    z = logits.float() / temperature
    kept = filter_logits(z, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters)
    alive = torch.arange(len(logits)) < len(logits) - len(logits) // 15 * DEAD
    assert (found.tokens[~alive] == -1).all()
    assert ((found.tokens[alive] >= 0) & (found.tokens[alive] < logits.shape[1])).all()
    exact = kept[alive].double().softmax(1)
    token = found.tokens[alive][:, None]
    above = exact.cumsum(1).gather(1, token)[:, 0]
    share = exact.gather(1, token)[:, 0]
    u = uniform[alive].double()
    assert (share > 0).all(), "a dropped token was drawn"
    assert (u <= above + ROUNDING).all()
    assert (u >= above - share - ROUNDING).all()
    inside = (u < above - ROUNDING) & (u > above - share + ROUNDING)
    assert torch.equal(found.tokens[alive][inside], present.tokens[alive][inside])
    # A log-prob rounds with the numbers it is the difference of.
    torch.testing.assert_close(found.logprobs[alive].double(), share.log(), rtol=3e-6, atol=3e-6)
    if present.floors is None:
        assert found.floors is None
        return
    assert found.floors is not None
    full = z.double()
    kept_bools = kept > -torch.inf
    floor = logprob_floor(full, full.masked_fill(~kept_bools, -torch.inf))[alive]
    torch.testing.assert_close(found.floors[alive].double(), floor, rtol=1e-6, atol=2e-6)


def repeated(logits: torch.Tensor, uniforms: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every row with every uniform, dead rows last, in turns of 15."""
    count, alive = len(logits), len(logits) - DEAD
    order = torch.cat([torch.arange(alive).repeat(len(uniforms)), torch.arange(alive, count).repeat(len(uniforms))])
    u = torch.tensor(uniforms)
    return logits[order], torch.cat([u.repeat_interleave(alive), u.repeat_interleave(DEAD)])


@pytest.mark.parametrize("op,case,dtype", CASES)
def test_kernel_equals_the_definition(op, case, dtype):
    function = getattr(sampling_triton, op.name)
    assert_agrees(op, function, op.inputs(Shape(3, 0, 517), dtype, DEVICE, case), dtype)


@pytest.mark.parametrize(
    "vocabulary,dtype,temperature", [*((*each, 0.6) for each in VOCABULARIES), (257, FP32, 1.0)], ids=str
)
def test_tokens_and_log_probs_are_those_of_draw(vocabulary, dtype, temperature):
    logits, uniform = repeated(rows(vocabulary, dtype), (EDGE, 0.25, 0.5, 0.737, 1 - EDGE))
    assert_draws(logits, uniform, temperature)


@pytest.mark.parametrize("vocabulary,dtype", VOCABULARIES, ids=str)
def test_greedy_takes_the_first_maximum_at_any_temperature(vocabulary, dtype):
    logits = rows(vocabulary, dtype)
    found = on_device(logits, None, temperature=0.3, top_k=1)
    alive = slice(0, len(logits) - DEAD)
    assert torch.equal(found.tokens[alive], logits[alive].float().argmax(1))
    assert (found.tokens[-DEAD:] == -1).all()
    expected = logits[alive].double().log_softmax(1).amax(1)
    torch.testing.assert_close(found.logprobs[alive].double(), expected, rtol=3e-6, atol=3e-6)
    assert found.floors is None


@pytest.mark.parametrize("filters,dtype,temperature", FILTERS, ids=str)
def test_filters_keep_what_draw_keeps(filters, dtype, temperature):
    # the floor lies between the least token kept and the likeliest dropped: it says which are kept
    assert_draws(*repeated(rows(1301, dtype), (0.6,)), temperature, **filters)


@pytest.mark.parametrize(
    "dtype,filters",
    [(BF16, {}), (BF16, {"top_k": 50, "top_p": 0.95}), (FP32, {"top_p": 0.9})],
    ids=str,
)
def test_a_large_vocabulary_is_drawn_from(filters, dtype):
    logits = 6 * torch.randn(2, 151936, generator=torch.Generator().manual_seed(2))
    assert_draws(logits.to(dtype), torch.tensor([0.31, 0.9]), 0.8, **filters)


def test_a_row_s_results_do_not_depend_on_the_rows_beside_it():
    logits, uniform = repeated(rows(1301, BF16), (0.3, 0.7))
    options = {"temperature": 0.9, "top_k": 300, "top_p": 0.9}
    together = on_device(logits, uniform, **options)
    for row in (0, 7, 20):
        alone = on_device(logits[row : row + 1], uniform[row : row + 1], **options)
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one, other[row : row + 1])


def test_strided_rows_and_uniforms_are_read_where_they_are():
    logits, uniform = torch.randn(6, 600), torch.rand(6)
    expected = on_device(logits, uniform, top_p=0.9)
    apart = torch.full((6, 700), torch.nan)
    apart[:, 50:650] = logits
    block = torch.full((6, 64), torch.nan)
    block[:, 3] = uniform
    found = on_device(apart[:, 50:650], block[:, 3], top_p=0.9)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_no_rows_give_no_tokens():
    found = on_device(torch.empty(0, 300), torch.empty(0), top_k=3)
    assert [len(each) for each in found] == [0, 0, 0]
