"""The fp64 step of a model, seed and precision is computed once: what tests change is the device's side."""

from pathlib import Path

import pytest

from hwgrpo.parity import comparison


@pytest.fixture(autouse=True)
def _golden_once(monkeypatch: pytest.MonkeyPatch):
    compute = comparison.golden_of

    def golden_of(config, step, precision):
        adapter = config.model.lora.adapter
        weights = adapter and (Path(adapter) / "adapter_model.safetensors").read_bytes()
        key = (config.model.path, config.trainer.seed, config.algorithm.entropy_coef, precision, weights)
        if key not in COMPUTED:
            COMPUTED[key] = compute(config, step, precision)
        return COMPUTED[key]

    monkeypatch.setattr(comparison, "golden_of", golden_of)


COMPUTED: dict = {}
