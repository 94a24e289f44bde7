"""Mistakes to plant in the Triton row kernels, and the case of the suite that must show each."""

from typing import Any

import torch

from tests.interpreter import test_rows, test_rows_memory
from tests.interpreter.mutants import Case, Mutant
from tests.support.numbers.row_cases import GRAD, GRAD_KL, NARROW, PERSISTENT, STATS, STATS_KL


def mutant(name: str, case: Case, *snippets: str) -> Mutant:
    """Return a mutant from snippets that each have what takes their place behind them."""
    return Mutant(name, case, tuple(zip(snippets[::2], snippets[1::2], strict=True)))


def equals(op: Any, case: str, dtype: torch.dtype = torch.float32, tile: Any = NARROW) -> Case:
    """The comparison with the definition."""
    parameters = {"op": op, "case": case, "dtype": dtype, "tile": tile}
    return Case(test_rows.test_kernel_equals_the_definition, parameters)


def guarded_stats(op: Any) -> Case:
    """Statistics of aligned rows among NaN."""
    parameters = {"op": op, "case": "plain", "dtype": torch.float32, "first": 16, "length": 560, "tile": NARROW}
    return Case(test_rows_memory.test_statistics_of_guarded_rows_are_those_of_rows_alone, parameters)


def guarded_grad(op: Any, in_place: bool = False) -> Case:
    """The gradient of aligned rows among NaN."""
    parameters = {"op": op, "dtype": torch.float32, "in_place": in_place, "first": 16, "length": 560, "tile": NARROW}
    test = test_rows_memory.test_the_gradient_of_guarded_rows_is_that_of_rows_alone_and_writes_no_guard
    return Case(test, parameters)


def digits(op: Any) -> Case:
    """Relative precision of a logprob near 0."""
    parameters = {"op": op, "dtype": torch.float32, "tolerance": 1e-5}
    return Case(test_rows.test_the_logprob_of_an_almost_certain_target_keeps_its_digits, parameters)


def out_of_range(target: int) -> Case:
    """A row whose target is not in the vocabulary."""
    test = test_rows_memory.test_a_target_out_of_range_makes_its_own_row_nan_and_reads_nothing_outside
    return Case(test, {"target": target})


PLACES, PLACES_GRAD = (
    Case(
        test_rows.test_every_place_of_the_target_among_whole_blocks_and_tail_is_right,
        {"op": op, "vocab": 383},
    )
    for op in (STATS, GRAD)
)
NEITHER = Case(test_rows.test_what_neither_side_can_draw_is_nothing_even_as_the_target, {"dtype": torch.float32})
CERTAIN = Case(test_rows.test_the_gradient_of_an_almost_certain_target_keeps_its_digits, {"dtype": torch.float32})
LAST_PLACE = Case(
    test_rows.test_bf16_gradients_are_within_one_unit_in_the_last_place, {"op": GRAD_KL, "case": "certain"}
)
BECOMES_IMPOSSIBLE = Case(
    test_rows.test_what_becomes_impossible_beside_a_larger_logit_leaves_nothing_of_a_reference_that_cannot_draw_it,
    {"dtype": torch.float64, "first": slice(0, 128)},
)
FAR = Case(test_rows_memory.test_rows_beyond_2_31_elements_are_found, {})
NAN = Case(test_rows_memory.test_a_nan_logit_shows_in_the_statistics_of_its_row, {"column": 300, "with_entropy": True})

