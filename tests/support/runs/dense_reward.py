"""A reward in verl's signature that a barely trained model earns some of: every update then has a gradient."""


def share_right(data_source, solution_str, ground_truth, extra_info=None):
    right = sum(a == b for a, b in zip(solution_str, ground_truth, strict=False)) / len(ground_truth)
    return right - 0.05 * abs(len(solution_str) - len(ground_truth))
