"""Settings of an engine of one's own are the keyword-only arguments of its factory."""

from typing import Annotated, Any, Literal

import pytest

from hwgrpo.catalog import ENGINES
from hwgrpo.config.fields import Limits
from hwgrpo.errors import ConfigError
from hwgrpo.rollout.engine_kind import EngineKind, check_engine
from hwgrpo.rollout.local.engine import local_engine
from hwgrpo.training.loop import train
from tests.support.runs import runs


class Settled:
    """The local engine with two settings."""

    def __init__(
        self, parts: Any, *, ratio: Annotated[float, Limits(above=0)] = 0.5, mode: Literal["fast", "exact"] = "fast"
    ) -> None:
        self.engine, self.settings = local_engine(parts), (ratio, mode)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ENGINES._entries, "settled", EngineKind(maker=Settled, samples_with_policy=True))


def test_they_reach_the_engine(tmp_path):
    words = ("rollout.engine=settled", "rollout.engine_kwargs={ratio: 0.25, mode: exact}", "trainer.max_steps=1")
    run = runs.build_run(runs.small(tmp_path, *words), runs.BACKEND, 0, 1)
    assert run.engine.settings == (0.25, "exact")
    assert train(run) == "completed"
    run.close()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ("{ratio: 0}", "rollout.engine_kwargs.ratio=0 is out of range; allowed: above 0"),
        ("{mode: slow}", "rollout.engine_kwargs.mode='slow' is out of range; allowed: fast or exact"),
        ("{rate: 1}", "rollout.engine_kwargs={'rate': 1}: Settled.*got an unexpected keyword argument 'rate'"),
    ],
)
def test_wrong_ones_are_named_before_the_model_loads(kwargs, message, tmp_path):
    config = runs.small(tmp_path, "rollout.engine=settled", f"rollout.engine_kwargs={kwargs}")
    with pytest.raises(ConfigError, match=message):
        check_engine(config)
