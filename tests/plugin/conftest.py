"""These tests install the plug-in of tests/acme_plugin as its users would, and find it as they would."""

from pathlib import Path

import pytest

from tests.support.devices import acme, simulated_device


@pytest.fixture(scope="session", autouse=True)
def _no_choice():
    """Nothing but what is installed decides on the backend."""
    with pytest.MonkeyPatch.context() as patch:
        for name in simulated_device.CHOICES:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the plug-in is installed in."""
    return acme.install(tmp_path_factory.mktemp("acme"))


@pytest.fixture(scope="session")
def host(site: Path) -> list[Path]:
    """The folders of a host that has the plug-in and its device."""
    return [site, acme.device()]
