"""What linear_token_loss, linear_logprob and token_logprob refuse, and how they say it."""

import numpy as np
import pytest
import torch
from hwgrpo_kernels import argument_checks, linear_logprob, linear_token_loss, token_logprob

from tests.kernels.token_loss_cases import ppo, problem


def call(change, loss_fn=ppo):
    p = problem(n=12, h=6, v=20)
    arguments = {
        "hidden_NH": p.hidden,
        "weight_VH": p.weight,
        "targets_N": p.targets,
        "loss_fn": loss_fn,
        "rows": p.rows,
    }
    return linear_token_loss(**{**arguments, **change(p)})


BAD = [
    (lambda p: {"hidden_NH": p.hidden[None]}, r"hidden_NH must be floating \[N,H\].*flatten"),
    (lambda p: {"weight_VH": p.weight[:, :5]}, "weight_VH is .* H=5, but hidden_NH has H=6"),
    (lambda p: {"weight_VH": p.weight[0]}, r"weight_VH must be floating \[V,H\]"),
    (lambda p: {"weight_VH": p.weight.to("meta")}, "weight_VH is on meta, but hidden_NH on cpu"),
    (lambda p: {"bias": torch.zeros(19)}, r"bias must be floating \[V\]=\[20\]"),
    (lambda p: {"targets_N": p.targets[:-1]}, r"targets_N must be int64 \[N\]=\[12\]"),
    (lambda p: {"targets_N": p.targets.float()}, "targets_N must be int64"),
    (lambda p: {"targets_N": p.targets.clone().fill_(20)}, r"targets contains 20, outside \[0, 20\)"),
    (lambda p: {"targets_N": p.targets.clone().fill_(-100)}, "targets contains -100.*mask their rows"),
    (lambda p: {"hidden_NH": p.hidden.tolist()}, "hidden_NH must be a tensor, got list"),
    (lambda p: {"weight_VH": torch.nn.Linear(6, 20)}, "weight_VH must be a tensor, got Linear"),
    (lambda p: {"targets_N": p.targets.tolist()}, "targets_N must be a tensor, got list"),
    (lambda p: {"targets_N": p.targets.to("meta")}, "targets_N is on meta, but hidden_NH on cpu"),
    (lambda p: {"bias": 0.0}, "bias must be a tensor, got float"),
    (lambda p: {"loss_fn": None}, r"loss_fn must be a function of \(stats, rows\), got NoneType"),
    (lambda p: {"rows": None}, r"rows must map names to tensors of N rows \({} for none\), got NoneType"),
    (lambda p: {"rows": {**p.rows, "old": torch.zeros(12, device="meta")}}, r"rows\['old'\] is on meta, but hidden_NH"),
    (lambda p: {"row_mask": [True] * 12}, "row_mask must be a tensor, got list"),
    (
        lambda p: {"row_mask": torch.ones(12, dtype=torch.bool, device="meta")},
        "row_mask is on meta, but hidden_NH on cpu",
    ),
    (lambda p: {"scope": "sequence", "cu_seqlens": [0, 12]}, "cu_seqlens must be a tensor, got list"),
    (lambda p: {"temperature": True}, "temperature=True must be positive"),
    (
        lambda p: {"temperature": torch.tensor(1.0)},
        r"temperature must be a number or floating \[N\]=\[12\], got .* \[\]",
    ),
    (lambda p: {"temperature": 0.0}, "temperature=0.0 must be positive"),
    (lambda p: {"temperature": -1.0}, "temperature=-1.0 must be positive"),
    (lambda p: {"temperature": float("nan")}, "temperature=nan must be positive"),
    (lambda p: {"temperature": torch.ones(11)}, r"temperature must be a number or floating \[N\]=\[12\]"),
    (lambda p: {"temperature": torch.zeros(12)}, "temperature has entries that are not positive"),
    (lambda p: {"temperature": torch.ones(12, requires_grad=True)}, "temperature requires grad"),
    (lambda p: {"softcap": 0.0}, "softcap=0.0 must be positive"),
    (lambda p: {"logit_scale": -2.0}, "logit_scale=-2.0 must be positive"),
    (lambda p: {"chunk_rows": 0}, "chunk_rows=0 must be a positive integer"),
    (lambda p: {"chunk_rows": True}, "chunk_rows=True must be a positive integer"),
    (lambda p: {"logits_dtype": torch.bfloat16}, "logits_dtype=torch.bfloat16 does not fit"),
    (
        lambda p: {"weight_operand_VH": p.weight[:, :5]},
        r"weight_operand_VH must be torch.float32 \[20, 6\] on cpu, got torch.float32 \[20, 5\] on cpu: make it with",
    ),
    (lambda p: {"weight_operand_VH": p.weight.bfloat16()}, "weight_operand_VH must be torch.float32"),
    (lambda p: {"weight_operand_VH": p.weight.to("meta")}, "weight_operand_VH must be .* on cpu, got .* on meta"),
    (lambda p: {"scope": "row"}, "scope='row' is not known; choose one of: token, sequence, batch"),
    (lambda p: {"scope": "sequence"}, "needs cu_seqlens"),
    (lambda p: {"scope": "sequence", "cu_seqlens": torch.tensor([0, 5, 11])}, "rise from 0 to N=12"),
    (lambda p: {"scope": "sequence", "cu_seqlens": torch.tensor([0, 8, 5, 12])}, "rise from 0 to N=12"),
    (lambda p: {"scope": "sequence", "cu_seqlens": torch.tensor([0.0, 12.0])}, "cu_seqlens must be integer"),
    (lambda p: {"row_mask": torch.ones(12)}, r"row_mask must be bool \[N\]=\[12\]"),
    (lambda p: {"row_mask": torch.ones(11, dtype=torch.bool)}, "row_mask must be bool"),
    (
        lambda p: {"rows": {**p.rows, "old": torch.zeros(11)}},
        r"rows\['old'\] must be a tensor of N=12 rows, got \[11",
    ),
    (lambda p: {"rows": {**p.rows, "old": 0.0}}, r"rows\['old'\] must be a tensor of N=12 rows, got float"),
    (lambda p: {"rows": {**p.rows, "old": torch.zeros(12, requires_grad=True)}}, r"rows\['old'\] requires grad"),
]


