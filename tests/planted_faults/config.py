"""Faults of hwgrpo/config."""

from tests.planted_faults.fault import Fault

FAULTS = (
    Fault(
        "a deadline longer than a hang",
        "config/rollout_rules.py",
        "2 * r.group_timeout >= hung",
        "r.group_timeout >= hung",
        "rollout/test_deadlines.py -k refused",
    ),
)
