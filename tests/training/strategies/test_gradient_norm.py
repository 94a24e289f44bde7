"""The norm of gradients, by which they are clipped and which a run logs."""

import torch

from hwgrpo.training.strategies.optimizer import clip_by_norm, clip_shards_by_norm


def test_the_norm_of_a_large_matrix_is_right_on_a_cpu():
    """Running sums of n squares lose up to n eps / 2: of this matrix as a whole, more than 1e-4 of its norm."""
    values = torch.full((2048, 2048), 0.3)
    right = float(values.double().square().sum().sqrt())
    norms = [clip_by_norm([values.clone()], 0.0), clip_shards_by_norm([values.clone()], 0.0, lambda sums: [*sums])]
    for norm in norms:
        assert abs(float(norm) / right - 1) < 1e-4
    clipped = torch.full((2048, 1024), 0.3).t()  # not in the order of its memory
    clip_by_norm([clipped, clipped.clone(), torch.empty(0, 3)], right / 2)
    assert abs(float(clipped.double().norm()) / right - 0.5 / 2**0.5) < 1e-4