@pytest.mark.parametrize("change,message", BAD)
def test_bad_argument_is_named_with_its_value(change, message):
    with pytest.raises(ValueError, match=message):
        call(change)


@pytest.mark.parametrize(
    "result,message",
    [
        (lambda s, r: s.logprob, r"loss_fn must return \(loss_per_row, metrics\), got Tensor"),
        (lambda s, r: (s.logprob.sum(), {}), "one loss for each of its 12 rows, got .*linear_token_loss sums them"),
        (lambda s, r: (s.logprob.long(), {}), "loss_fn must return floating losses, got torch.int64"),
        (lambda s, r: (s.logprob, {"kl": s.logprob.mean()}), "metric 'kl' with one value for each of its 12 rows"),
    ],
)
def test_bad_result_of_the_loss_function_is_named(result, message):
    with pytest.raises(ValueError, match=message):
        call(lambda p: {}, loss_fn=result)


def test_values_on_a_device_are_looked_at_in_debug_mode_alone(monkeypatch):
    device = "cuda"  # hw: whatever is not the CPU
    monkeypatch.delenv("HWGRPO_DEBUG", raising=False)
    assert argument_checks.checks_values("cpu")
    assert not argument_checks.checks_values(device)
    monkeypatch.setenv("HWGRPO_DEBUG", "0")
    assert not argument_checks.checks_values(device)
    monkeypatch.setenv("HWGRPO_DEBUG", "1")
    assert argument_checks.checks_values(device)
    assert not argument_checks.checks_values("meta")


def test_numbers_of_numpy_are_numbers():
    plain = call(lambda p: {"temperature": 0.5, "chunk_rows": 5})
    same = call(lambda p: {"temperature": np.float32(0.5), "chunk_rows": np.int64(5)})
    assert torch.equal(plain.loss, same.loss)
    p = problem(n=12, h=6, v=20)
    got = linear_logprob(p.hidden, p.weight, p.targets, temperature=np.float32(0.5), chunk_rows=np.int64(5))
    assert torch.equal(
        got.logprob, linear_logprob(p.hidden, p.weight, p.targets, temperature=0.5, chunk_rows=5).logprob
    )


def test_a_vocab_group_that_is_none_is_refused():
    p = problem(n=12, h=6, v=20)
    with pytest.raises(ValueError, match=r"vocab_group must be a torch.distributed ProcessGroup .*, got str"):
        call(lambda p: {"vocab_group": "tensor"})
    with pytest.raises(ValueError, match=r"vocab_group must be a torch.distributed ProcessGroup .*, got object"):
        linear_logprob(p.hidden, p.weight, p.targets, vocab_group=object())  # pyright: ignore[reportArgumentType]


def test_logprob_functions_check_their_arguments_too():
    p = problem(n=12, h=6, v=20)
    with pytest.raises(ValueError, match="H=5, but hidden has H=6"):
        linear_logprob(p.hidden, p.weight[:, :5], p.targets)
    with pytest.raises(ValueError, match="targets contains 20"):
        linear_logprob(p.hidden, p.weight, p.targets.clone().fill_(20))
    with pytest.raises(ValueError, match=r"logits must be floating \[N,V\]"):
        token_logprob(torch.zeros(2, 3, 4), p.targets)
    with pytest.raises(ValueError, match="targets contains -100"):
        token_logprob(torch.zeros(12, 20), p.targets.clone().fill_(-100))
    with pytest.raises(ValueError, match="temperature=0 must be positive"):
        token_logprob(torch.zeros(12, 20), p.targets, temperature=0)
