"""Faults of hwgrpo/observe."""

from tests.planted_faults.fault import Fault

FAULTS = (
    Fault(
        "dropped groups not recorded",
        "observe/completions.py",
        "        for record in dropped:",
        "        for record in ():",
        "training/test_late_groups.py -k recorded",
    ),
    Fault(
        "metrics called for a step without responses",
        "observe/custom_metrics.py",
        "        if len(completions) == 0:",
        "        if False:",
        "training/test_late_groups.py -k not_called",
    ),
)