TAIL = 'mask=column < V - first, other=float("-inf")'
LAST = (
    "in range({}):\n        first = (home + i * (full - home)) * BLOCK\n"
    f"        z = tl.load(start + first + column, {TAIL}).to(ACC)\n        {{}}"
)
SIGNS = [
    mutant("g with the other sign", equals(GRAD, "plain"), "minus_g = -tl.load(", "minus_g = tl.load("),
    mutant("g of the target with the other sign", equals(GRAD, "plain"), "grad_y = minus_g *", "grad_y = -minus_g *"),
    mutant("g_H with the other sign", equals(GRAD, "plain"), "minus_g_h = -tl.load(", "minus_g_h = tl.load("),
    mutant(
        "g_H of the target with the other sign", equals(GRAD, "plain"), "grad_y += minus_g_h", "grad_y -= minus_g_h",
    ),
    mutant("g_H without the entropy", equals(GRAD, "plain"), "inverse_sum * (h - ln_sum)", "inverse_sum * -ln_sum"),
    mutant("g_K with the other sign", equals(GRAD_KL, "plain"), "slope_k = g_k", "slope_k = -g_k"),
    mutant("g_K of the KL itself with the other sign", equals(GRAD_KL, "plain"), "constant -= tl", "constant += tl"),
    mutant(
        "g_K of the target with the other sign", equals(GRAD_KL, "plain"), "grad_y += tl.where(", "grad_y -= tl.where(",
    ),
]  # fmt: skip
TAILS = [
    mutant(
        "statistics read past the row", guarded_stats(STATS),
        f"z = tl.load(start + first + column, {TAIL}).to(ACC)\n        others",
        "z = tl.load(start + first + column).to(ACC)\n        others",
    ),
    mutant(
        "statistics read past the reference's row", guarded_stats(STATS_KL),
        f"    z = tl.load(ref_start + first + column, {TAIL})", "    z = tl.load(ref_start + first + column)",
    ),
    mutant(
        "statistics count what pads the tail", equals(STATS, "softcap"),
        "(place < V - first) & (place != target - first)", "place != target - first",
    ),
    mutant(
        "the gradient reads past the row", guarded_grad(GRAD),
        f"z = tl.load(start + first + column, {TAIL}).to(ACC)\n        if",
        "z = tl.load(start + first + column).to(ACC)\n        if",
    ),
    mutant(
        "the gradient reads past the reference's row", guarded_grad(GRAD_KL),
        f"ref_z = tl.load(ref_start + first + column, {TAIL})", "ref_z = tl.load(ref_start + first + column)",
    ),
    mutant(
        "the gradient is written past the row", guarded_grad(GRAD, in_place=True),
        "grad.to(out.dtype.element_ty), mask=column < V - first)", "grad.to(out.dtype.element_ty))",
    ),
    mutant(
        "the tail is left out where a whole block holds the target", PLACES,
        LAST.format("1 + ((home < full) & (full * BLOCK < V)).to(tl.int32)", "others"), LAST.format("1", "others"),
    ),
    mutant(
        "the gradient of a tail that holds the target is made twice", PLACES_GRAD,
        LAST.format("1 + ((home < full) & (full * BLOCK < V)).to(tl.int32)", "if"),
        LAST.format("1 + ((home <= full) & (full * BLOCK < V)).to(tl.int32)", "if"),
    ),
    mutant(
        "the target's block is counted twice and another not at all", PLACES,
        "block = i + (home <= i).to(tl.int32)\n        u", "block = i\n        u",
    ),
]  # fmt: skip
CERTAINTY = [
    mutant(
        "1 - p of the target's gradient cancels", CERTAIN, "minus_g * expm1(lp, TERMS)", "minus_g * (tl.exp(lp) - 1.0)",
    ),
    mutant("1 - p of the target's KL gradient cancels", LAST_PLACE, "-expm1(lp, TERMS) *", "(1.0 - tl.exp(lp)) *"),
    mutant(
        "ln of 1 + the others loses them", digits(STATS),
        "ln_sum = log1p(above_one, TERMS)", "ln_sum = tl.log(1.0 + above_one)",
    ),
    mutant(
        "ln of 1 + the reference's others loses them", digits(STATS_KL),
        "log1p(tl.where(ref_above_one < 0.0, 0.0, ref_above_one), TERMS)", "tl.log(1.0 + ref_above_one)",
    ),
    mutant("log1p loses small numbers", digits(STATS), "x < 0.5, 2.0 * r * series", "x < 0.0, 2.0 * r * series"),
    mutant(
        "the target's own term in the sums", digits(STATS_KL),
        " & (place != target - first)", "",
        "decay * s, 0) + expm1(d_y * LN2, TERMS)", "decay * s, 0) - 1.0",
    ),
]  # fmt: skip
RESCALING = [
    mutant(
        "entropy without the shift of a block", equals(STATS, "plain"),
        "t = decay * (t + shift * s) +", "t = decay * t +",
    ),
    mutant(
        "entropy without the shift of a lane", equals(STATS, "plain"),
        "tl.sum(decay * (t + shift * s), 0)", "tl.sum(decay * t, 0)",
    ),
    mutant("entropy without the target's own term", equals(STATS, "plain"), " + tl.exp2(d_y) * d_y", ""),
    mutant(
        "the maximum forgets earlier blocks", equals(STATS, "offset_up"),
        "m_new = tl.maximum(m, tl.max(u, 1))", "m_new = tl.max(u, 1)",
    ),
    mutant(
        "the maximum begins at 0", equals(STATS, "offset_down"),
        "tl.full((LANES,), LOWEST, ACC), u_y)", "tl.zeros((LANES,), ACC), u_y)",
    ),
    mutant(
        "the maximum is not subtracted", equals(STATS, "offset_up"),
        "d = (u - m_new[:, None]) * scale2\n    shift", "d = u * scale2\n    shift",
    ),
    mutant("sums are not rescaled", equals(STATS, "offset_down"), "return m_new, decay * s +", "return m_new, s +"),
    mutant(
        "lanes are not rescaled", equals(STATS, "plain"),
        "above_one = tl.sum(decay * s, 0) + expm1(d_y", "above_one = tl.sum(s, 0) + expm1(d_y",
    ),
]  # fmt: skip
SCALES = [
    mutant(
        "statistics without the temperature", equals(STATS, "scaled"),
        "scale2_high + scale2_low\n    if", "1.4426950408889634\n    if",
    ),
    mutant(
        "the gradient without the temperature", equals(GRAD, "scaled"),
        "scale = scale2 * LN2", "scale = scale2 * 0.0 + 1.0",
    ),
    mutant(
        "the temperature in fp32 alone", equals(STATS, "scaled", torch.float64),
        "scale2_high + scale2_low\n    if", "scale2_high\n    if",
    ),
    mutant(
        "statistics without row_scale", equals(STATS, "row_scale"),
        "scale2 = scale2 * tl.load(row_scale + row).to(ACC)", "scale2 = scale2",
    ),
    mutant(
        "the gradient's factor without row_scale", equals(GRAD, "row_scale"), "scale = scale * factor", "scale = scale",
    ),
    mutant(
        "the gradient's exponents without row_scale", equals(GRAD, "row_scale"),
        "scale2 = scale2 * factor", "scale2 = scale2",
    ),
    mutant(
        "no softcap of what is not the target", equals(STATS, "softcap"),
        "u = tl.where(others, squashed(z, squash, SQUASH)", "u = tl.where(others, z",
    ),
    mutant(
        "no softcap of the reference's target", equals(STATS_KL, "softcap"),
        'w_y = squashed(tl.load(ref_start + place_y, mask=target < V, other=float("nan")).to(ACC), squash, SQUASH)',
        'w_y = tl.load(ref_start + place_y, mask=target < V, other=float("nan")).to(ACC)',
    ),
    mutant("the softcap loses the sign", equals(STATS, "softcap"), "tl.where(z < 0.0, -size, size)", "size"),
    mutant(
        "no slope of the softcap in whole blocks", equals(GRAD, "softcap"),
        "grad * squash_slope(z, squash)\n        tl.store(out_start + block",
        "grad\n        tl.store(out_start + block",
    ),
    mutant(
        "no slope of the softcap in the last blocks", equals(GRAD, "softcap"),
        "grad * squash_slope(z, squash)\n        tl.store(out_start + first",
        "grad\n        tl.store(out_start + first",
    ),
]  # fmt: skip
INFINITIES = [
    mutant(
        "the maximum begins at -inf", equals(STATS, "dead_row"),
        "m = tl.maximum(tl.full((LANES,), LOWEST, ACC)", 'm = tl.maximum(tl.full((LANES,), float("-inf"), ACC)',
    ),
    mutant(
        "0 * -inf in the entropy of a block", equals(STATS, "masked_blocks"),
        "d = at_least(d, FLOOR)\n        shift", "d = d\n        shift",
    ),
    mutant(
        "0 * -inf in the entropy of the target", equals(STATS, "dead_row"), "d_y = at_least(d_y, FLOOR)", "d_y = d_y",
    ),
    mutant(
        "0 * -inf in the entropy of a lane", NEITHER,
        "shift = at_least((m - top) * scale2, FLOOR)", "shift = (m - top) * scale2",
    ),
    mutant(
        "0 * -inf in the gradient", equals(GRAD, "masked_vocab"),
        "d = at_least(d, FLOOR)\n        bracket", "d = d\n        bracket",
    ),
    mutant(
        "0 * -inf in the KL", equals(STATS_KL, "masked_alike"), "tl.where(e == 0.0, 0.0, e * (d - f))", "e * (d - f)",
    ),
    mutant(
        "0 * -inf in the KL's gradient", equals(GRAD_KL, "masked_alike"),
        "return tl.where(e == 0.0, 0.0, e * bracket)", "return e * bracket",
    ),
    mutant(
        "a row of nothing but -inf has less than nothing", equals(STATS, "dead_row"),
        "above_one = tl.where(above_one < 0.0, 0.0, above_one)", "above_one = above_one",
    ),
    mutant(
        "a row of nothing but -inf has a gradient", equals(GRAD, "dead_row"),
        "minus_g = tl.where(top > LOWEST, minus_g, 0.0)", "minus_g = minus_g",
    ),
    mutant(
        "what has no weight counts where it is infinite", equals(STATS_KL, "ref_masked"),
        "tl.where(s == 0.0, 0.0, gap + shift * s)", "gap + shift * s",
    ),
    mutant(
        "what loses its weight counts where it is infinite", BECOMES_IMPOSSIBLE,
        "tl.where(decay == 0.0, 0.0, decay * gap)", "decay * gap",
    ),
    mutant("a clamp swallows NaN", NAN, ", propagate_nan=tl.PropagateNan.ALL", ""),
]  # fmt: skip
ROWS = [
    mutant(
        "statistics find rows in 32 bits", FAR,
        "tl.cast(row, tl.int64) * stride * ALIGN\n    if", "tl.cast(row, tl.int32) * stride * ALIGN\n    if",
    ),
    mutant(
        "the reference's rows in 32 bits", FAR,
        "tl.cast(row, tl.int64) * ref_stride * REF_ALIGN\n        w_y",
        "tl.cast(row, tl.int32) * ref_stride * REF_ALIGN\n        w_y",
    ),
    mutant(
        "the gradient reads rows in 32 bits", FAR,
        "tl.cast(row, tl.int64) * stride * ALIGN\n    out", "tl.cast(row, tl.int32) * stride * ALIGN\n    out",
    ),
    mutant(
        "the gradient writes rows in 32 bits", FAR,
        "tl.cast(row, tl.int64) * out_stride", "tl.cast(row, tl.int32) * out_stride",
    ),
    mutant("statistics with a wrong alignment", guarded_stats(STATS), "* stride * ALIGN\n    if", "* stride\n    if"),
    mutant(
        "the reference with a wrong alignment", guarded_stats(STATS_KL), "* REF_ALIGN\n        w_y", "\n        w_y",
    ),
    mutant("the gradient with a wrong alignment", guarded_grad(GRAD), "* stride * ALIGN\n    out", "* stride\n    out"),
    mutant(
        "the gradient's result with a wrong alignment", guarded_grad(GRAD), "* out_stride * OUT_ALIGN", "* out_stride",
    ),
    mutant(
        "a persistent program stops after a row of statistics", equals(STATS, "plain", tile=PERSISTENT),
        "rows, tl.num_programs(0)):\n            stats_of_row", "tl.num_programs(0)):\n            stats_of_row",
    ),
    mutant(
        "a persistent program stops after a row of the gradient", equals(GRAD, "plain", tile=PERSISTENT),
        "rows, tl.num_programs(0)):\n            grad_of_row", "tl.num_programs(0)):\n            grad_of_row",
    ),
    mutant(
        "a target out of range has a log-probability", out_of_range(517),
        'z_y = tl.load(start + place_y, mask=target < V, other=float("nan"))',
        "z_y = tl.load(start + place_y, mask=target < V, other=0.0)",
    ),
    mutant("a negative target is in range", out_of_range(-100), "(target >= 0) & (target < V)", "target < V"),
    mutant(
        "a target of 64 bits wraps around", out_of_range(2**33),
        "tl.where(inside, target, V).to(tl.int32)", "target.to(tl.int32)",
    ),
]  # fmt: skip
KL = [
    mutant("the reference's sum is not rescaled", equals(STATS_KL, "plain"), "tl.exp2(ref_shift) * r + tl", "r + tl"),
    mutant(
        "the reference's lanes are not rescaled", equals(STATS_KL, "plain"),
        "tl.sum(tl.exp2(ref_shift) * r, 0)", "tl.sum(r, 0)",
    ),
    mutant(
        "the reference's maximum begins at 0", equals(STATS_KL, "ref_offset"),
        "tl.full((LANES,), LOWEST, ACC), w_y)", "tl.zeros((LANES,), ACC), w_y)",
    ),
    mutant(
        "the KL without the reference's shift of a block", equals(STATS_KL, "plain"),
        "gap = carried(gap, shift - ref_shift, s, tl", "gap = carried(gap, shift, s, tl",
    ),
    mutant(
        "the KL without the reference's shift of a lane", equals(STATS_KL, "plain"),
        "carried(gap, shift - ref_shift, s, decay)", "carried(gap, shift, s, decay)",
    ),
    mutant(
        "the KL without the target", equals(STATS_KL, "plain"),
        "tl.store(kl + row, of_others + tl.where(p_y == 0.0, 0.0, p_y * (lp - ref_lp)))",
        "tl.store(kl + row, of_others)",
    ),
    mutant(
        "the others' part of the KL includes the target", equals(STATS_KL, "plain"),
        "tl.store(kl_others + row, of_others)", "tl.store(kl_others + row, of_others + p_y * (lp - ref_lp))",
    ),
    mutant("the target's KL gradient from the whole KL", LAST_PLACE, "tl.load(kl_others + row)", "tl.load(kl + row)"),
    mutant(
        "the KL's gradient without the reference's sum", equals(GRAD_KL, "plain"),
        "ln_sum - tl.load(ref_log_sum + row).to(ACC)", "ln_sum",
    ),
]  # fmt: skip
MUTANTS = [*SIGNS, *TAILS, *CERTAINTY, *RESCALING, *SCALES, *INFINITIES, *ROWS, *KL]
