"""Drawing tokens: uniforms, filters, the inverse of the distribution function."""

from typing import Any, cast

import numpy as np
import pytest
import torch

from hwgrpo.errors import ConfigError
from hwgrpo.rollout.counter_rng import stream_keys, uniforms
from hwgrpo.rollout.local import token_sampling
from hwgrpo.rollout.local.token_sampling import draw, filter_logits, inverse_cdf
from hwgrpo.values import Sampling


def reference_kept(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The three filters as a loop over sorted Python floats."""
    kept = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if top_k:
        kth = logits[kept[min(top_k, len(kept)) - 1]]
        kept = [token for token in kept if logits[token] >= kth]
    total = sum(np.exp(logits[token]) for token in kept)
    if top_p < 1:
        mass, count = 0.0, 0
        while mass < top_p:
            mass += np.exp(logits[kept[count]]) / total
            count += 1
        kept = kept[:count]
    best = max(logits[token] for token in kept)
    return {token for token in kept if np.exp(logits[token] - best) >= min_p}


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        *[(0, 1.0, 0.0), (5, 1.0, 0.0), (1, 1.0, 0.0), (99, 1.0, 0.0), (0, 0.7, 0.0), (0, 1e-6, 0.0), (0, 0.999, 0.0)],
        *[(0, 1.0, 0.1), (0, 1.0, 0.9), (12, 0.8, 0.0), (12, 0.8, 0.2), (0, 0.9, 0.05)],
    ],
)
def test_the_filters_keep_exactly_the_tokens_of_a_plain_reference(top_k, top_p, min_p):
    logits = torch.randn(40, 30) * 2
    filtered = filter_logits(logits, top_k=top_k, top_p=top_p, min_p=min_p)
    for row, result in zip(logits.tolist(), filtered):
        assert set(result.isfinite().nonzero()[:, 0].tolist()) == reference_kept(row, top_k, top_p, min_p)
    assert torch.equal(filtered[filtered.isfinite()], logits[filtered.isfinite()])


def test_top_k_and_top_p_keep_ties():
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, -9.0]])
    assert filter_logits(logits, top_k=2, top_p=1.0, min_p=0.0).isfinite().tolist() == [
        [False, True, True, True, False]
    ]
    tied = torch.tensor([[0.0, 0.0, 3.0, 0.0, -1.0]])
    assert filter_logits(tied, top_k=0, top_p=0.9, min_p=0.0).isfinite().tolist() == [[True, True, True, True, False]]


@pytest.mark.parametrize(
    "settings", [{"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.7}], ids=str
)
def test_the_floor_separates_the_tokens_that_were_kept(settings):
    logits = torch.cat([torch.randn(50, 20) * 2, torch.randn(50, 20).round()]) / 0.7  # the second half has ties
    uniform = torch.rand(100)
    _, _, floor = draw(logits * 0.7, uniform, temperature=0.7, **settings)
    assert floor is not None
    kept = filter_logits(logits, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings).isfinite()
    assert torch.equal(logits.log_softmax(-1) >= floor[:, None], kept)
    assert draw(logits, uniform)[2] is None, "no filter, no floor"


def test_a_row_of_which_nothing_is_dropped_has_no_floor():
    _, _, floor = draw(torch.tensor([[0.0, 0.1, -0.1]]), torch.tensor([0.5]), min_p=0.01)
    assert floor.tolist() == [-torch.inf]


def test_uniforms_are_strictly_inside_0_and_1_even_at_the_largest_counter():
    # The extreme values of (k + 1/2) / 2^23 survive fp32 unrounded.
    values = uniforms(stream_keys(0, ["a"] * 64, range(64)), 0, 4096)
    assert values.dtype == torch.float32
    assert 0.0 < values.min() < 1e-4
    assert 1 - 1e-4 < values.max() < 1.0
    grid = values.double() * 2**23 - 0.5
    assert torch.equal(grid, grid.round())


def test_uniforms_are_spread_evenly_and_uncorrelated_between_positions_samples_uids_and_seeds():
    def values(seed=0, uid="p"):
        return uniforms(stream_keys(seed, [uid] * 64, range(64)), 0, 1024).double()

    base = values()
    counts = torch.histc(base, bins=64, min=0, max=1)
    expected = base.numel() / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 5 * (2 * 63) ** 0.5
    centred = base - 0.5
    others = [centred.roll(1, 0), centred.roll(1, 1), centred.roll((1, 1), (0, 1)), values(uid="q") - 0.5]
    for other in [*others, values(seed=1) - 0.5]:
        correlation = (centred * other).mean() / (1 / 12)
        assert abs(correlation) < 5 / base.numel() ** 0.5


def test_uniforms_of_a_position_do_not_depend_on_the_block_they_are_made_in():
    keys = stream_keys(3, ["x", "y"], [0, 1])
    whole = uniforms(keys, 0, 200)
    assert torch.equal(whole[1:, 130:140], uniforms(keys[1:], 130, 10))


def test_the_hash_of_a_position_is_pinned():
    # Another value would change every seeded run: this number may only change with a note to users.
    values = uniforms(stream_keys(7, ["row-1", "row-1", "row-2"], [0, 1, 0]), 0, 2)
    bits = (values.double() * 2**23 - 0.5).long().tolist()
    assert bits == [[7352267, 6994666], [3698295, 2377136], [7294232, 5811292]]


@pytest.fixture(params=["in order", "in parallel", "in parallel, small blocks", "in parallel, deterministic"])
def sums(request, monkeypatch):
    """Draw as on a device whose sums are in order, and in the ways of one whose sums are not."""
    monkeypatch.setattr(token_sampling, "SUMS_IN_ORDER", ("cpu",) if request.param == "in order" else ())
    if "small" in request.param:
        monkeypatch.setattr(token_sampling, "BLOCK", 2)
    if "deterministic" in request.param:
        monkeypatch.setattr(token_sampling, "BLOCK", 8)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        monkeypatch.setattr(torch.Tensor, "cumsum", None)  # CUDA's raises then


@pytest.mark.usefixtures("sums")
def test_inverse_cdf_takes_the_first_token_whose_cumulative_probability_exceeds_u():
    probability = torch.tensor([[0.25, 0.25, 0.5]]).expand(5, 3)
    uniform = torch.tensor([1e-7, 0.2499, 0.25, 0.4999, 0.5])
    assert inverse_cdf(probability, uniform).tolist() == [0, 0, 1, 1, 2]


@pytest.mark.usefixtures("sums")
def test_a_uniform_close_to_1_draws_the_last_token_of_positive_probability_not_the_zeros_after_it():
    # The rows' sums differ in magnitude and rounding; 1 itself stands for a product that rounds up to the total.
    probability = torch.rand(500, 50) * torch.logspace(-6, 6, 500)[:, None]
    probability[:, 30:] = 0
    for uniform in (1 - 2.0**-24, 1.0):
        assert inverse_cdf(probability, torch.full((500,), uniform)).tolist() == [29] * 500


@pytest.mark.usefixtures("sums")
def test_zero_probability_tokens_at_the_start_and_in_the_middle_are_never_drawn():
    probability = torch.tensor([[0.0, 0.0, 0.4, 0.0, 0.6, 0.0]])
    uniform = torch.cat([torch.linspace(1e-7, 1 - 2.0**-24, 4001), torch.tensor([0.4, 2.0**-24])])
    token = inverse_cdf(probability.expand(len(uniform), -1), uniform)
    assert set(token.tolist()) == {2, 4}


@pytest.mark.parametrize("block", [256, 1])
def test_a_parallel_scan_whose_rounding_is_not_monotone_draws_no_token_of_zero_probability(block, monkeypatch):
    monkeypatch.setattr(token_sampling, "SUMS_IN_ORDER", ())
    monkeypatch.setattr(token_sampling, "BLOCK", block)
    real = torch.Tensor.cumsum
    # What an accelerator's cumsum may do, exaggerated: at token 1, of probability 0, the sum is above token 0's.
    scan = torch.tensor([0.0, 0.1, 0.0, 0.0, -0.01])

    def cumsum(values, dim):
        return real(values, dim) + (torch.nn.functional.pad(scan, (0, 256))[: values.shape[-1]])

    monkeypatch.setattr(torch.Tensor, "cumsum", cumsum)
    probability = torch.tensor([[0.4, 0.0, 0.0, 0.6, 0.0]])
    assert inverse_cdf(probability, torch.tensor([0.45])).tolist() == [3]
    assert inverse_cdf(probability, torch.tensor([1 - 2.0**-24])).tolist() == [3]


@pytest.mark.parametrize("vocabulary", [1, 255, 256, 257, 1000, 4096])
@pytest.mark.parametrize("deterministic", [False, True])
def test_blocks_of_any_number_find_the_token_that_one_sum_finds(vocabulary, deterministic, monkeypatch):
    # Sixty-fourths add up without rounding, so that every way of adding must find the same token.
    probability = torch.randint(0, 5, (400, vocabulary)).float() / 64
    probability[:, 0] += 1 / 64
    uniform = uniforms(stream_keys(3, ["p"], [0]), 0, 400)[0]
    expected = inverse_cdf(probability, uniform)
    monkeypatch.setattr(token_sampling, "SUMS_IN_ORDER", ())
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    assert torch.equal(inverse_cdf(probability, uniform), expected)
    assert vocabulary == 1 or len(expected.unique()) > min(vocabulary, 400) / 4


def test_a_large_vocabulary_is_drawn_from_by_blocks_on_the_cpu_too(monkeypatch):
    monkeypatch.setattr(token_sampling, "FEW_TOKENS", 500)
    calls = []
    real = token_sampling._by_blocks
    monkeypatch.setattr(token_sampling, "_by_blocks", lambda *words: calls.append(1) or real(*words))
    for vocabulary, taken in ((500, 0), (501, 1)):
        inverse_cdf(torch.rand(3, vocabulary), torch.rand(3))
        assert len(calls) == taken


def test_draws_do_not_depend_on_how_sums_are_made(monkeypatch):
    logits, uniform = torch.randn(3000, 40) * 3, torch.rand(3000)
    searched = draw(logits, uniform, temperature=0.7)
    monkeypatch.setattr(token_sampling, "SUMS_IN_ORDER", ())
    scanned = draw(logits, uniform, temperature=0.7)
    assert torch.equal(searched[0], scanned[0])
    assert torch.equal(searched[1], scanned[1])


@pytest.mark.usefixtures("sums")
@pytest.mark.parametrize("vocabulary", [3, 257])
def test_what_holds_no_distribution_draws_nothing_and_the_very_end_draws_the_last_token(vocabulary):
    probability = torch.ones(4, vocabulary)
    probability[1, 1] = torch.nan
    probability[2] = 0.0
    probability[3, -1] = torch.nan
    assert inverse_cdf(probability, torch.full((4,), 1.0)).tolist() == [vocabulary - 1, -1, -1, -1]


@pytest.mark.usefixtures("sums")
def test_a_row_without_finite_logits_gives_minus_1():
    logits = torch.tensor([[0.0, float("nan")], [float("inf"), 0.0], [0.0, 0.0]])
    for uniform in (torch.full((3,), 0.3), None):
        token, *_ = draw(logits, uniform)
        assert token.tolist() == [-1, -1, 0]


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.5}, {"temperature": 1.7, "top_k": 6}, {"top_p": 0.8}, {"min_p": 0.2}], ids=str
)
def test_many_draws_follow_the_filtered_softmax_and_report_its_log_probs(settings):
    logits = torch.randn(12) * 1.5
    count = 40_000
    uniform = uniforms(stream_keys(1, ["p"] * 40, range(40)), 0, 1000).flatten()
    token, logprob, _ = draw(logits.expand(count, -1), uniform, **settings)
    kept = sorted(
        reference_kept(
            (logits / settings.get("temperature", 1.0)).tolist(),
            settings.get("top_k", 0),
            settings.get("top_p", 1.0),
            settings.get("min_p", 0.0),
        )
    )
    expected = torch.zeros(12, dtype=torch.float64)
    expected[kept] = (logits[kept].double() / settings.get("temperature", 1.0)).softmax(0)
    observed = torch.bincount(token, minlength=12)
    assert not observed[expected == 0].any()
    chi_square = ((observed - count * expected) ** 2 / (count * expected))[kept].sum()
    freedom = len(kept) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5
    assert (observed / count - expected).abs().sum() / 2 < 0.01
    torch.testing.assert_close(logprob.double(), expected.log()[token], atol=1e-5, rtol=0)


def test_greedy_takes_the_likeliest_token_and_its_raw_log_prob_whatever_the_filters():
    logits = torch.randn(20, 9)
    token, logprob, _ = draw(logits, None, temperature=0.1, top_k=1, top_p=0.1, min_p=0.9)
    assert torch.equal(token, logits.argmax(-1))
    torch.testing.assert_close(logprob, logits.log_softmax(-1).amax(-1))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"n": 0}, "rollout.n=0"),
        ({"max_response_tokens": 0}, "rollout.max_response_tokens=0"),
        ({"temperature": 0.0}, "rollout.temperature=0.0.*greedy"),
        ({"temperature": float("nan")}, "rollout.temperature=nan"),
        ({"top_k": -1}, "rollout.top_k=-1"),
        ({"top_p": 0.0}, "rollout.top_p=0.0"),
        ({"top_p": 1.1}, "rollout.top_p=1.1"),
        ({"min_p": 1.0}, "rollout.min_p=1.0"),
        ({"stop": "END"}, "rollout.stop='END'.*not one string"),
        ({"stop": ("",)}, "rollout.stop="),
        ({"stop_token_ids": (-1,)}, "rollout.stop_token_ids="),
        ({"seed": -1}, "rollout.seed=-1"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings, named):
    with pytest.raises(ConfigError, match=named):
        Sampling(**cast(dict[str, Any], {"n": 1, "max_response_tokens": 8} | settings))


@pytest.mark.parametrize("settings", [{}, {"top_k": 3, "temperature": 0.7}], ids=str)
@pytest.mark.parametrize("greedy", [False, True])
def test_tokens_do_not_depend_on_how_many_rows_a_cpu_reads_at_a_time(monkeypatch, settings, greedy):
    logits, uniform = torch.randn(7, 5000), None if greedy else torch.rand(7)
    whole = draw(logits, uniform, **settings)
    monkeypatch.setattr(token_sampling, "CHUNK_BYTES", 2 * 4 * 5000)
    for expected, drawn in zip(whole, draw(logits, uniform, **settings), strict=True):
        assert (expected is None and drawn is None) or torch.equal(expected, drawn)


@pytest.mark.parametrize("vocabulary", [40, 5003])
def test_a_cpu_draws_by_the_code_of_torch_whatever_kernels_are_pinned(vocabulary, monkeypatch):
    logits, uniform = 3 * torch.randn(6, vocabulary), torch.rand(6)
    options = {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.01}
    expected = token_sampling._draw(logits, uniform, *options.values())  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(token_sampling, "_resolve", None)  # no kernel is asked for
    for one, other in zip(draw(logits, uniform, **options), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", [{}, {"top_k": 30, "top_p": 0.9, "min_p": 0.01}], ids=str)
def test_ops_in_plain_torch_draw_the_same(options):
    logits, uniform = 3 * torch.randn(50, 700), torch.rand(50)
    settings = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    by_ops = token_sampling._draw_in_kernels(logits, uniform, *settings.values())  # pyright: ignore[reportArgumentType]
    expected = draw(logits, uniform, **settings)
    assert torch.equal(by_ops.tokens, expected.tokens)
    torch.testing.assert_close(by_ops.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    assert (by_ops.floors is None) == (expected.floors is None)
    if expected.floors is not None:
        torch.testing.assert_close(by_ops.floors, expected.floors, rtol=0, atol=1e-5)
