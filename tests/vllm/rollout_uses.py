"""What the rollout engines and the plugin use of vLLM, checked against a wheel's source without importing it."""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from hwgrpo.rollout.vllm.vllm_settings import HOST_HEAD_SIZES
from tests.support.processes.launch import ROOT
from tests.support.processes.made_once import made_once


@dataclass(frozen=True)
class Use:
    """A function, method, attribute or field that has to be there."""

    file: str
    """Below the folder that the wheel was unpacked to."""
    name: str
    """`Class.method` or `Class.attribute`; `child = base` for a class that inherits; in quotes, text of the file."""
    arguments: tuple[str, ...] = ()
    """Names of parameters that are given."""


def _fields(file: str, owner: str, names: str) -> tuple[Use, ...]:
    return tuple(Use(file, f"{owner}.{name}") for name in names.split())


PLUGIN = (
    Use("vllm/v1/worker/gpu_model_runner.py", "GPUModelRunner.reload_weights", ("weights_iterator",)),
    Use("vllm/v1/worker/gpu_model_runner.py", "GPUModelRunner.get_model"),
    Use("vllm/v1/engine/async_llm.py", "AsyncLLM.collective_rpc", ("method", "args")),
    Use("vllm/v1/engine/async_llm.py", "AsyncLLM.reset_prefix_cache"),
    Use("vllm/v1/engine/async_llm.py", "AsyncLLM.sleep", ("level",)),
    Use("vllm/v1/engine/async_llm.py", "AsyncLLM.wake_up", ("tags",)),
    Use("vllm/config/model.py", "ModelConfig.enable_sleep_mode"),
    Use("vllm/platforms/interface.py", "Platform.is_sleep_mode_available"),
    Use("vllm/v1/engine/async_llm.py", "AsyncLLM.vllm_config"),
    Use("vllm/config/parallel.py", "ParallelConfig.world_size"),
    Use("vllm/config/parallel.py", "ParallelConfig.data_parallel_size"),
    Use("vllm/platforms/interface.py", "Platform.device_type"),
    Use("vllm/v1/worker/worker_base.py", "WorkerBase.rank"),
    Use("vllm/v1/engine/async_llm.py", "AsyncLLM.add_lora", ("lora_request",)),
    Use("vllm/v1/engine/async_llm.py", "AsyncLLM.remove_lora", ("lora_id",)),
    Use("vllm/lora/request.py", "LoRARequest.lora_name"),
    Use("vllm/lora/request.py", "LoRARequest.lora_int_id"),
    Use("vllm/lora/request.py", "LoRARequest.lora_path"),
    Use("vllm/entrypoints/openai/models/serving.py", "OpenAIServingModels.lora_requests"),
    *_fields(
        "vllm/entrypoints/openai/completion/protocol.py",
        "CompletionRequest",
        "model prompt n seed max_tokens temperature top_k top_p min_p stop stop_token_ids "
        "ignore_eos logprobs return_token_ids cache_salt prompt_logprobs",
    ),
    *_fields(
        "vllm/entrypoints/openai/completion/protocol.py",
        "CompletionResponseChoice",
        "index logprobs token_ids finish_reason prompt_logprobs",
    ),
    *_fields(
        "vllm/engine/arg_utils.py",
        "EngineArgs",
        "model tokenizer revision trust_remote_code dtype load_format generation_config seed "
        "max_model_len max_num_seqs gpu_memory_utilization enforce_eager enable_prefix_caching "
        "logprobs_mode disable_log_stats kv_cache_memory_bytes enable_lora max_lora_rank max_loras "
        "enable_sleep_mode enable_chunked_prefill max_num_batched_tokens tensor_parallel_size worker_extension_cls "
        "served_model_name",
    ),
)
"""Of a server's vLLM: 0.23 as vllm-ascend 0.23 needs it, and 0.32."""

