"""Faults of hwgrpo/algorithms."""

from tests.planted_faults.fault import Fault

FAULTS = (
    Fault(
        "ppo without a bound",
        "algorithms/surrogates.py",
        "torch.maximum(unclipped",
        "torch.minimum(unclipped",
        "algorithms",
    ),
    Fault(
        "ppo's bounds exchanged",
        "algorithms/surrogates.py",
        "ratio.clamp(1 - config.clip_low, 1 + config.clip_high)",
        "ratio.clamp(1 - config.clip_high, 1 + config.clip_low)",
        "algorithms",
    ),
    Fault(
        "k3 with the other sign",
        "algorithms/kl.py",
        "x = ref_logprob_N - logprob_N",
        "x = logprob_N - ref_logprob_N",
        "algorithms",
    ),
    Fault("k3+ with the other gradient", "algorithms/kl.py", "+ slope_N *", "- slope_N *", "algorithms"),
    Fault("population std", "algorithms/groups.py", "(self.size_G - correction)", "self.size_G", "algorithms"),
    Fault(
        "invalid samples count", "algorithms/groups.py", "self.valid_S & (self.signal_G", "(self.signal_G", "algorithms"
    ),
    Fault(
        "token means by the mean length",
        "algorithms/aggregation.py",
        "lengths_S.clamp(min=1)",
        "lengths_S.mean().clamp(min=1)",
        "algorithms",
    ),
    Fault(
        "a mask that keeps large weights",
        "algorithms/correction.py",
        "weight_N == _truncate",
        "weight_N >= _truncate",
        "algorithms",
    ),
    Fault(
        "a level raised by one step with a gap",
        "algorithms/gap_guard.py",
        "if state.above >= RAISE_AFTER:",
        "if state.above >= 1:",
        "algorithms/test_gap_guard.py",
    ),
    Fault(
        "a level raised by steps with a gap that are not in a row",
        "algorithms/gap_guard.py",
        "state.above + 1 if is_bad else 0",
        "state.above + is_bad",
        "algorithms/test_gap_guard.py",
    ),
    Fault(
        "a level lowered just within the threshold of the gap",
        "algorithms/gap_guard.py",
        ".severity, LOWER_SHARE)",
        ".severity)",
        "algorithms/test_gap_guard.py",
    ),
    Fault(
        "a gap that is not a number is none",
        "algorithms/gap_guard.py",
        "if not abs(value - each.equal) <= limit * share:",
        "if abs(value - each.equal) > limit * share:",
        "algorithms/test_gap_guard.py",
    ),
    Fault(
        "a configured correction of the gap weakened",
        "algorithms/gap_guard.py",
        'if correction.name == "none" else (correction.low, correction.high)',
        "if True else (correction.low, correction.high)",
        "algorithms/test_gap_guard.py",
    ),
    Fault(
        "a mask of the gap withdrawn by the bound of staleness",
        "algorithms/gap_guard.py",
        "return (corrections or [None])[-1]",
        "return steps[level - 1].correction if level else None",
        "algorithms/test_gap_guard.py",
    ),
    Fault(
        "a growing gap taken for another temperature",
        "algorithms/gap_causes.py",
        "if now < GROWTH * first.k3_kl:",
        "if True:",
        "algorithms/test_gap_causes.py",
    ),
    Fault(
        "a gap along any line taken for another temperature",
        "algorithms/gap_causes.py",
        "median(gap.r2 for gap in gaps) >= LINE_R2 and",
        "",
        "algorithms/test_gap_causes.py",
    ),
    Fault(
        "a jump of the gap taken for growth",
        "algorithms/gap_causes.py",
        "if jump is not None:",
        "if False:",
        "algorithms/test_gap_causes.py",
    ),
    Fault(
        "the slope of the gap with the other sign",
        "algorithms/correction.py",
        "return cov / var_x,",
        "return -cov / var_x,",
        "algorithms/test_correction.py",
    ),
)
