"""Faults of hwgrpo/observe."""

from tests.planted_faults.fault import Fault

FAULTS = (
    Fault(
        "dropped groups not recorded",
        "observe/completions.py",
        "    for record in dropped:",
        "    for record in ():",
        "training/test_late_groups.py -k recorded",
    ),
    Fault(
        "metrics called for a step without responses",
        "observe/custom_metrics.py",
        "        if len(completions) == 0:",
        "        if False:",
        "training/test_late_groups.py -k not_called",
    ),
    Fault(
        "equal groups warned of under an estimator that does not compare within the group",
        "observe/detectors.py",
        "if config.rollout.n == 1 or config.algorithm.advantage.name in ADVANTAGES_OF_SINGLE_RESPONSES:",
        "if config.rollout.n == 1:",
        "observe/test_detectors.py -k compare_within",
    ),
)
