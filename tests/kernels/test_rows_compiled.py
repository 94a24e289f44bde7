"""The compiled row functions: what the generated tests, whose rows are shorter than a block, leave open."""

from pathlib import Path

import pytest
import torch
from hwgrpo_kernels import (
    Key,
    Shape,
    decode_compiled,
    default_registry,
    host_compiler,
    linear_token_loss,
    rows_compiled,
    token_logprob,
)

from tests.support.numbers.op_agreement import DTYPES, assert_agrees

OPS = {op.name: op for op in default_registry.ops() if op.name in ("row_stats", "row_grad")}
LONG = Shape(7, 8, 2 * 1024 + 37)
"""Rows of two blocks and a bit: running maxima are carried over, and the last vector is not full."""
PINS = {"row_stats": "compiled", "row_grad": "compiled"}


def _id(value):
    return getattr(value, "name", value)


@pytest.fixture(autouse=True)
def _compiler_is_here():
    assert rows_compiled.reason_against(Key("row_stats", "cpu", torch.float32, 1024)) is None


def stats(logits, targets, *, scale=1.0, squash=0.0, row_scale=None, with_entropy=True):
    return rows_compiled.row_stats(logits, targets, scale, squash, row_scale, with_entropy)


def gradient(logits, targets, found, out, *, g=1.0, g_h=0.5, squash=0.0):
    rows = logits.shape[0]
    weights = [torch.tensor(value, dtype=found[0].dtype).expand(rows) for value in (g, g_h)]
    return rows_compiled.row_grad(logits, targets, *found, *weights, 1.0, squash, None, out)


def both_agree(logits, targets):
    """Hold both ops to their definitions for logits that `inputs` does not make."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    given = {"logits": logits, "targets": targets, "scale": 1.0, "squash": 0.0, "row_scale": None}
    assert_agrees(OPS["row_stats"], rows_compiled.row_stats, {**given, "with_entropy": True}, logits.dtype)
    exact = OPS["row_stats"].definition(**{**given, "logits": logits.double()}, with_entropy=True)
    names = ("logprob", "entropy", "row_max", "log_sum")
    more = {name: each.to(wide) for name, each in zip(names, exact)}
    ones = torch.ones(logits.shape[0], dtype=wide)
    more |= {"grad_logprob": ones, "grad_entropy": 0.3 * ones, "out": torch.empty_like(logits)}
    assert_agrees(OPS["row_grad"], rows_compiled.row_grad, {**given, **more}, logits.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "case"), [(OPS[name], case) for name in OPS for case in OPS[name].cases], ids=_id)
def test_rows_of_several_blocks_equal_the_definition(op, case, dtype):
    function = getattr(rows_compiled, op.name)
    assert_agrees(op, function, op.inputs(LONG, dtype, "cpu", case, seed=11), dtype)


def test_int32_targets_are_targets():
    logits, targets = torch.randn(5, 40), torch.tensor([0, 39, 7, 8, 1])
    for mine, narrow in zip(stats(logits, targets), stats(logits, targets.int())):
        assert torch.equal(mine, narrow)


@pytest.mark.parametrize("target", [0, 1023, 1024, 2047, 2048, LONG.V - 1])
@pytest.mark.parametrize("order", ["rising", "falling", "peak in the middle"])
def test_a_maximum_and_a_target_in_any_block_equal_the_definition(order, target):
    logits = torch.linspace(-60.0, 60.0, LONG.V)
    logits = {"rising": logits, "falling": logits.flip(0), "peak in the middle": -logits.abs()}[order]
    both_agree(logits[None], torch.tensor([target]))


def test_a_maximum_that_appears_late_shrinks_what_was_summed_before():
    logits = torch.randn(1, LONG.V, generator=torch.Generator().manual_seed(3))
    logits[0, 1500] = 6.0  # ahead by little: the first block keeps its weight
    both_agree(logits, torch.tensor([3]))


@pytest.mark.parametrize("column", [0, 1030, LONG.V - 1])
@pytest.mark.parametrize("kind", [float("nan"), float("inf")])
def test_a_logit_that_is_no_number_shows_in_its_row_alone(column, kind):
    logits = torch.randn(3, LONG.V, generator=torch.Generator().manual_seed(3))
    logits[1, column] = kind
    for target in (column, 5):
        targets = torch.tensor([1, target, 2])
        found = stats(logits, targets)
        grad = gradient(logits, targets, found, torch.empty_like(logits))
        for each in (found[0], found[1], grad.sum(1)):
            assert each.isnan().tolist() == [False, True, False]


def test_entries_that_cannot_be_drawn_have_no_gradient_at_all():
    inputs = OPS["row_grad"].inputs(LONG, torch.float32, "cpu", "masked_blocks")
    blocked = inputs["logits"] == -torch.inf
    assert blocked.sum() > LONG.N * 1024
    assert not rows_compiled.row_grad(**inputs)[blocked].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_sixteen_bit_number_is_read_exactly(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)[:, None]
    every = every[every.isfinite()[:, 0]]
    row_max = stats(every, torch.zeros(len(every), dtype=torch.int64))[2]
    assert torch.equal(row_max.view(torch.int32), every[:, 0].float().view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_gradients_are_rounded_as_torch_rounds(dtype):
    """With row_max = log_sum = 0 the gradient of a logit of 0 that is not the target's is exactly -g."""
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=generator).to(torch.int32)
    halfway = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    g = torch.cat([bits.view(torch.float32), halfway, halfway * 1.00048828125, halfway * 0.99951171875])
    rows, zero = len(g), torch.zeros(len(g))
    out = torch.empty(rows, 2, dtype=dtype)
    logits, targets = torch.zeros(rows, 2), torch.zeros(rows, dtype=torch.int64)
    rows_compiled.row_grad(logits, targets, zero, None, zero, zero, g, None, 1.0, 0.0, None, out)
    torch.testing.assert_close(out[:, 1], (-g).to(dtype), rtol=0, atol=0, equal_nan=True)


