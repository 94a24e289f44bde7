"""What is used of vLLM, vllm-ascend and SGLang is there: read from their sources, which needs no device."""

import subprocess
from pathlib import Path

import pytest

from tests.vllm import rollout_uses, vllm_environment
from tests.vllm.rollout_uses import ASCEND, IMAGES, IN_PROCESS, PLUGIN, SGLANG, Use


def problems(root: Path, uses: tuple[Use, ...]) -> list[str]:
    return [problem for problem in (rollout_uses.problem(root, use) for use in uses) if problem]


@pytest.mark.slow
def test_vllm_beside_the_trainer_has_all_that_the_engines_use():
    command = [vllm_environment.vllm_python(), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    there = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert problems(Path(there), PLUGIN + IN_PROCESS + IMAGES) == []


@pytest.mark.slow
@pytest.mark.parametrize(("package", "uses"), [("vllm", PLUGIN), ("vllm-ascend", ASCEND), ("sglang", SGLANG)])
def test_a_server_has_all_that_its_engine_uses(package: str, uses: tuple[Use, ...]):
    assert problems(rollout_uses.sources(package, rollout_uses.VERSIONS[package]), uses) == []


SOURCE = """
class Engine(Base):
    field: int = 0
    def __init__(self):
        self.kept = 1
    async def call(self, method, args=()): ...
"""


@pytest.mark.parametrize(
    "use, told",
    [
        (Use("engine.py", "Engine.field"), None),
        (Use("engine.py", "Engine.kept"), None),
        (Use("engine.py", "Engine.call", ("method", "args")), None),
        (Use("engine.py", "Engine = Base"), None),
        (Use("engine.py", "Engine.call", ("timeout",)), "engine.py: Engine.call does not take timeout"),
        (Use("engine.py", "Engine.gone"), "engine.py: Engine has no gone"),
        (Use("engine.py", "Motor.call"), "engine.py has no class Motor"),
        (Use("engine.py", "Engine = Other"), "engine.py: Engine does not inherit from Other"),
        (Use("motor.py", "Motor.call"), "there is no motor.py"),
        (Use("engine.py", '"self.kept = 1"'), None),
        (Use("engine.py", '"self.kept = 2"'), 'engine.py does not say "self.kept = 2"'),
    ],
    ids=lambda value: value.name if isinstance(value, Use) else "",
)
def test_what_is_missing_is_told(tmp_path: Path, use: Use, told: str | None):
    (tmp_path / "engine.py").write_text(SOURCE)
    assert rollout_uses.problem(tmp_path, use) == told
