"""vLLM in the training process.

engine.py            one engine per rank on the rank's own device, or one of several ranks by tensor parallelism
timed_generation.py  generation with deadlines of groups
installed_vllm.py    which vLLM an environment has; it runs vllm_probe.py there
vllm_settings.py     the run's settings -> vLLM's arguments, for an engine here and for a server
vllm_requests.py     a request -> vLLM's sampling parameters and images, for both
"""

from hwgrpo.config import Config
from hwgrpo.config.adapter_settings import refuse_dora
from hwgrpo.errors import ConfigError
from hwgrpo.rollout.engine_kind import EngineKind
from hwgrpo.rollout.vllm.installed_vllm import DISTRIBUTIONS

IMAGE_MODELS = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
"""Model types with which vLLM has been compared on prompts with images."""


HIGHEST_TEMPERATURE = 2.0
"""What vLLM takes (0.32)."""


def refuse_unserved(config: Config) -> None:
    """Raise ConfigError for adapters and temperatures that vLLM does not serve."""
    engine = f"rollout.engine={config.rollout.engine!r}"
    refuse_dora(config.model.lora, engine, "vLLM serves no DoRA adapters")
    if config.model.lora.vision != "none":
        raise ConfigError(
            f"model.lora.vision={config.model.lora.vision!r} with {engine}: vLLM serves adapters of the text model; "
            "leave it out, or use rollout.engine=local"
        )
    rollout = config.rollout
    temperatures = {
        "rollout.temperature": rollout.temperature,
        "rollout.final_temperature": rollout.final_temperature,
        "trainer.validation_sampling.temperature": config.trainer.validation_sampling.temperature,
    }
    for key, value in temperatures.items():
        if value is not None and value > HIGHEST_TEMPERATURE:
            raise ConfigError(
                f"{key}={value:g} with {engine}: vLLM takes temperatures up to {HIGHEST_TEMPERATURE:g}; lower it, or "
                "use rollout.engine=local"
            )


def _refuse(config: Config) -> None:
    refuse_unserved(config)
    size, staleness = config.rollout.tensor_parallel_size, config.rollout.max_staleness
    if size > 1 and staleness:
        raise ConfigError(
            f"rollout.tensor_parallel_size={size} with rollout.engine='vllm' and rollout.max_staleness={staleness}: "
            "the engine and the update would communicate at the same time; use rollout.engine=vllm_server"
        )
    timeout = config.rollout.group_timeout
    if size > 1 and timeout is not None:
        raise ConfigError(
            f"rollout.tensor_parallel_size={size} with rollout.engine='vllm' and rollout.group_timeout={timeout:g}: "
            "the ranks of an engine have clocks of their own; use rollout.engine=vllm_server"
        )


VLLM = EngineKind(
    maker="hwgrpo.rollout.vllm.engine:VllmEngine",
    refuse=_refuse,
    check_host="hwgrpo.rollout.vllm.engine:check_installed",
    ask_environment="hwgrpo.rollout.vllm.engine:ask_environment",
    runs_vllm=True,
    image_models=IMAGE_MODELS,
    packages=DISTRIBUTIONS,
)
