"""Ours and other projects' kernels compute the same from the same hidden states and head, ours with the least error."""

import re
from typing import Any

import pytest

from tests.peers.peers_figures import TABLE, measured, page_of

pytestmark = pytest.mark.slow

OURS = ("linear_token_loss", "linear_logprob")
FP32_LOGITS = "linear_token_loss, fp32 logits"
KEEP_FP32 = ("verl",)
"""Whose kernels keep logits in fp32, whatever their operands are."""
ROUND_TO_BF16 = ("Liger scaled CE", "Liger Triton CE", "cut-cross-entropy")
"""What rounds logits of bf16 operands, or the target's logit alone, to bf16."""
WITHOUT_LOGPROB = ("Liger GRPO",)
PEERS = (*KEEP_FP32, *ROUND_TO_BF16, *WITHOUT_LOGPROB)

# Values in nats; gradients relative to their norm.
OURS_FP32 = 1e-5
PEERS_FP32 = 2e-5
GRADIENT_BF16 = 1e-2


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return measured()


def errors_of(found: dict[str, Any], dtype: str, name: str) -> dict[str, float]:
    return {quantity: error for quantity, error in found["figures"][dtype][name].items() if quantity != "refused"}


def test_every_side_ran_where_triton_interprets_and_rounds_as_devices_do(found):
    assert found["checks"] == {"our kernels are interpreted": True, "bf16 sums round": True}
    assert found["versions"] == {"liger_kernel": "0.8.5", "cut-cross-entropy": "25.1.1", "verl": "0.9.1"}
    assert set(found["figures"]["fp32"]) == {*OURS, *PEERS}
    assert set(found["figures"]["bf16"]) == {*OURS, FP32_LOGITS, *PEERS}


@pytest.mark.parametrize("name", OURS)
def test_ours_in_fp32_is_within_1e_5_of_fp64(found, name):
    errors = errors_of(found, "fp32", name)
    assert set(errors) == {"logprob", "entropy", "hidden.grad", "weight.grad"}
    assert all(error <= OURS_FP32 for error in errors.values()), errors


@pytest.mark.parametrize("name", PEERS)
def test_the_adapter_of_a_peer_gives_what_the_definition_gives(found, name):
    errors = errors_of(found, "fp32", name)
    gradients = {"hidden.grad", "weight.grad"}
    assert gradients | (set() if name in WITHOUT_LOGPROB else {"logprob"}) <= set(errors)
    assert all(error <= PEERS_FP32 for error in errors.values()), errors
    errors = errors_of(found, "bf16", name)
    assert all(errors[quantity] <= GRADIENT_BF16 for quantity in gradients), errors


@pytest.mark.parametrize("name", ["verl", "Liger scaled CE"])
def test_a_peer_with_entropies_gives_the_definitions(found, name):
    assert errors_of(found, "fp32", name)["entropy"] <= PEERS_FP32


def test_log_probs_from_bf16_operands_and_fp32_logits_have_a_tenth_of_the_error_of_those_from_bf16_logits(found):
    ours = errors_of(found, "bf16", FP32_LOGITS)
    assert ours["logprob"] <= OURS_FP32
    assert ours["entropy"] <= OURS_FP32
    for name in (*OURS, *ROUND_TO_BF16):
        assert 10 * ours["logprob"] <= errors_of(found, "bf16", name)["logprob"], name
    for name in KEEP_FP32:
        assert errors_of(found, "bf16", name)["logprob"] <= OURS_FP32, name


def test_no_peer_has_more_exact_gradients_from_bf16_operands_than_ours_with_fp32_logits(found):
    ours = errors_of(found, "bf16", FP32_LOGITS)
    for name in PEERS:
        theirs = errors_of(found, "bf16", name)
        assert ours["hidden.grad"] <= theirs["hidden.grad"], name
        assert ours["weight.grad"] <= theirs["weight.grad"], name


def test_the_page_says_what_is_measured(found):
    page = TABLE.read_text(encoding="utf-8")
    now = page_of(found, "2000-01-01", page.partition("on commit ")[2].split()[0])
    number = r"\d[\d.]*(?:e[+-]\d+)?"
    assert re.sub(number, "#", page) == re.sub(number, "#", now), "python tests/peers/write_table.py writes it anew"
    for then, here in zip(re.findall(r"\d\.\de-\d+", page), re.findall(r"\d\.\de-\d+", now), strict=True):
        assert 1 / 3 <= float(here) / float(then) <= 3, f"{then} on the page, {here} now"