IN_PROCESS = (
    Use("vllm/entrypoints/llm.py", "LLM.generate", ("use_tqdm", "lora_request")),
    Use("vllm/entrypoints/llm.py", "LLM.collective_rpc", ("method", "args")),
    Use("vllm/entrypoints/llm.py", "LLM.reset_prefix_cache"),
    Use("vllm/entrypoints/llm.py", "LLM.sleep", ("level",)),
    Use("vllm/entrypoints/llm.py", "LLM.wake_up", ("tags",)),
    Use("vllm/v1/executor/abstract.py", "Executor.sleep", ("level",)),
    Use("vllm/v1/executor/abstract.py", "Executor.wake_up", ("tags",)),
    Use("vllm/v1/executor/abstract.py", '"Executor is already sleeping."'),
    Use("vllm/v1/executor/abstract.py", '"Tag %s is not in sleeping tags %s"'),
    Use("vllm/device_allocator/cumem.py", '"create_and_map(handle)"'),
    Use("vllm/v1/engine/llm_engine.py", "LLMEngine.set_weight_version", ("weight_version",)),
    Use("vllm/v1/engine/llm_engine.py", "LLMEngine.remove_lora", ("lora_id",)),
    Use("vllm/v1/engine/llm_engine.py", "LLMEngine.add_request", ("request_id", "prompt", "params", "lora_request")),
    Use("vllm/v1/engine/llm_engine.py", "LLMEngine.abort_request", ("request_ids", "internal")),
    Use("vllm/v1/engine/llm_engine.py", "LLMEngine.has_unfinished_requests"),
    Use("vllm/v1/engine/llm_engine.py", "LLMEngine.step"),
    Use("vllm/outputs.py", "RequestOutput.finished"),
    Use("vllm/outputs.py", "RequestOutput.request_id"),
    Use("vllm/outputs.py", "CompletionOutput.weight_versions"),
    Use("vllm/outputs.py", "RequestOutput.prompt_logprobs"),
    Use(
        "vllm/distributed/device_communicators/cpu_communicator.py",
        "_CPUSHMDistributed.make_group_name",
        ("communicator",),
    ),
    Use("vllm/v1/attention/backends/cpu_attn.py", f'"{[*HOST_HEAD_SIZES]}"'),
    Use("vllm/outputs.py", "WeightVersionSpan.version"),
    *_fields(
        "vllm/sampling_params.py",
        "SamplingParams",
        "n seed max_tokens temperature top_k top_p min_p stop stop_token_ids ignore_eos detokenize "
        "logprobs prompt_logprobs output_kind",
    ),
)
"""Of vLLM 0.32 beside the trainer."""

IMAGES = (
    Use("vllm/inputs/engine.py", "MultiModalInput.mm_kwargs"),
    Use("vllm/inputs/engine.py", "MultiModalInput.mm_hashes"),
    Use("vllm/inputs/engine.py", "MultiModalInput.mm_placeholders"),
    Use("vllm/multimodal/inputs.py", "MultiModalFieldConfig.flat_from_sizes", ("modality", "size_per_item")),
    Use("vllm/multimodal/inputs.py", "MultiModalFieldConfig.batched", ("modality", "keep_on_cpu")),
    Use("vllm/multimodal/inputs.py", "MultiModalKwargsItems.from_hf_inputs", ("hf_inputs", "config_by_key")),
    Use("vllm/multimodal/inputs.py", "PlaceholderRange.offset"),
    Use("vllm/multimodal/inputs.py", "PlaceholderRange.length"),
    Use("vllm/config/multimodal.py", "MultiModalConfig.mm_device_do_normalize"),
    Use(
        "vllm/v1/engine/async_llm.py", "AsyncLLM.generate", ("prompt", "sampling_params", "request_id", "lora_request")
    ),
    Use("vllm/v1/engine/async_llm.py", "AsyncLLM.reset_encoder_cache"),
    Use("vllm/v1/engine/llm_engine.py", "LLMEngine.reset_encoder_cache"),
    Use("vllm/outputs.py", "RequestOutput.prompt_token_ids"),
    Use("vllm/sampling_params.py", "SamplingParams.logit_bias"),
    *_fields(
        "vllm/engine/arg_utils.py", "EngineArgs", "limit_mm_per_prompt mm_processor_cache_gb mm_device_do_normalize"
    ),
)
"""Of vLLM 0.32 for prompts with images, beside the trainer and in a server."""

ASCEND = (
    Use("vllm_ascend/worker/worker.py", "NPUWorker._check_nz_disabled"),
    Use("vllm_ascend/worker/worker.py", "NPUWorker.model_runner"),
    Use("vllm_ascend/worker/worker.py", "NPUWorker.sleep", ("level",)),
    Use("vllm_ascend/worker/worker.py", "NPUWorker.wake_up", ("tags",)),
    Use("vllm_ascend/platform.py", "NPUPlatform.is_sleep_mode_available"),
    Use("vllm_ascend/worker/worker.py", "NPUWorker.device"),
    Use("vllm_ascend/worker/worker.py", "NPUWorker = WorkerBase"),
    Use("vllm_ascend/platform.py", "NPUPlatform.device_type"),
    Use("vllm_ascend/worker/worker.py", "NPUWorker.add_lora", ("lora_request",)),
    Use("vllm_ascend/worker/worker.py", "NPUWorker.remove_lora", ("lora_id",)),
    Use("vllm_ascend/worker/model_runner_v1.py", "NPUModelRunner = GPUModelRunner"),
    # what the variables of the backend's profile for rollout rely on
    Use("vllm_ascend/worker/worker.py", '"if envs_ascend.VLLM_ASCEND_ENABLE_NZ:"'),
    Use("vllm_ascend/platform.py", '"if model_config and not model_config.enable_sleep_mode:"'),
    Use("vllm_ascend/platform.py", '"npu_alloc_configs += ",expandable_segments:True"'),
    Use("vllm_ascend/device_allocator/camem.py", '"Expandable segments are not compatible with memory pool"'),
)
"""Of vllm-ascend 0.23, whose runner inherits the rest from vLLM's."""


