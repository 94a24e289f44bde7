"""Faults of hwgrpo/rewards."""

from tests.planted_faults.fault import Fault

FAULTS = (
    Fault(
        "a reward that is no plain number believed to be one",
        "rewards/failure_policy.py",
        "if type(result) is float",
        "if isinstance(result, object)",
        "rewards/test_combine.py",
    ),
    Fault(
        "the other groups dropped",
        "rewards/failure_policy.py",
        "prompt_index != self.completions",
        "prompt_index == self.completions",
        "rewards/test_combine.py",
    ),
    Fault(
        "rewards called for a step without responses",
        "rewards/failure_policy.py",
        "        if size == 0:",
        "        if False:",
        "training/test_late_groups.py -k not_called",
    ),
)