def test_a_softcap_is_tanh_to_a_rounding_for_numbers_of_any_size():
    one_a_row = torch.cat([torch.linspace(-20, 20, 100_001), torch.logspace(-30, 30, 1001)])[:, None]
    row_max = stats(one_a_row, torch.zeros(len(one_a_row), dtype=torch.int64), squash=0.75)[2]
    torch.testing.assert_close(row_max.double(), torch.tanh(0.75 * one_a_row[:, 0].double()), rtol=3e-7, atol=0)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 3e-7), (torch.float64, 1e-15)])
def test_exponentials_are_exact_to_a_rounding(dtype, rounding):
    """With row_max = log_sum = 0 and g = -1 the gradient of a logit x that is not the target's is e^x."""
    smallest = -87.0 if dtype == torch.float32 else -708.0
    x = torch.cat([torch.linspace(smallest, 0.0, 100_001, dtype=dtype), -torch.logspace(-30, 0, 1001, dtype=dtype)])
    zero = torch.zeros_like(x)
    targets = torch.zeros(len(x), dtype=torch.int64)
    for logits, want in ((x, x.double().exp()), (x + 1.5 * smallest, torch.zeros(len(x)).double())):
        both = torch.stack([zero, logits], 1)
        got = rows_compiled.row_grad(
            both, targets, zero, None, zero, zero, zero - 1, None, 1.0, 0.0, None, torch.empty_like(both)
        )
        torch.testing.assert_close(got[:, 1].double(), want, rtol=rounding, atol=0)


