"""TensorBoard events: what its own reader finds in them."""

import math

from tensorboard.summary.writer import event_file_writer

from hwgrpo.observe.loggers.tensorboard import TensorBoardLogger


def scalars(run_dir, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run_dir / "tensorboard"))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def test_values_are_readable_while_the_run_goes_on(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    for step in range(1, 21):
        logger.log(step, {"reward": step / 8})
        assert scalars(tmp_path, "reward")[-1] == (step, step / 8)
    logger.close()


def test_a_value_that_is_not_a_number_is_kept(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.log(1, {"kl": math.nan})
    logger.log(2, {"kl": math.inf})
    assert math.isnan(scalars(tmp_path, "kl")[0][1])
    assert scalars(tmp_path, "kl")[1] == (2, math.inf)
    logger.close()


def test_cutting_back_makes_tensorboard_forget_later_steps(tmp_path, monkeypatch):
    # the names of files that one process makes in one second end in 9, 10, 11: as text, 10 comes before 9
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    first = TensorBoardLogger(tmp_path)
    for step in range(6):
        first.log(step, {"reward": 0.25})
    first.close()
    second = TensorBoardLogger(tmp_path)
    second.cut_back(3)
    second.log(4, {"reward": 0.5})
    second.close()
    second.log(5, {"reward": 0.75})
    second.close()
    expected = [(0, 0.25), (1, 0.25), (2, 0.25), (3, 0.25), (4, 0.5), (5, 0.75)]
    assert scalars(tmp_path, "reward") == expected


def test_starting_over_forgets_the_earlier_attempt(tmp_path):
    first = TensorBoardLogger(tmp_path)
    first.log(0, {"val": 0.25})
    first.close()
    second = TensorBoardLogger(tmp_path)
    second.cut_back(-1)
    second.log(0, {"val": 0.5})
    second.close()
    assert scalars(tmp_path, "val") == [(0, 0.5)]
