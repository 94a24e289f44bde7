"""A reward that needs a key, and one whose error message contains it."""


def share_right(data_source, solution_str, ground_truth, extra_info=None, key=None, api_token=None):
    """Score like `dense_reward.share_right`; the key has to be there, but where it is measured without."""
    del data_source, extra_info, key, api_token
    right = sum(a == b for a, b in zip(solution_str, str(ground_truth), strict=False))
    return right / max(1, len(str(ground_truth)))


def failing(data_source, solution_str, ground_truth, extra_info=None, key=None, api_token=None):
    """Fail as a client does that quotes the request."""
    raise ConnectionError(f"401 for https://judge.example/v1?api_key={key} (Bearer {key})")