def test_threads_change_no_bit():
    logits = torch.randn(9, 32768, generator=torch.Generator().manual_seed(2))  # of four threads' size
    targets = torch.arange(9)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found = stats(logits, targets)
        results.append((*found, gradient(logits, targets, found, torch.empty_like(logits))))
    torch.set_num_threads(1)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_rows_with_gaps_and_columns_with_gaps_are_read_and_written_in_place():
    padded = torch.randn(5, 1200, generator=torch.Generator().manual_seed(4))
    targets = torch.tensor([0, 7, 99, 300, 500])
    for logits in (padded[:, 100:1100], padded[:, ::2], padded[:3].T[:5], padded[:1].expand(5, -1)):
        targets = targets % logits.shape[1]
        plain = logits.clone(memory_format=torch.contiguous_format)
        found = stats(plain, targets)
        assert all(torch.equal(a, b) for a, b in zip(stats(logits, targets), found))
        want = gradient(plain, targets, found, torch.empty_like(plain))
        wide = torch.full((logits.shape[0], 2 * logits.shape[1]), 9.0)
        for out in (wide[:, : logits.shape[1]], wide[:, ::2]):
            untouched = wide.clone()
            assert gradient(logits, targets, found, out) is out
            assert torch.equal(out, want)
            out.copy_(torch.full_like(out, 9.0))
            assert torch.equal(wide, torch.full_like(untouched, 9.0)), "something beside `out` was written"
    base = padded.clone()
    view = base[:, 100:1100]
    gradient(view, targets, stats(view, targets), view)
    assert torch.equal(base[:, :100], padded[:, :100])
    assert torch.equal(base[:, 1100:], padded[:, 1100:])


def test_a_gradient_may_have_another_dtype_than_its_logits():
    logits = torch.randn(3, LONG.V, generator=torch.Generator().manual_seed(6)).bfloat16()
    targets = torch.tensor([1, 2, 3])
    found = stats(logits, targets)
    want = gradient(logits, targets, found, torch.empty(logits.shape))
    assert torch.equal(gradient(logits, targets, found, torch.empty_like(logits)), want.bfloat16())
    assert torch.equal(gradient(logits, targets, found, torch.empty(logits.shape, dtype=torch.float64)), want.double())


def test_pinned_they_are_what_losses_and_log_probs_run_on(monkeypatch):
    calls = []
    for name in OPS:
        real = getattr(rows_compiled, name)
        monkeypatch.setattr(
            rows_compiled, name, lambda *words, name=name, real=real: calls.append(name) or real(*words)
        )
    hidden, weight = torch.randn(40, 16).requires_grad_(), torch.randn(1500, 16).requires_grad_()
    targets = torch.randint(1500, (40,))

    def loss_fn(seen, rows):
        return seen.entropy - seen.logprob, {}

    def run():
        calls.clear()
        leaf = (hidden.detach() @ weight.detach().T).requires_grad_()
        found = token_logprob(leaf, targets, temperature=0.7, with_entropy=True)
        (found.logprob + 0.1 * found.entropy).sum().backward()
        loss = linear_token_loss(
            hidden, weight, targets, lambda seen, rows: (-seen.logprob + seen.entropy, {}), rows={}
        )
        grads = torch.autograd.grad(loss.loss, (hidden, weight))
        return found.logprob, found.entropy, leaf.grad, loss.loss, *grads

    plain = run()
    assert not calls
    with default_registry.pinned(PINS):
        compiled = run()
        assert calls.count("row_grad") == 2
        assert calls.count("row_stats") >= 2
    for a, b in zip(plain, compiled):
        torch.testing.assert_close(b, a, rtol=2e-5, atol=2e-5)


def test_they_run_where_they_are_asked_for_and_nowhere_else():
    def chosen(*more, **options):
        return default_registry.resolve("row_stats", "cpu", torch.float32, 1024, *more, **options).name

    assert chosen() == "torch"
    assert chosen(preference=["compiled"]) == "compiled"
    with default_registry.pinned(PINS):
        assert chosen() == "compiled"
    key = Key("row_grad", "meta", torch.float32, 1024)
    compiled = {each.name: each for each in default_registry.implementations("row_grad")}["compiled"]
    assert compiled.reason_against(key) == "needs cpu, have meta"
    assert "takes float32, bfloat16, float16, float64, not int8" in str(
        compiled.reason_against(key._replace(device_type="cpu", dtype=torch.int8))
    )


def test_the_files_that_are_compiled_are_there():
    folder = Path(host_compiler.__file__).parent
    found = {each.name for each in folder.iterdir() if each.suffix in (".cpp", ".h")}
    assert found == {*rows_compiled._SOURCES, *decode_compiled._SOURCES}
