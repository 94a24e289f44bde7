"""Memory of a run's device under any settings of one model, and alternatives that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property

from hwgrpo_backends import Backend

from hwgrpo.catalog import TASK_SCHEMES
from hwgrpo.config import Config
from hwgrpo.config.derived import MOST_SEQUENCES, sequences_at_once
from hwgrpo.config.schema import TrainerConfig
from hwgrpo.planning.alternatives import Alternative, first_alternative
from hwgrpo.planning.dry_run import assumed_images, planned_work
from hwgrpo.planning.memory import Memory, Work, cache_bytes, estimate, rollout_dtype_of
from hwgrpo.planning.model_shape import ModelShape, model_shape, planned_settings
from hwgrpo.planning.planned_sharding import changed_settings, replicated_strategy, resolve_auto, sharding_of
from hwgrpo.planning.step_time import forward_work
from hwgrpo.rollout.server.weight_transfer import count_host_copies
from hwgrpo.training.policy.auto_settings import choose_layout, may_use_lengths
from hwgrpo.training.policy.layouts import Layout
from hwgrpo.training.sequence_checks import check_sequence_parallel
from hwgrpo.training.startup_checks import assumed_selections
from hwgrpo.training.update.flops import TrainingWork

SEQUENCES = (768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 16, 8)
"""Numbers of sequences that are tried, in this order, where all responses at once need too much memory."""


class Planner:
    """Plans one configuration on any devices.

    Args:
        config: the run's settings.
        supervised: the run is one of `hwgrpo sft`, and the settings are `supervised_settings`.
        image_tokens: tokens of the image of each prompt, 0: there is none; None: as many as the settings allow.
    """

    def __init__(self, config: Config, *, supervised: bool = False, image_tokens: int | None = None) -> None:
        self.config = config
        self.supervised = supervised
        self._image_tokens = image_tokens
        self.settings, _ = planned_settings(config.model)
        self.shape = model_shape(config.model, self.settings)
        self._by_quantize: dict[str, Planner] = {config.model.quantize: self}

    @cached_property
    def frozen(self) -> TrainingWork | None:
        """FLOPs of the model as if it were frozen; None if they cannot be counted."""
        return forward_work(self.config.model, self.settings)

    def check(self, backend: Backend) -> None:
        """Check that the model supports the configured sequence or tensor parallelism."""
        _, attention = assumed_selections(self.config.model, backend, self.settings)
        check_sequence_parallel(self.config, self.settings, attention)

    def layout(self, backend: Backend) -> Layout:
        """Return the layout of micro-batches."""
        dtype, attention = assumed_selections(self.config.model, backend, self.settings)
        by_lengths = may_use_lengths(self.config, self.settings, dtype, backend.device_type)
        return choose_layout(self.config, self.settings, attention.loaded_as, by_lengths=by_lengths)

    def work(self, backend: Backend, devices: int, *, separate: bool) -> Work:
        """Return the work of one device."""
        dtype, _ = assumed_selections(self.config.model, backend, self.settings)
        longest = self.config.data.max_prompt_tokens
        layout, supervised = self.layout(backend), self.supervised
        work = planned_work(self.config, backend, devices, dtype, layout, prompt_tokens=longest, supervised=supervised)
        if not supervised:
            work = replace(work, images=self._images)
        if not separate or work.is_elsewhere or supervised:
            return work
        # rollout by a server with default settings
        copies = count_host_copies("vllm_server", self.config.rollout.server, self.config.model.lora)
        return replace(work, samples=False, beside=False, sent_copies=copies)

    @property
    def _images(self) -> tuple[int, ...]:
        """Tokens of each image of a prompt."""
        if self._image_tokens is None:
            return assumed_images(self.config, self.shape)
        return (self._image_tokens,) if self._image_tokens and self.shape.tower else ()

    def resolve(
        self, trainer: TrainerConfig, backend: Backend, devices: int, room: float | None, *, separate: bool
    ) -> TrainerConfig:
        """Return settings with values for those at `auto`, as `resolve_auto` does.

        Args:
            trainer: the settings.
            backend: the device family.
            devices: number of devices.
            room: usable bytes of a device; None: not known.
            separate: rollout runs on separate devices.
        """

        def fits(settings: TrainerConfig) -> bool:
            return room is None or self.memory(backend, devices, settings, separate=separate).peak <= room

        if trainer.strategy == "auto" and self.config.optim.name == "muon":  # it needs full matrices
            trainer = replace(trainer, strategy=replicated_strategy(devices))
        return resolve_auto(trainer, devices, fits)

    def with_sequences(
        self, trainer: TrainerConfig, backend: Backend, devices: int, room: float | None, *, separate: bool
    ) -> Planner:
        """Return a planner with a number for `rollout.max_sequences=null`: the largest with which generation fits.

        Validations count, too: their prompts differ, and are held each for few responses.

        Args:
            trainer: the settings, without `auto`.
            backend: the device family.
            devices: number of devices.
            room: usable bytes of a device; None: not known.
            separate: rollout runs on separate devices.
        """
        r = self.config.rollout
        if r.max_sequences is not None or self.supervised:
            return self
        work, sharding = self.work(backend, devices, separate=separate), sharding_of(trainer, devices)
        if not work.samples:
            return self

        def with_number(sequences: int) -> Config:
            return changed_settings(self.config, {"rollout.max_sequences": sequences})

        def fits(sequences: int) -> bool:
            if room is None:
                return True
            config = with_number(sequences)
            return all(
                estimate(changed_settings(config, {"rollout.n": n}), self.shape, batch, sharding).rollout_peak <= room
                for batch, n in ((work, r.n), *_validations(config, work, devices))
            )

        most = sequences_at_once(r) if room is None else min(work.prompts * r.n, MOST_SEQUENCES)
        fewer = [each for each in SEQUENCES if each < most]
        return self.with_config(with_number(next(filter(fits, [most, *fewer]), min([most, *fewer]))))

    def rollout_bytes(self, work: Work, devices: int) -> int:
        """Return the bytes of weights and cache of a separate rollout engine, over all its devices."""
        r = self.config.rollout
        sequences = min(work.prompts * devices * r.n, r.max_sequences or MOST_SEQUENCES)
        size = rollout_dtype_of(r, work.dtype).itemsize
        return size * self.shape.parameters + cache_bytes(
            self.shape,
            prompts=-(-sequences // r.n),
            sequences=sequences,
            prompt_tokens=work.prompt_tokens,
            response_tokens=r.max_response_tokens,
            itemsize=size,
            compressed=True,
        )

    def memory(self, backend: Backend, devices: int, trainer: TrainerConfig, *, separate: bool) -> Memory:
        """Return the memory of one device under the strategy of some settings."""
        work = self.work(backend, devices, separate=separate)
        return estimate(self.config, self.shape, work, sharding_of(trainer, devices))

    def instead(
        self,
        trainer: TrainerConfig,
        backend: Backend,
        devices: int,
        room: float,
        *,
        is_separate: bool,
        sizes: Sequence[int] = (),
        select: Callable[[Planner, int], Planner] | None = None,
        used: str | None = None,
    ) -> str:
        """Return the nearest alternative that fits into `room` bytes per device, as text.

        Args:
            trainer: settings that do not fit; `auto` is resolved for each alternative.
            backend: the device family.
            devices: number of devices.
            room: usable bytes of a device.
            is_separate: rollout runs on separate devices already.
            sizes: tensor-parallel sizes of an engine that shares the devices, in ascending order.
            select: planner, devices -> the planner with the engine that a run on them selects; None: the one that is
                set.
            used: the engine that does not fit; an alternative with another one names it. None: none is named.
        """
        engines: dict[str, str] = {}

        def fits(each: Alternative) -> bool:
            planner = self.with_config(each.config)

            def has_room(separate: bool) -> bool:
                settings = planner.resolve(each.config.trainer, backend, each.devices, room, separate=separate)
                return planner.memory(backend, each.devices, settings, separate=separate).peak <= room

            if select is not None and not each.separate and not backend.is_host:
                if not has_room(separate=True):  # whichever engine samples
                    return False
                planner = select(planner, each.devices)
                engines[each.text] = planner.config.rollout.engine
            return has_room(each.separate)

        text = first_alternative(
            changed_settings(self.config, {"trainer": trainer}),
            devices,
            fits,
            on_host=backend.is_host,
            separate=is_separate or self.supervised,
            sizes=sizes,
        )
        engine = engines.get(text, used)
        return text if used is None or engine == used else f"{text}, then with rollout.engine={engine}"

    def with_config(self, config: Config) -> Planner:
        """Return a planner of the same model with other settings."""
        quantize = config.model.quantize
        if quantize not in self._by_quantize:
            self._by_quantize[quantize] = Planner(config, supervised=self.supervised, image_tokens=self._image_tokens)
        planner = copy(self._by_quantize[quantize])
        planner.config = config
        return planner


def _validations(config: Config, work: Work, devices: int) -> Iterator[tuple[Work, int]]:
    """Yield a device's work of the batches that validations generate, each with its samples per prompt."""
    if config.data.validation is None and not str(config.data.train).startswith(TASK_SCHEMES):
        return
    prompts = -(-config.data.validation_max_rows // devices) or work.prompts
    for n in {1, config.trainer.validation_n} - {0}:
        yield replace(work, prompts=prompts), n


def planned_memory(config: Config, backend: Backend, devices: int = 1) -> tuple[Memory, ModelShape]:
    """Return the memory of one device under the configuration's strategy, and the model's sizes."""
    planner = Planner(config)
    return planner.memory(backend, devices, config.trainer, separate=False), planner.shape
