"""The built-in models are made once for all tests here."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _model_cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HWGRPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
