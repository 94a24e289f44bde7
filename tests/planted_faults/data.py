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
    Fault(
        "a prompt never comes back",
        "data/difficulty.py",
        "self._aside.discard(row)",
        "pass",
        "data/test_difficulty.py",
    ),
    Fault(
        "what is set aside is not in checkpoints",
        "data/difficulty.py",
        '"set_aside": sorted(self._aside)',
        '"set_aside": []',
        "data/test_difficulty.py -k restored",
    ),
)