_ROUTES = (
    '@app.get("/health")',
    '@app.get("/model_info")',
    '"/generate"',
    '@app.post("/update_weights_from_disk")',
    '@app.post("/update_weight_version")',
    '"/release_memory_occupation"',
    '"/resume_memory_occupation"',
    '"weight_version": ',
    '"success": success',
)
_SERVER, _MANAGER = "sglang/srt/entrypoints/http_server.py", "sglang/srt/managers/tokenizer_manager.py"
SGLANG = (
    *(Use(_SERVER, f'"{route}"') for route in _ROUTES),
    *_fields("sglang/srt/managers/io_struct.py", "GenerateReqInput", "input_ids sampling_params return_logprob"),
    *_fields(
        "sglang/srt/managers/io_struct.py",
        "UpdateWeightFromDiskReqInput",
        "model_path load_format weight_version flush_cache",
    ),
    *_fields("sglang/srt/managers/io_struct.py", "UpdateWeightVersionReqInput", "new_version abort_all_requests"),
    *_fields(
        "sglang/srt/sampling/sampling_params.py",
        "SamplingParams",
        "max_new_tokens temperature top_k top_p min_p stop stop_token_ids no_stop_trim skip_special_tokens "
        "sampling_seed",
    ),
    Use(_MANAGER, "TokenizerManager.update_weights_from_disk"),
    *(Use(_MANAGER, f'"{key}"') for key in ('"output_ids": ', '"finish_reason": ', '"weight_version": ')),
    Use(_MANAGER, '"output_token_logprobs"'),
    Use("sglang/srt/utils/weight_versions.py", '"meta_info["weight_versions"]"'),
    Use("sglang/srt/environ.py", '"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION = "'),
    Use("sglang/srt/environ.py", '"SGLANG_RETURN_ORIGINAL_LOGPROB = "'),
    Use("sglang/launch_server.py", '"prepare_server_args(sys.argv[1:])"'),
    Use("sglang/launch_server.py", '"from sglang.srt.server_args import prepare_server_args"'),
    Use("sglang/srt/server_args.py", '"def prepare_server_args(argv"'),
    *_fields(
        "sglang/srt/arg_groups/fields/model.py",
        "Model",
        "model_path revision trust_remote_code dtype load_format context_length",
    ),
    *_fields(
        "sglang/srt/arg_groups/fields/serving.py",
        "Serving",
        "tokenizer_path host port api_key served_model_name sampling_defaults",
    ),
    *_fields("sglang/srt/arg_groups/fields/schedule.py", "Schedule", "mem_fraction_static max_running_requests"),
    *_fields("sglang/srt/arg_groups/fields/device.py", "Device", "device random_seed"),
    Use("sglang/srt/arg_groups/fields/parallel.py", "Parallel.tp_size"),
    Use("sglang/srt/arg_groups/fields/exec_.py", "ExecFeatures.enable_memory_saver"),
    Use("sglang/srt/server_args.py", '"--disable-cuda-graph"'),
)
"""Of SGLang 0.5.23."""


def problem(root: Path, use: Use) -> str | None:
    """Say what a source tree lacks of a use, or return None."""
    path = root / use.file
    if not path.is_file():
        return f"there is no {use.file}"
    text = path.read_text(encoding="utf-8")
    if use.name.startswith('"'):
        return None if use.name.strip('"') in text else f"{use.file} does not say {use.name}"
    tree = ast.parse(text)
    owner, _, member = use.name.partition(".")
    if " = " in use.name:
        child, base = use.name.split(" = ")
        found = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == child]
        inherits = any(base in ast.unparse(each) for node in found for each in node.bases)
        return None if inherits else f"{use.file}: {child} does not inherit from {base}"
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner]
    if not classes:
        return f"{use.file} has no class {owner}"
    function = _member(classes[0], member)
    if function is None:
        return f"{use.file}: {owner} has no {member}"
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        a = function.args
        names = {argument.arg for argument in (*a.posonlyargs, *a.args, *a.kwonlyargs)}
        missing = [name for name in use.arguments if name not in names and a.kwarg is None]
        if missing:
            return f"{use.file}: {owner}.{member} does not take {', '.join(missing)}"
    return None


def _member(owner: ast.ClassDef, name: str) -> ast.AST | None:
    for node in owner.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return node
    for node in ast.walk(owner):
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        if any(ast.unparse(target) == f"self.{name}" for target in targets):
            return node
    return None


VERSIONS = {"vllm": "0.23.0", "vllm-ascend": "0.23.0", "sglang": "0.5.23"}
"""Versions of the servers that no environment here has."""
PLATFORMS = ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64")


def sources(package: str, version: str) -> Path:
    """Return a folder with the Python files of a wheel, fetched once; nothing is installed and nothing runs.

    Raises:
        RuntimeError: pip could not get it.
    """

    def fetch(there: Path) -> None:
        with tempfile.TemporaryDirectory(dir=there.parent) as scratch:
            platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
            command += ["--python-version", "3.11", *platforms, "-d", scratch, f"{package}=={version}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(
                    f"this test reads the wheel of {package} {version}, and pip cannot get it. Let it reach an index "
                    f"that has it, or leave slow tests out with -m 'not slow'. pip said:\n{done.stderr[-2000:]}"
                )
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(there, [name for name in archive.namelist() if name.endswith(".py")])

    return made_once(ROOT / "build" / "fetched" / f"{package}-{version}-sources", fetch)
