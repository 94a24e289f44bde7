"""The buffer of logits: rows that begin on 16 bytes whatever V is, written where they lie, and nothing else written."""

import pytest
import torch
from hwgrpo_kernels import head as head_module
from hwgrpo_kernels import linear_logprob, linear_token_loss
from hwgrpo_kernels.chunks import chunk_rows_for
from hwgrpo_kernels.head import Head, HeadGradients, empty_rows, logits_buffers, row_stride
from hwgrpo_kernels.rows_torch import row_grad, row_stats

from tests.kernels.token_loss_cases import gspo, problem

ON_GPU = "cuda"  # hw: what torch calls NVIDIA's and AMD's devices
ON_ASCEND = "npu"  # hw: rows stay dense there
H, V = 24, 517
ADDS_INTO_FP32 = head_module.adds_into_fp32

bias_or_none = pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])


def parts(dtype=torch.float32, rows=40, with_bias=False):
    hidden, weight = torch.randn(rows, H).to(dtype), torch.randn(V, H).to(dtype)
    return hidden, weight, torch.randn(V).to(dtype) if with_bias else None


def between(view):
    """What lies between the rows of a view into a padded buffer."""
    return view._base[:, view.shape[1] :]


@pytest.mark.parametrize(
    "vocab,dtype,device_type,stride",
    [
        (50257, torch.bfloat16, ON_GPU, 50264),
        (50257, torch.float32, ON_GPU, 50260),
        (50257, torch.float64, "cpu", 50264),
        (50257, torch.bfloat16, "cpu", 50272),
        (151936, torch.float16, ON_GPU, 151936),
        (1, torch.bfloat16, "cpu", 32),
        (1, torch.bfloat16, ON_GPU, 8),
        (50257, torch.bfloat16, ON_ASCEND, 50257),
    ],
)
def test_16_bytes_or_64_of_a_cpu_divide_the_stride_of_a_row_except_where_gemms_may_not_write_it(
    vocab, dtype, device_type, stride
):
    assert row_stride(vocab, dtype, device_type) == stride


@bias_or_none
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_logits_lie_in_padded_rows_and_equal_a_dense_product(dtype, with_bias):
    hidden, weight, bias = parts(dtype, with_bias=with_bias)
    logits = Head(weight, bias, dtype, dtype).logits(hidden)
    assert logits.stride(0) * dtype.itemsize % 16 == 0
    assert logits.data_ptr() % 16 == 0
    truth = torch.nn.functional.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(
        logits.double(), truth, rtol=4 * torch.finfo(dtype).eps, atol=20 * torch.finfo(dtype).eps
    )


@bias_or_none
def test_every_chunk_is_written_into_the_same_memory_and_never_between_its_rows(with_bias):
    hidden, weight, bias = parts(with_bias=with_bias)
    head = Head(weight, bias, torch.float32, torch.float32)
    first = head.logits(hidden)
    between(first).fill_(torch.nan)
    targets, g = torch.randint(V, (40,)), torch.randn(40)
    gradients = HeadGradients(head, torch.cat([hidden, hidden[:7]]), 40, hidden=True, weight=True, bias=True)
    for start, rows in ((0, 40), (40, 7)):
        logits = head.logits(hidden[:rows])
        assert logits.data_ptr() == first.data_ptr()
        stats = row_stats(logits, targets[:rows], 1.0, 0.0, None, True)
        row_grad(logits, targets[:rows], *stats, g[:rows], g[:rows], 1.0, 0.0, None, logits)
        assert gradients.out_for(logits) is logits
        gradients.add(logits, start)
    assert between(first).isnan().all()
    assert all(each.isfinite().all() for each in gradients.finish())


