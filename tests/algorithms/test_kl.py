"""KL estimators: golden values and gradients."""

import pytest
import torch

from hwgrpo.algorithms.kl import build_kl
from hwgrpo.config.schema import KlConfig
from hwgrpo.errors import ConfigError

PAIRS = [(-1.0, -1.5), (-1.0, -0.5), (-0.1, -30.0), (-3.0, -0.2), (-30.0, -0.1)]


def value_and_gradient(name, logprob, ref_logprob, **clamps):
    lp = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    kl = build_kl(KlConfig(estimator=name, **clamps))(lp, torch.tensor([ref_logprob], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(kl.sum(), lp)
    return kl.item(), gradient.item()


UNCLAMPED = {"input_clamp": None, "output_clamp": None}


@pytest.mark.parametrize(
    ("name", "clamps", "expected", "digits"),
    [
        ("k1", {}, [0.5, -0.5, 29.9, -2.8, -29.9], 10),
        ("k2", {}, [0.125, 0.125, 447.005, 3.92, 447.005], 10),
        ("abs", {}, [0.5, 0.5, 29.9, 2.8, 29.9], 10),
        ("k3", {}, [0.1065306597, 0.1487212707, 10.0, 10.0, 10.0], 10),
        ("k3", UNCLAMPED, [0.1065306597, 0.1487212707, 28.9, 12.6446468, 9.6695e12], 10),
        ("k1+", {}, [0.5, -0.5, 29.9, -2.8, -29.9], 10),
        ("k3+", {}, [0.1065306597, 0.1487212707, 10.0, 10.0, 10.0], 10),
        ("k3+", UNCLAMPED, [0.1065306597, 0.1487212707, 28.9, 12.6446468, 9.6695e12], 10),
    ],
)
def test_estimators_give_their_golden_values(name, clamps, expected, digits):
    for (logprob, ref_logprob), value in zip(PAIRS, expected, strict=True):
        tolerance = {12.6446468: 5e-8, 9.6695e12: 5e7}.get(value, 6 * 10.0 ** -(digits + 1))
        assert value_and_gradient(name, logprob, ref_logprob, **clamps)[0] == pytest.approx(value, rel=0, abs=tolerance)


def test_the_input_clamp_alone_bounds_the_exponential():
    value, gradient = value_and_gradient("k3", -30.0, -0.1, output_clamp=None)
    assert value == pytest.approx(485165195.4097903 - 21)
    assert gradient == 0


@pytest.mark.parametrize(("x", "vanishes"), [(2.61, False), (2.612, True), (-10.99, False), (-11.01, True)])
def test_the_output_clamp_of_k3_cuts_the_gradient_beyond_its_roots(x, vanishes):
    gradient = value_and_gradient("k3", -15.0, -15.0 + x)[1]
    expected = 0.0 if vanishes else 1 - torch.tensor(x, dtype=torch.float64).exp().item()
    assert gradient == pytest.approx(expected, rel=1e-9, abs=0)
    unclamped = value_and_gradient("k3", -15.0, -15.0 + x, output_clamp=None)[1]
    assert unclamped == pytest.approx(1 - torch.tensor(x, dtype=torch.float64).exp().item(), rel=1e-9)


@pytest.mark.parametrize("name", ["k1+", "k2", "k3+"])
@pytest.mark.parametrize("pair", PAIRS)
def test_straight_through_forms_have_the_unclamped_gradient_of_k2(name, pair):
    logprob, ref_logprob = pair
    assert value_and_gradient(name, *pair)[1] == pytest.approx(logprob - ref_logprob, rel=1e-12)


@pytest.mark.parametrize(("name", "of_reference"), [("k3", True), ("k2", False), ("k1+", False), ("k3+", False)])
def test_the_expected_gradient_of_k3_is_that_of_the_other_kl(name, of_reference):
    """Over all tokens, weighed by the policy: that of KL(reference || policy) for k3, else KL(policy || reference)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(50, generator=generator, dtype=torch.float64).log_softmax(-1)
    logprob = logits.log_softmax(-1)
    estimate = build_kl(KlConfig(estimator=name, **UNCLAMPED))(logprob, reference)
    (found,) = torch.autograd.grad((logprob.detach().exp() * estimate).sum(), logits, retain_graph=True)
    forward, backward = (logprob.exp() * (logprob - reference)).sum(), (reference.exp() * (reference - logprob)).sum()
    (of_policy,) = torch.autograd.grad(forward, logits, retain_graph=True)
    (of_other,) = torch.autograd.grad(backward, logits)
    expected, other = (of_other, of_policy) if of_reference else (of_policy, of_other)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert float((found - other).norm() / other.norm()) > 0.1


def test_the_expected_gradient_of_k1_is_0():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    logprob = logits.log_softmax(-1)
    estimate = build_kl(KlConfig(estimator="k1"))(logprob, torch.full((50,), -4.0, dtype=torch.float64))
    (found,) = torch.autograd.grad((logprob.detach().exp() * estimate).sum(), logits)
    assert float(found.abs().max()) < 1e-15


def test_k1_and_abs_have_slope_one():
    assert value_and_gradient("k1", -1.0, -0.5)[1] == 1
    assert value_and_gradient("abs", -1.0, -0.5)[1] == -1
    assert value_and_gradient("abs", -1.0, -1.5)[1] == 1


def test_a_straight_through_value_is_not_rounded_by_its_gradient_carrier():
    """In fp32, 447 added to and taken from 0.1 would leave three digits."""
    lp = torch.tensor([-30.0], requires_grad=True)
    kl = build_kl(KlConfig(estimator="k1+"))(lp, torch.tensor([-0.1]))
    assert torch.equal(kl, lp.detach() - torch.tensor([-0.1]))


def test_an_unknown_estimator_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r"KL estimator='k33'.*k3"):
        build_kl(KlConfig(estimator="k33"))
