"""A reward that nothing earns."""


def nothing(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0
