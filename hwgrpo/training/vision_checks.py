"""Which settings a vision-language model takes, and which are for one."""

from __future__ import annotations

from typing import Any

from hwgrpo.catalog import ENGINES
from hwgrpo.config import Config
from hwgrpo.errors import ConfigError
from hwgrpo.models.placeholders import reads_images
from hwgrpo.models.vision import unsupported_reason
from hwgrpo.rollout.engine_kind import EngineKind, engine_kind


def check_vision(config: Config, settings: Any) -> None:
    """Check that a run's settings fit a model that reads images, or one of text alone.

    Args:
        config: the run's settings.
        settings: the model's transformers configuration.

    Raises:
        ConfigError: they do not.
    """
    model, t, kind = config.model, config.trainer, settings.model_type
    trained = {"model.train_vision": model.train_vision, "model.lora.vision": model.lora.vision}
    if not reads_images(settings):
        for key, value in trained.items():
            if value != "none":
                raise ConfigError(f"{key}={value!r}: {model.path} ({kind}) reads text alone; leave it out")
        return
    name = f"model.path={model.path!r} reads images ({kind})"
    reason = unsupported_reason(settings)
    if reason is not None:
        raise ConfigError(f"{name}, and is not supported: {reason}")
    check_engine_reads_images(config, settings)
    for key, value in (
        ("trainer.sequence_parallel_size", t.sequence_parallel_size),
        ("trainer.tensor_parallel_size", t.tensor_parallel_size),
    ):
        if value > 1:
            raise ConfigError(
                f"{key}={value}: {name}, and images are not split over ranks that share a sequence; leave it out"
            )
    if t.strategy == "deepspeed" and t.deepspeed.stage == 3:
        raise ConfigError(
            f"trainer.deepspeed.stage=3: {name}, and ranks that encode different numbers of images would wait for each "
            "other; use stage 2, or trainer.strategy=fsdp2"
        )
    if t.capture_steps:
        raise ConfigError(f"trainer.capture_steps={t.capture_steps}: {name}, and images are not captured; leave it out")
    if config.optim.name == "muon" and config.optim.vision_lr is not None:
        raise ConfigError(
            f"optim.vision_lr={config.optim.vision_lr:g} with optim.name='muon', which has one learning rate; leave it "
            "out, or use optim.name=adamw"
        )


def check_engine_reads_images(config: Config, settings: Any) -> None:
    """Raise `ConfigError` where a model reads images, and the rollout engine takes no prompts with images for it."""
    if not reads_images(settings) or _shows_images(engine_kind(config.rollout), settings):
        return
    engines = {name: ENGINES.load(name) for name in ENGINES.names() if name != "auto"}
    able = [name for name, each in engines.items() if isinstance(each, EngineKind) and _shows_images(each, settings)]
    raise ConfigError(
        f"model.path={config.model.path!r} reads images ({settings.model_type}), which rollout.engine="
        f"{config.rollout.engine!r} does not take; use rollout.engine={' or '.join(able)}"
    )


def _shows_images(kind: EngineKind, settings: Any) -> bool:
    return kind.image_models is None or settings.model_type in kind.image_models