@pytest.fixture
def wide_products(monkeypatch):
    """Products of 16-bit operands in fp32, and sums with them, as CUDA has both; collects what goes in and out."""
    seen = []
    real_mm, real_addmm = torch.mm, torch.addmm

    def mm(a, b, out_dtype=None, *, out=None):
        seen.append((a, b, out))
        if out_dtype is None or a.device.type == "meta":
            return real_mm(a, b, **{} if out_dtype is None else {"out_dtype": out_dtype}, out=out)
        product = real_mm(a.to(out_dtype), b.to(out_dtype))
        return product if out is None else out.copy_(product)

    def addmm(total, a, b, out_dtype=None, *, out=None):
        seen.append((a, b, out))
        if out_dtype is None or a.device.type == "meta":
            return real_addmm(total, a, b, **{} if out_dtype is None else {"out_dtype": out_dtype}, out=out)
        assert total is out, "adds to what it is given"
        return real_addmm(total, a.to(out_dtype), b.to(out_dtype), out=out)

    monkeypatch.setattr(head_module, "multiplies_into_fp32", lambda *_: True)
    monkeypatch.setattr(head_module, "adds_into_fp32", lambda device: True)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    return seen


@bias_or_none
def test_fp32_logits_of_16_bit_operands_use_one_padded_buffer_and_one_for_their_gradient(wide_products, with_bias):
    hidden, weight, bias = parts(torch.bfloat16, with_bias=with_bias)
    targets = torch.randint(V, (40,))
    leaves = [None if each is None else each.clone().requires_grad_() for each in (hidden, weight, bias)]
    truths = [None if each is None else each.double().requires_grad_() for each in (hidden, weight, bias)]
    got = linear_logprob(
        leaves[0], leaves[1], targets, bias=leaves[2], chunk_rows=16, logits_dtype=torch.float32
    ).logprob
    true = torch.nn.functional.linear(*truths).log_softmax(1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(got.double(), true, rtol=1e-5, atol=1e-5)
    got.sum().backward()
    true.sum().backward()
    for mine, exact in zip(leaves, truths):
        if mine is not None:
            assert (mine.grad.double() - exact.grad).norm() < 2**-7 * exact.grad.norm()
    used = [each for call in wide_products for each in call if each is not None]
    vocab_wide = [each for each in used if V in each.shape and H not in each.shape]
    assert {each.dtype for each in vocab_wide} == {torch.float32, torch.bfloat16}
    assert all(max(each.stride()) * each.element_size() % 16 == 0 for each in vocab_wide)
    assert len({each.data_ptr() for each in vocab_wide if each.dtype == torch.bfloat16}) == 1


def test_gradients_of_two_chunks_of_fp32_logits_are_multiplied_at_once_and_added_where_the_sum_lies(wide_products):
    hidden, weight, _ = parts(torch.bfloat16)
    leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
    got = linear_logprob(*leaves, torch.arange(40), chunk_rows=16, logits_dtype=torch.float32).logprob
    wide_products.clear()
    got.sum().backward()
    into_weight = [(a.shape[1], out) for a, _, out in wide_products if a.shape[0] == V]
    assert [rows for rows, _ in into_weight] == [32, 8]
    assert {out.dtype for _, out in into_weight} == {torch.float32}
    assert len({out.data_ptr() for _, out in into_weight}) == 1


@pytest.mark.parametrize("logits_dtype", [torch.bfloat16, torch.float32])
def test_where_a_product_cannot_be_added_as_it_is_made_it_is_made_in_slices_of_the_vocabulary(
    wide_products, monkeypatch, logits_dtype
):
    monkeypatch.setattr(head_module, "adds_into_fp32", lambda device: False)
    monkeypatch.setattr(head_module, "_PRODUCT_ENTRIES", 200 * H)
    hidden, weight, _ = parts(torch.bfloat16)
    leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
    truths = [each.double().requires_grad_() for each in (hidden, weight)]
    got = linear_logprob(*leaves, torch.arange(40), chunk_rows=16, logits_dtype=logits_dtype).logprob
    wide_products.clear()
    got.sum().backward()
    torch.nn.functional.linear(*truths).log_softmax(1).gather(1, torch.arange(40)[:, None]).sum().backward()
    assert (leaves[1].grad.double() - truths[1].grad).norm() < 2**-6 * truths[1].grad.norm()
    slices = {a.shape[0] for a, b, _ in wide_products if b.shape[1] == H and a.shape[1] <= 32}
    assert slices == {200, V - 400}


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("multiplies", [True, False])
def test_the_sum_over_chunks_is_as_exact_as_the_products_that_a_device_has(
    wide_products, monkeypatch, multiplies, adds
):
    monkeypatch.setattr(head_module, "multiplies_into_fp32", lambda *_: multiplies)
    monkeypatch.setattr(head_module, "adds_into_fp32", lambda device: multiplies and adds)
    hidden, weight, _ = parts(torch.bfloat16)
    dlogits = torch.randn(40, V).bfloat16()
    head = Head(weight, None, torch.bfloat16, torch.bfloat16)
    gradients = HeadGradients(head, hidden, 10, hidden=False, weight=True, bias=False)
    for start in range(0, 40, 10):
        gradients.add(dlogits[start : start + 10].clone(), start)
    _, total, _ = gradients.finish()
    true = dlogits.double().T @ hidden.double()
    error = (total.double() - true).norm() / true.norm()
    assert (error < 1e-6) if multiplies else (1e-4 < error < 2**-8)


@pytest.mark.parametrize("logits_dtype", [torch.bfloat16, torch.float32])
def test_chunks_of_whole_sequences_are_written_into_one_buffer_though_later_ones_are_longer(
    wide_products, logits_dtype
):
    p = problem(n=60, h=H, v=V, dtype=torch.bfloat16)
    bounds = torch.tensor([0, 5, 25, 27, 59, 60])
    linear_token_loss(
        p.hidden, p.weight, p.targets, gspo, rows=p.rows, cu_seqlens=bounds, scope="sequence", chunk_rows=32,
        logits_dtype=logits_dtype,
    )  # fmt: skip
    made = [out for a, b, out in wide_products if b.shape == (H, V)]
    assert [out.shape[0] for out in made] == [27, 32, 1]
    assert len({out.data_ptr() for out in made}) == 1


def test_a_head_without_hidden_units_has_an_empty_gradient():
    hidden, weight = torch.zeros(3, 0).bfloat16(), torch.zeros(V, 0, requires_grad=True, dtype=torch.bfloat16)
    linear_logprob(hidden, weight, torch.zeros(3, dtype=torch.int64)).logprob.sum().backward()
    assert weight.grad.shape == (V, 0)


PRODUCTS = {
    "exact": (lambda exact: exact, None),
    "rounded": (lambda exact: exact.bfloat16().float(), "torch.mm with out_dtype=torch.float32 is wrong by 0.0586"),
    "never written": (lambda exact: torch.full_like(exact, torch.nan), "is wrong by nan where it is exact"),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_in_fp32_is_used_only_if_a_probe_gets_its_exact_values(wide_products, monkeypatch, name, dtype):
    change, expected = PRODUCTS[name]
    mm = torch.mm

    def changed(a, b, out_dtype, *, out):
        return out.copy_(change(mm(a, b, out_dtype)))

    monkeypatch.setattr(torch, "mm", changed)
    reason = head_module.probe_fp32_products.__wrapped__(torch.device("cpu"), dtype)
    assert reason is None if expected is None else expected in str(reason)
    assert {(a.dtype, out.stride(0)) for a, _, out in wide_products if out is not None} <= {(dtype, 16)}


def test_a_build_that_refuses_a_product_in_fp32_is_asked_once_and_its_reason_is_kept(monkeypatch):
    asked = []

    def mm(a, b, out_dtype, *, out):
        asked.append(a.dtype)
        raise RuntimeError("gemm input type at::BFloat16 and output type float is not supported for ROCm\nat Blas.cpp")

    monkeypatch.setattr(torch, "mm", mm)
    probe, here = head_module.probe_fp32_products, torch.device("cpu")
    probe.cache_clear()
    try:
        reasons = {probe(here, torch.bfloat16) for _ in range(3)}
        assert reasons == {"gemm input type at::BFloat16 and output type float is not supported for ROCm"}
        assert asked == [torch.bfloat16]
        probe(here, torch.float16)
        assert asked == [torch.bfloat16, torch.float16]
    finally:
        probe.cache_clear()


def test_a_host_without_the_device_has_a_reason_and_no_error(monkeypatch):
    def absent(device, dtype):
        raise RuntimeError("No HIP GPUs are available")

    monkeypatch.setattr(head_module, "_probe_operands", absent)
    reason = head_module.probe_fp32_products.__wrapped__(torch.device(ON_GPU), torch.bfloat16)
    assert reason == "No HIP GPUs are available"


def test_a_sum_in_fp32_that_is_wrong_is_not_used(wide_products, monkeypatch):
    addmm = torch.addmm
    adds = ADDS_INTO_FP32.__wrapped__
    assert adds(torch.device("cpu"))
    monkeypatch.setattr(torch, "addmm", lambda total, a, b, **options: addmm(total, a, b, **options).sub_(1))
    assert not adds(torch.device("cpu")), "what was there before is lost"


def test_a_device_without_memory_at_the_moment_is_not_taken_for_one_that_cannot_add(monkeypatch):
    def addmm(*args, **options):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(head_module, "multiplies_into_fp32", lambda *_: True)
    head_module.adds_into_fp32.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        head_module.adds_into_fp32(torch.device("cpu"))
    assert head_module.adds_into_fp32.cache_info().currsize == 0


def test_a_device_that_sums_in_the_operands_dtype_only_is_found_out_once(monkeypatch):
    asked = []

    def addmm(total, a, b, *, out_dtype, out):
        asked.append((total.dtype, a.dtype, out_dtype))
        raise RuntimeError("self and mat2 must have the same dtype")

    monkeypatch.setattr(torch, "addmm", addmm)
    try:
        assert not head_module.adds_into_fp32(torch.device("cpu"))  # its products are not fp32, so nothing to ask
        assert asked == []
        head_module.adds_into_fp32.cache_clear()
        monkeypatch.setattr(head_module, "multiplies_into_fp32", lambda *_: True)
        assert [head_module.adds_into_fp32(torch.device("cpu")) for _ in range(3)] == [False] * 3
        assert asked == [(torch.float32, torch.bfloat16, torch.float32)]
    finally:
        head_module.adds_into_fp32.cache_clear()


@pytest.mark.parametrize("logits_dtype", [torch.bfloat16, torch.float32])
def test_the_default_chunk_of_a_large_vocabulary_and_its_gradients_fit_in_1_4_gb(monkeypatch, logits_dtype):
    monkeypatch.setattr(head_module.torch.version, "hip", None)
    vocab, most = 151936, 1.4e9
    for reference in (0, 1):
        buffers = logits_buffers(torch.bfloat16, logits_dtype, ON_GPU) + reference
        rows = chunk_rows_for(vocab, logits_dtype, ON_GPU, buffers)
        collected = 2 * 2 * rows * vocab if logits_dtype == torch.float32 else 0
        assert 0.6 * most < (1 + reference) * rows * vocab * logits_dtype.itemsize + collected < most


def test_torch_takes_an_out_of_padded_rows_together_with_an_out_dtype(wide_products):
    weight, hidden = torch.empty(V, H, dtype=torch.bfloat16, device="meta"), torch.empty(5, H, device="meta")
    head = Head(weight, None, torch.bfloat16, torch.float32)
    logits = head.logits(head.operand(hidden, torch.bfloat16))
    assert (logits.dtype, logits.shape, logits.stride()) == (torch.float32, (5, V), (520, 1))
    gradients = HeadGradients(head, head.operand(hidden, torch.bfloat16), 2, hidden=True, weight=True, bias=False)
    for start in (0, 2, 4):
        chunk = logits[start : start + 2]
        gradients.add(gradients.out_for(chunk), start)
    assert [each is None or each.dtype for each in gradients.finish()] == [torch.bfloat16, torch.float32, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_row_that_is_not_finite_and_old_memory_come_into_no_other_row_of_a_product(dtype):
    junk = [torch.full((size,), float("nan"), dtype=dtype) for size in range(40 * 500, 40 * 600, 40) for _ in range(3)]
    del junk  # what is allocated now may find it
    logits = empty_rows(40, 517, dtype, torch.device("cpu"))
    assert (between(logits) == 0).all()
    logits.copy_(torch.randn(40, 517))
    logits[5] = float("nan")
    bad = (logits @ torch.randn(517, 70).to(dtype)).isnan().any(1)
    assert bad.nonzero().flatten().tolist() == [5]


def test_a_buffer_without_rows_or_of_one_row_is_one():
    for rows in (0, 1):
        assert empty_rows(rows, 3, torch.float32, torch.device("cpu")).shape == (rows, 3)
