"""Faults of hwgrpo/data."""

from tests.planted_faults.fault import Fault

FAULTS = (
    Fault(
        "a resumed order of the first epoch",
        "data/sampler.py",
        'state["position"]\n        self._order = self._permutation(self.epoch)',
        'state["position"]',
        "data/test_sampler.py",
    ),
)
