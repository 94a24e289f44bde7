"""Rewards of single digits of an answer, in verl's signature, and steps of one character each."""


def characters(text: str) -> list[int]:
    """Return the ends of steps: every character is one."""
    return [*range(1, len(text) + 1)]


def digits(data_source, solution_str, ground_truth, extra_info=None) -> list[float]:
    """Pay for each right digit at its place; the last step pays for those that are missing."""
    rewards = [float(i < len(ground_truth) and c == ground_truth[i]) for i, c in enumerate(solution_str)] or [0.0]
    rewards[-1] -= max(0, len(ground_truth) - len(solution_str))
    return rewards


def sum_of_digits(data_source, solution_str, ground_truth, extra_info=None) -> float:
    """Pay the sum of the steps at the end."""
    return sum(digits(data_source, solution_str, ground_truth))


def all_digits(data_source, solution_str, ground_truth, extra_info=None) -> float:
    """Pay for an answer without a mistake."""
    return float(solution_str == ground_truth)
