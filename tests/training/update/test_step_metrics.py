"""What a step's metrics are means over."""

from hwgrpo.training.update.step_metrics import update_metrics


def test_metrics_of_ones_own_loss_are_means_over_the_tokens_that_it_saw():
    sums = {"loss": 3.0, "tokens": 10.0, "trained": 5.0, "fade": 2.5, "pg_loss": 2.5, "ratio": 5.0}
    metrics = update_metrics(sums, norms=[1.0], lr=1e-3)
    assert metrics["actor/fade"] == 0.5
    assert metrics["actor/ratio_mean"] == 1.0
    assert metrics["actor/pg_loss"] == 0.25, "it is 0 for the others"
