"""A host with AMD GPUs that are not there: torch says HIP, and its device module has the names and figures of chips.

What the code asks of torch is answered as a ROCm build answers; nothing is computed on a device. Kernels are compiled
for these chips by tests/compile. Never run on hardware.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hwgrpo_backends import registry, tier1, torch_probe
from hwgrpo_backends.decide import decide
from hwgrpo_backends.device import Device, Memory
from hwgrpo_backends.facts import Facts
from hwgrpo_backends.tier0 import gather_tier0
from hwgrpo_backends.vendor_findings import vendor_findings
from hwgrpo_kernels import Key, default_registry, head, resolve, triton_support
from hwgrpo_kernels.tiles import table_key
from transformers import Qwen3Config

from hwgrpo.doctor.diagnosis_text import show
from hwgrpo.rollout.vllm import vllm_probe
from hwgrpo.rollout.vllm.installed_vllm import IN_PROCESS, InstalledVllm
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import group
from hwgrpo.training.checkpoint import rng_state
from hwgrpo.training.policy.auto_settings import choose_attention, choose_dtype
from tests.backends import seen_branches
from tests.support.devices.hosts import diagnosis, rocm

BUILTIN = {name: registry.get(name) for name in registry.BUILTIN}
ROCM, CUDA = BUILTIN["rocm"], BUILTIN["cuda"]
TARGETS = [["cuda", None]]
MI210, MI300X, MI355X, RX7900 = (
    ("gfx90a:sramecc+:xnack-", "AMD Instinct MI210"),
    ("gfx942:sramecc+:xnack-", "AMD Instinct MI300X"),
    ("gfx950:sramecc+:xnack-", "AMD Instinct MI355X"),
    ("gfx1100", "AMD Radeon RX 7900 XTX"),
)
CHIPS = (MI210, MI300X, MI355X, RX7900)
BUILT_FOR = ["gfx90a", "gfx942", "gfx950", "gfx1100"]
Host = Callable[..., list]


@pytest.fixture
def host(monkeypatch) -> Host:
    """Give this process a ROCm build of torch and some GPUs; returns the calls that reach the device."""
    calls: list = []
    state = {"rng": torch.arange(16, dtype=torch.uint8)}

    def put(*chips, built_for=BUILT_FOR, hip="7.1.52802"):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.version, "cuda", None)
        head.adds_into_fp32.cache_clear()

        def properties(device):
            arch, name = chips[torch.device(device).index if not isinstance(device, int) else device]
            return SimpleNamespace(gcnArchName=arch, name=name, major=9, minor=4, multi_processor_count=304)

        def noted(name, answer=None):
            return lambda *arguments, **named: calls.append((name, *arguments, *named.values())) or answer

        answers = {
            "is_available": lambda: bool(chips),
            "device_count": lambda: len(chips),
            "get_arch_list": lambda: list(built_for),
            "get_device_properties": properties,
            "get_device_name": lambda device: properties(device).name,
            "get_device_capability": lambda device: (9, 4),
            "get_rng_state": lambda device: state["rng"].clone(),
            "set_rng_state": lambda new, device: state.update(rng=new.clone()),
            "mem_get_info": noted("mem_get_info", (60 * 2**30, 192 * 2**30)),
            "memory_allocated": noted("memory_allocated", 100 * 2**30),
            "max_memory_allocated": noted("max_memory_allocated", 130 * 2**30),
            **{name: noted(name) for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")},
            **{name: noted(name, name) for name in ("Stream", "stream")},
        }
        for name, answer in answers.items():
            assert hasattr(torch.cuda, name), f"torch.cuda has no {name}"
            monkeypatch.setattr(torch.cuda, name, answer)
        return calls

    yield put
    head.adds_into_fp32.cache_clear()


def both_tiers(monkeypatch, **fields) -> Facts:
    """Facts as both tiers gather them on the present host; what the child process would say is asked right here."""
    monkeypatch.setattr(tier1, "_cache", {})
    monkeypatch.setattr(tier1, "_run", lambda *_: json.loads(json.dumps(torch_probe.main(TARGETS))))
    before = rocm(None, torch=None, **fields)
    return tier1.gather_tier1(before, {}, [ROCM, CUDA])


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip[0].split(":")[0])
def test_the_host_is_chosen_for_what_it_is(host, monkeypatch, chip):
    host(chip, chip)
    facts = both_tiers(monkeypatch, gpus=2)
    assert (facts.torch_build, facts.torch_toolkit) == ("rocm", "7.1.52802")
    decision = decide(facts, "auto", BUILTIN, {})
    assert decision.selected == "rocm"
    assert decision.verdicts["rocm"].state == "ok"
    assert decision.verdicts["rocm"].reason == f"2 x {chip[1]}"
    assert decision.verdicts["cuda"].state == "unusable", "HIP is not CUDA, whatever torch calls its devices"
    refused = decide(facts, "cuda", BUILTIN, {})
    assert refused.selected is None
    assert "is not a CUDA build" in refused.error


def test_a_torch_without_hip_on_the_same_host_is_not_taken_for_one(host, monkeypatch):
    host(hip=None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    facts = both_tiers(monkeypatch, gpus=2)
    assert (facts.torch_build, facts.torch_toolkit) == ("cuda", "13.0")
    verdict = decide(facts, "auto", BUILTIN, {}).verdicts["rocm"]
    assert verdict.state == "unusable"
    assert "is not a ROCm build" in verdict.reason
    monkeypatch.setattr(torch.version, "cuda", None)
    assert both_tiers(monkeypatch).torch_build == "cpu", "what torch itself says wins over what its file said"
    assert both_tiers(monkeypatch, torch_build="xpu").torch_build == "xpu"


def test_a_probe_of_a_cuda_build_reads_capabilities_and_no_targets(host):
    host(MI300X)
    assert torch_probe.main(TARGETS)["devices"]["cuda"]["archs"] == ["gfx942"]
    host(MI300X, hip=None)
    assert torch_probe.main(TARGETS)["devices"]["cuda"]["archs"] == ["sm_94"]


@pytest.mark.parametrize(("line", "build", "toolkit"), [("hip", "rocm", "7.1"), ("cuda", "cuda", "13.0")])
def test_the_build_is_read_from_torchs_version_file_without_importing_it(tmp_path, line, build, toolkit):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\n{line}: str | None = '{toolkit}'\n")
    facts = gather_tier0(tmp_path, {}, [ROCM], path=[str(tmp_path)])
    assert (facts.torch_build, facts.torch_toolkit) == (build, toolkit)
    assert [finding.what for finding in vendor_findings(facts)].count("AMD nodes") == (build == "rocm")


def test_torch_npu_beside_a_rocm_build_is_refused():
    beside = rocm(distributions={"torch": "2.13.0", "torch-npu": "2.13.0"})
    assert "which is built for rocm" in BUILTIN["npu"].probe(beside).reason
    alone = Facts(torch_version="2.13.0+cpu", torch_build="cpu", distributions={"torch-npu": "2.13.0"})
    assert "built for" not in BUILTIN["npu"].probe(alone).reason


def test_two_kinds_of_gpus_are_each_what_they_are(host, monkeypatch):
    host(MI300X, RX7900)
    facts = both_tiers(monkeypatch, gpus=2)
    assert facts.torch.devices["cuda"].archs == ("gfx942", "gfx1100")
    assert decide(facts, "auto", BUILTIN, {}).selected == "rocm"
    first, second = Device(ROCM, 0), Device(ROCM, 1)
    assert (first.arch, second.arch) == ("gfx942", "gfx1100")
    assert (first.peak(torch.bfloat16).flops, second.peak(torch.bfloat16).flops) == (1307.4e12, 122.8e12)


def test_a_gpu_that_torch_has_no_kernels_for_is_named(host, monkeypatch):
    host(MI300X, RX7900, built_for=["gfx90a", "gfx942"])
    verdict = decide(both_tiers(monkeypatch, gpus=2), "auto", BUILTIN, {}).verdicts["rocm"]
    assert verdict.state == "unusable"
    assert "no kernels for gfx1100" in verdict.reason
    assert "HIP_VISIBLE_DEVICES" in verdict.fix
    host(MI300X, RX7900, built_for=["gfx9-4-generic", "gfx11-generic"])
    assert decide(both_tiers(monkeypatch, gpus=2), "auto", BUILTIN, {}).verdicts["rocm"].state == "ok"


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip[0].split(":")[0])
def test_a_device_says_what_it_is_and_can(host, chip):
    host(chip)
    device = Device(ROCM)
    assert (device.arch, device.name) == (chip[0].split(":")[0], chip[1])
    assert device.compute_dtypes == (torch.bfloat16, torch.float16, torch.float32)
    assert device.comm_backend == "nccl"
    assert device.peak(torch.bfloat16).source.startswith("AMD")
    assert device.recorder is ROCM.record is not None


def test_runtime_calls_reach_the_gpu_of_the_rank(host):
    calls = host(MI300X, MI300X)
    device, here = Device(ROCM, 1), torch.device("cuda", 1)
    assert device.torch_device == here
    device.set_device()
    device.synchronize()
    device.empty_cache()
    device.reset_peak()
    assert device.memory() == Memory(60 * 2**30, 192 * 2**30, 100 * 2**30, 130 * 2**30)
    device.stream(device.new_stream())
    seen = {name: arguments for name, *arguments in calls}
    for name in ("set_device", "synchronize", "reset_peak_memory_stats", "mem_get_info", "Stream"):
        assert seen[name] == [here], name
    assert seen["empty_cache"] == []


def test_a_full_gpu_is_told_by_hips_words(host):
    host(MI300X)
    device = Device(ROCM)
    assert device.is_oom(torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB"))
    assert device.is_oom(RuntimeError("HIP error: out of memory"))
    assert not device.is_oom(RuntimeError("HIP error: invalid device function"))
    with pytest.raises(device.oom_error):
        raise torch.cuda.OutOfMemoryError("HIP out of memory")


def test_the_random_state_is_that_of_rocm(host):
    host(MI300X)
    device = Device(ROCM)
    state = rng_state.capture(device)
    device.set_rng_state(torch.zeros(16, dtype=torch.uint8))
    assert rng_state.restore(state, device, seed=1) is None
    assert device.rng_state().tolist() == list(range(16))
    assert "is of rocm, not of cuda" in rng_state.restore(state, Device(CUDA), seed=1)


def test_training_computes_in_bf16_with_the_first_attention_that_is_installed(host, monkeypatch):
    host(MI300X)
    model = SimpleNamespace(attention="auto", layout="auto")
    config = SimpleNamespace(model=model, trainer=SimpleNamespace(sequence_parallel_size=1, tensor_parallel_size=1))
    assert choose_dtype("auto", Device(ROCM)) is torch.bfloat16
    assert ROCM.attention[-2:] == ("sdpa", "eager")
    assert choose_attention(config, ROCM, torch.bfloat16, Qwen3Config()).name == "sdpa"
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: True)
    config.model.layout = "padded"
    taken = choose_attention(config, ROCM, torch.bfloat16, Qwen3Config()).name
    assert taken in ROCM.attention[: ROCM.attention.index("sdpa")]


@pytest.mark.parametrize("reason", [None, "not supported for ROCm"])
def test_the_head_makes_fp32_products_of_16_bit_operands_where_a_probe_of_the_device_shows_them(
    host, monkeypatch, reason
):
    bf16, fp32, probed = torch.bfloat16, torch.float32, []
    monkeypatch.setattr(head, "probe_fp32_products", lambda *asked: probed.append(asked) or reason)
    host(MI300X)
    assert head.multiplies_into_fp32("cuda") == (reason is None)
    assert head.reason_against_fp32_products("cuda", bf16) == reason
    assert set(probed) == {(torch.device("cuda"), bf16)}
    assert head.keeps_16_bit_operands(bf16, fp32, "cuda") == (reason is None)
    assert head.logits_buffers(bf16, fp32, "cuda") == (2 if reason is None else 1)
    if reason is not None:
        assert not head.adds_into_fp32(torch.device("cuda")), "decided without a tensor on the device"
    host(MI300X, hip=None)
    probed.clear()
    assert head.multiplies_into_fp32("cuda")
    assert head.logits_buffers(bf16, fp32, "cuda") == 2
    assert probed == [], "CUDA has them"


@pytest.mark.parametrize("op", ["row_stats", "row_grad"])
def test_triton_is_preferred_where_it_is_installed_and_missed_by_name_where_not(host, monkeypatch, op):
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(triton_support, "_reason_against_headers", lambda: None)
    key = Key(op, "cuda", torch.bfloat16, 2**18)
    host(MI300X)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert triton_support.reason_against(key) is None, "AMD counts its capabilities otherwise"
    host(MI300X, hip=None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "needs compute capability 8.0" in triton_support.reason_against(key)
    host(MI300X)
    [triton] = [each for each in default_registry.implementations(op) if each.name == "triton"]
    monkeypatch.setattr("hwgrpo_kernels.op.importlib.util.find_spec", lambda name: object())
    assert triton.reason_against(key) is None
    monkeypatch.setattr("hwgrpo_kernels.op.importlib.util.find_spec", lambda name: None)
    assert triton.reason_against(key) == "needs module 'triton', which is not installed"
    choice = resolve(op, "cuda", torch.bfloat16, 2**18, preference=list(ROCM.kernels))
    assert choice.line == f"{op} -> torch (triton: needs module 'triton', which is not installed)"


@pytest.mark.parametrize(
    ("chip", "key"), [*((chip[0].split(":")[0], None) for chip in CHIPS), ("gfx908", "gfx90a"), ("gfx1201", "rdna")]
)
def test_every_target_has_tiles(chip, key):
    assert table_key(chip) == (key or ("rdna" if chip == "gfx1100" else chip))
    assert table_key("sm_90") == "sm_90"


def test_the_diagnosis_tells_of_hip_alone(host, monkeypatch):
    host(MI300X, MI300X)
    facts = both_tiers(monkeypatch, gpus=2)
    report = diagnosis(facts)
    assert report.backend == "rocm"
    assert report.failures == ()
    told = show(report)
    assert re.search(r"\* rocm +works", told)
    assert "2 x AMD Instinct MI300X" in told
    assert "NVIDIA driver" not in told
    assert report.to_json()["facts"]["torch"]["hip"] == "7.1.52802"


def test_weights_go_to_a_server_by_rccl_and_never_to_one_that_has_nccl(host, monkeypatch):
    version = SimpleNamespace(version=lambda: (2, 27, 3))
    host(MI300X)
    with monkeypatch.context() as patch:
        patch.setattr(group.importlib, "import_module", lambda name: version)
        assert group.communication_library(ROCM.comm) == "rccl 2.27.3"
    host(MI300X, hip=None)
    monkeypatch.setattr(group.importlib, "import_module", lambda name: version)
    assert group.communication_library(ROCM.comm) == "nccl 2.27.3"


@pytest.mark.parametrize(("hip", "fits"), [("7.1.52802", (True, False)), (None, (False, True))])
def test_a_vllm_says_whether_its_torch_is_built_with_hip_and_serves_no_other_gpus(host, monkeypatch, hip, fits):
    host(MI300X, hip=hip)
    platform = SimpleNamespace(device_type="cuda")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.33.0", LLM=object))
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    found = InstalledVllm("python", **vllm_probe.main())
    assert (found.version, found.device_type, found.problem) == ("0.33.0", "cuda", None)
    assert tuple(found.why_unfit(backend, IN_PROCESS) is None for backend in (ROCM, CUDA)) == fits


def test_both_sides_of_every_condition_on_hip_were_taken_here():
    done = subprocess.run(
        [sys.executable, seen_branches.__file__, str(Path(__file__))],
        capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith(seen_branches.MARKER)]
    seen = json.loads(line.removeprefix(seen_branches.MARKER))
    sites = seen_branches.sites()
    assert len(sites) > 8, "the search found nothing to look at"
    one_sided = {site: seen.get(site, []) for site in sites if seen.get(site) != [False, True]}
    assert one_sided == {}
