"""`rollout.gpu_memory_utilization=null`: what the trainer leaves of a device that an engine shares."""

from types import SimpleNamespace
from typing import Any

import pytest
from hwgrpo_backends import registry
from hwgrpo_backends.device import Memory
from transformers import AutoConfig

from hwgrpo.config import Config, load_config
from hwgrpo.errors import ConfigError
from hwgrpo.planning.engine_share import planned_engine_share
from hwgrpo.planning.memory import COPY, ENGINE
from hwgrpo.planning.planned_device import USABLE
from hwgrpo.planning.planner import Planner
from hwgrpo.rollout.shared_devices import memory_share, shares_device, sleeps
from hwgrpo.rollout.vllm.vllm_settings import check_images, check_sleep
from tests.support.models.vision_families import VISION_FAMILIES

ACCELERATOR = registry.get("cuda")  # hw: any accelerator
GIB = 2**30
CACHE = "cache of the engine, for 8 sequences or more"
LORA = ("model.lora.rank=32",)
STALE = ("rollout.max_staleness=1", "algorithm.correction.name=token_truncate")
OTHERS = ("rollout.engine=vllm_server", 'rollout.server.env={CUDA_VISIBLE_DEVICES: "4,5"}')


def recipe(*words: str) -> Config:
    words = ("model.lora.rank=0", "trainer.strategy=single", "rollout.engine=vllm", *words)
    return load_config("qwen3_8b_math", words, data_may_be_missing=True)


def resolved(config: Config, total: float | None) -> tuple[float | None, list[str]]:
    before = config.rollout.gpu_memory_utilization
    device: Any = SimpleNamespace(memory=lambda: Memory(total=None if total is None else int(total)))
    found = planned_engine_share(config, ACCELERATOR, 1, device)
    assert config.rollout.gpu_memory_utilization == before, "a resumed run, or one elsewhere, plans its own"
    return found


def planned(config: Config):
    return Planner(config).memory(ACCELERATOR, 1, config.trainer, separate=False)


@pytest.mark.parametrize(
    ("words", "shares", "asleep"),
    [
        ((), True, True),
        (("rollout.engine=vllm_server",), True, True),
        (OTHERS, False, False),
        ((*OTHERS, "rollout.sleep_mode=always"), False, True),
        (("rollout.engine=vllm_server", "rollout.server.url=http://host:1"), False, False),
        (("rollout.engine=local",), False, False),
        (("rollout.sleep_mode=never",), True, False),
        (STALE, True, False),
        (("rollout.engine=sglang_server",), False, False),
    ],
)
def test_vllm_sleeps_on_devices_that_it_shares(words, shares, asleep):
    config = recipe(*words)
    assert (shares_device(config.rollout), sleeps(config.rollout, on_host=False)) == (shares, asleep)
    assert sleeps(config.rollout, on_host=True) == (config.rollout.sleep_mode == "always")
    assert memory_share(config.rollout) == (0.9 if OTHERS[0] in words and not shares else 0.5)


def test_an_engine_that_sleeps_gets_what_parameters_and_states_leave():
    memory = planned(recipe())
    weights = memory.rollout[ENGINE]
    assert weights == 2 * planned(recipe("rollout.engine=local")).always["parameters (fp32)"] // 4
    assert ENGINE not in memory.always
    assert COPY not in memory.always
    held = sum(memory.always.values())
    total = (held + 2 * weights) / USABLE
    config = recipe()
    share, [note] = resolved(config, total)
    assert share is not None
    assert 0 <= 2 * weights / total - share < 0.01
    assert note.startswith(
        f"rollout.gpu_memory_utilization={share:g} (null): beside {held / GIB:.2f} GiB of the trainer"
    )


def test_an_engine_that_stays_awake_gets_what_updates_leave():
    awake, asleep = recipe("rollout.sleep_mode=never"), recipe()
    memory = planned(awake)
    assert memory.always[ENGINE] == planned(asleep).rollout[ENGINE]
    alone = memory.update_peak - memory.always[ENGINE] - memory.always[CACHE]
    total = (alone + 2 * memory.always[ENGINE]) / USABLE
    shares = [resolved(config, total)[0] or 0.0 for config in (awake, asleep)]
    assert 0 <= 2 * memory.always[ENGINE] / total - shares[0] < 0.01
    assert shares[0] < shares[1]


def test_the_base_below_an_adapter_sleeps_in_host_memory():
    memory = planned(recipe(*LORA))
    assert memory.host["weights of the engine, asleep"] == memory.rollout[ENGINE]
    assert "weights of the engine, asleep" not in planned(recipe()).host


def test_a_device_without_room_gets_a_warning_with_what_to_do():
    memory = planned(recipe())
    share, [note] = resolved(recipe(), (sum(memory.always.values()) + memory.rollout[ENGINE] / 2) / USABLE)
    assert note.startswith("warning: there is no room for")
    assert "trainer.strategy=fsdp2" in note
    assert share is None


@pytest.mark.parametrize(
    ("words", "total"),
    [(("rollout.gpu_memory_utilization=0.3",), 1e12), (("rollout.engine=local",), 1e12), (OTHERS, 1e12), ((), None)],
    ids=["set", "local", "devices of its own", "no memory of its own"],
)
def test_it_stays_as_it_is_where_nothing_is_shared_or_it_is_set(words, total):
    assert resolved(recipe(*words), total) == (None, [])


def test_a_large_device_keeps_something_for_others():
    share, _ = resolved(recipe(), 1e14)
    assert share == pytest.approx(USABLE, abs=0.011)


def test_mixtures_of_experts_do_not_sleep_where_they_would_wake_up_damaged():
    config, other = recipe(), recipe("rollout.sleep_mode=never")
    mixture = AutoConfig.for_model("qwen3_moe", num_experts=8)
    npu, dense = registry.get("npu"), AutoConfig.for_model("qwen3")  # hw: the one that damages them
    with pytest.raises(ConfigError, match=r"rollout\.sleep_mode='auto'.*transposes.*set rollout\.sleep_mode=never"):
        check_sleep(config.rollout, config.model.path, mixture, npu)
    for settings, model, backend in ((other, mixture, npu), (config, dense, npu), (config, mixture, ACCELERATOR)):
        check_sleep(settings.rollout, settings.model.path, model, backend)


@pytest.mark.parametrize("engine", ["vllm", "vllm_server"])
def test_a_vllm_that_is_too_old_for_images_is_refused_on_its_devices_alone(engine):
    npu, path = registry.get("npu"), "folder"  # hw: the one whose vLLM is older
    reads, text = VISION_FAMILIES["Qwen2-VL"].config(), AutoConfig.for_model("qwen3")
    config, local = recipe(f"rollout.engine={engine}"), recipe("rollout.engine=local")
    with pytest.raises(
        ConfigError, match=r"folder', which reads images: vllm-ascend 0\.23 .* use rollout\.engine=local"
    ):
        check_images(config.rollout, path, reads, npu)
    running = recipe("rollout.engine=vllm_server", "rollout.server.url=http://127.0.0.1:1")
    for each, settings, backend in (
        (config, reads, ACCELERATOR),
        (config, text, npu),
        (local, reads, npu),
        (running, reads, npu),
    ):
        check_images(each.rollout, path, settings, backend)
