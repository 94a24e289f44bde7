"""Random sets of overrides: each makes a run that can be planned, or is refused with a key and a remedy."""

from pathlib import Path

import pytest

from tests.config.settings_fuzz import attempt, draw, lacks


@pytest.mark.parametrize("first", range(0, 150, 50))
def test_any_set_of_overrides_is_planned_or_refused_with_key_and_remedy(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    planned = 0
    for seed in range(first, first + 50):
        overrides = draw(seed)
        message = attempt(overrides, tmp_path / "run")
        planned += message is None
        assert message is None or not lacks(message, overrides), (seed, overrides, message)
    assert 2 < planned < 40
