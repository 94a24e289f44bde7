"""What each built-in device family is checked for, beyond its `probe`: drivers, nodes, environments. Pure functions.

A family without any sign on the host (no hardware, driver or packages) is left out, unless it
was requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hwgrpo_backends import cuda, npu, nvidia_driver, rocm
from hwgrpo_backends.backend import Backend
from hwgrpo_backends.facts import Facts
from hwgrpo_backends.finding import Finding, FindingState
from hwgrpo_backends.probing import GROUPS, no_nodes_fix, npu_remedy


def vendor_findings(facts: Facts, asked: str | None = None) -> list[Finding]:
    """Return the findings about each family with a sign on this host.

    Args:
        facts: of the host; the better with tier 1.
        asked: a family to include in any case.
    """
    findings = [
        finding for name, (sign, check) in FAMILIES.items() if asked == name or sign(facts) for finding in check(facts)
    ]
    return findings + _two_tritons(facts) + _foreign_vllm(facts)


def _cuda_sign(facts: Facts) -> bool:
    nodes = facts.nodes(*cuda.BACKEND.device_nodes)
    return facts.torch_build == "cuda" or bool(facts.nvidia_driver or nodes or _reached_by_windows(facts, cuda.BACKEND))


def _cuda(facts: Facts) -> Iterable[Finding]:
    nodes = facts.nodes(*cuda.BACKEND.device_nodes)
    toolkit = facts.torch_toolkit if facts.torch_build == "cuda" else None
    needs = nvidia_driver.needed(toolkit)
    wants = f"torch's CUDA {toolkit} needs {needs} or newer" if needs else "what torch's build needs is not known"
    sees = _sees(facts, "cuda")

    def driver(found: str, state: FindingState = "ok", fix: str = "") -> Finding:
        return Finding(what="NVIDIA driver", state=state, found=found, fix=fix, backends=("cuda",))

    if facts.tegra:
        release = "" if facts.tegra == "unknown" else f" {facts.tegra}"
        yield driver(f"that of Jetson Linux{release}")
    elif facts.nvidia_driver:
        too_old = nvidia_driver.is_too_old(facts.nvidia_driver, toolkit)
        if toolkit is None:
            yield driver(facts.nvidia_driver)
        elif too_old and sees:  # libraries for older drivers (cuda-compat) come with many images
            yield driver(
                f"{facts.nvidia_driver} is older than {needs}, which CUDA {toolkit} requires, but torch works with it"
            )
        elif too_old:
            fix = f"update the driver, or install a torch build for an older CUDA (source: {nvidia_driver.SOURCE})"
            yield driver(f"{facts.nvidia_driver} is too old: {wants}", "FAIL", fix)
        else:
            yield driver(f"{facts.nvidia_driver} ({wants}; newer is fine)")
    elif facts.wsl and not facts.wsl_gpu:
        yield driver("WSL without /dev/dxg: Windows offers no GPU to it", "warn", f"use WSL 2; {cuda.WINDOWS_FIX}")
    elif _reached_by_windows(facts, cuda.BACKEND) or (facts.wsl and sees):
        yield driver("that of Windows, reached through /dev/dxg (it reports no version here)")
    elif facts.wsl:
        yield driver("WSL with /dev/dxg, and without NVIDIA's libcuda.so.1", "warn", cuda.WINDOWS_FIX)
    elif sees:
        yield driver("no record of one under /proc, but torch works with it")
    else:
        fix = f"install the NVIDIA driver ({needs or 'a current one'} or newer)" if needs else "install the driver"
        yield driver(f"none found; {wants}", "FAIL" if nodes else "warn", f"{fix}; nothing to do without an NVIDIA GPU")
    if nodes or not (facts.wsl or sees):
        present = bool(facts.nvidia_driver or facts.drivers(cuda.DRIVER))
        yield from _nodes(facts, "cuda", "NVIDIA", nodes, f"/dev/{cuda.NODES}", present, cuda.ACCESS)


def _rocm_sign(facts: Facts) -> bool:
    kfd = facts.nodes("kfd") and facts.kfd_gpus != 0
    return facts.torch_build == "rocm" or bool(kfd or _reached_by_windows(facts, rocm.BACKEND))


def _rocm(facts: Facts) -> Iterable[Finding]:
    nodes = facts.nodes("kfd")
    if not nodes and facts.wsl_gpu:
        if library := _reached_by_windows(facts, rocm.BACKEND):
            found = f"that of Windows, reached through /dev/dxg ({library})"
            yield Finding(what="AMD driver", found=found, backends=("rocm",))
        else:
            found = "WSL with /dev/dxg, and without ROCm's library for it"
            yield Finding(what="AMD driver", state="warn", found=found, fix=rocm.WINDOWS_FIX, backends=("rocm",))
        return
    driver = facts.kfd_gpus != 0 and bool(facts.kfd_gpus or facts.drivers(rocm.DRIVER))
    yield from _nodes(facts, "rocm", "AMD", nodes, "/dev/kfd", driver, rocm.ACCESS)
    if nodes and not _sees(facts, "cuda"):
        render, where = facts.nodes(rocm.RENDER_NODES), f"/dev/{rocm.RENDER_NODES}"
        yield from _nodes(facts, "rocm", "AMD render", render, where, facts.kfd_gpus != 0, rocm.ACCESS)
    if nodes and facts.kfd_gpus == 0:
        found, fix = "the driver lists no GPU", "check rocminfo and dmesg for amdgpu"
        yield Finding(what="AMD topology", state="warn", found=found, fix=fix, backends=("rocm",))
    elif nodes:
        topology = "the driver keeps its list from this user" if facts.kfd_gpus is None else f"{facts.kfd_gpus} GPU(s)"
        yield Finding(what="AMD topology", found=topology, backends=("rocm",))
    override = facts.variables.get("HSA_OVERRIDE_GFX_VERSION")
    if override:
        yield Finding(
            what="HSA_OVERRIDE_GFX_VERSION", state="warn", backends=("rocm",),
            found=f"{override}: kernels are those of another chip than the one here",
            fix="unset it where torch has kernels for this GPU; with it, wrong results and hangs are to be expected",
        )  # fmt: skip


def _npu_sign(facts: Facts) -> bool:
    installed = "torch-npu" in facts.distributions or "ASCEND_HOME_PATH" in facts.variables
    return bool(installed or facts.npu_driver or facts.nodes(npu.NODES))


def _npu(facts: Facts) -> Iterable[Finding]:
    nodes, home = facts.nodes(npu.NODES), facts.variables.get("ASCEND_HOME_PATH")
    concerned = ("npu",)
    driver = bool(facts.npu_driver or facts.drivers(npu.DRIVER))
    yield from _nodes(facts, "npu", "Ascend", nodes, f"/dev/{npu.NODES}", driver, npu.ACCESS)
    if facts.npu_driver:
        yield Finding(what="Ascend driver", found=facts.npu_driver, backends=concerned)
    elif nodes:
        found = "no /usr/local/Ascend/driver/version.info"
        fix = "install the Ascend driver, or mount /usr/local/Ascend/driver into the container"
        yield Finding(what="Ascend driver", state="warn", found=found, fix=fix, backends=concerned)
    if home:
        version = facts.cann_version
        found = f"{version} in {home}" if version else f"{home}, where no toolkit records its version"
        fix = (
            "" if version else "check that ASCEND_HOME_PATH is where CANN is installed, and source its set_env.sh again"
        )
        yield Finding(what="CANN", state="ok" if version else "warn", found=found, fix=fix, backends=concerned)
    elif _sees(facts, "npu"):
        yield Finding(what="CANN", found="ASCEND_HOME_PATH is not set, but torch works without", backends=concerned)
    else:
        script = facts.cann_script
        fix = f"source {script}" if script else "install CANN and source its set_env.sh"
        found = "installed, but its environment is not sourced" if script else "not sourced (no ASCEND_HOME_PATH)"
        if "torch-npu" in facts.distributions:
            fix = npu_remedy(facts, fix, "torch-npu") + ": `import torch` loads it"
            yield Finding(what="CANN", state="FAIL", found=found, fix=fix, backends=concerned)
        else:
            yield Finding(what="CANN", found=f"{found}; only torch-npu needs it", backends=concerned)
    if "torch-npu" not in facts.distributions:
        fix = f"install {npu.INSTALL}" if nodes else ""
        yield Finding(what="torch-npu", state="warn", found="not installed", fix=fix, backends=concerned)
    elif "triton-ascend" not in facts.distributions:
        found = "not installed: log-probs and losses are computed by the torch kernels"
        yield Finding(what="triton-ascend", found=found, backends=concerned)


def _nodes(
    facts: Facts, name: str, vendor: str, nodes: tuple[str, ...], where: str, driver: bool, access: str
) -> Iterable[Finding]:
    """Say which device nodes there are, and whether this user may open them."""
    what, concerned = f"{vendor} nodes", (name,)
    closed = [node for node in nodes if node in facts.no_access]
    if closed:
        found = f"this user may not open {', '.join(f'/dev/{node}' for node in closed)}"
        state: FindingState = "FAIL" if len(closed) == len(nodes) else "warn"
        yield Finding(what=what, state=state, found=found, fix=GROUPS, backends=concerned)
    elif nodes:
        listed = ", ".join(f"/dev/{node}" for node in nodes[:4]) + (", ..." if len(nodes) > 4 else "")
        yield Finding(what=what, found=f"{len(nodes)}: {listed}", backends=concerned)
    elif driver:  # the kernel has a driver, so the devices are kept from this process
        found = f"no {where}, although the kernel has the driver"
        yield Finding(what=what, state="FAIL", found=found, fix=no_nodes_fix(facts, access), backends=concerned)
    else:
        inside = f" in this container ({facts.container})" if facts.container else ""
        fix = f"where the host has some: {access}" if facts.container else ""
        yield Finding(what=what, state="warn", found=f"no {where}{inside}", fix=fix, backends=concerned)


def _two_tritons(facts: Facts) -> list[Finding]:
    """Both distributions own the folder `triton/`: whichever was installed last has overwritten the other."""
    ours, theirs = (facts.distributions.get(name) for name in ("triton", "triton-ascend"))
    if not (ours and theirs):
        return []
    keep = "triton-ascend" if facts.nodes(npu.NODES) else "triton"
    return [
        Finding(
            what="triton", state="FAIL", backends=("cuda", "rocm", "npu"),
            found=f"triton {ours} and triton-ascend {theirs} lie in one folder; one has overwritten the other",
            fix=f"pip uninstall -y triton triton-ascend, then install {keep}",
        )
    ]  # fmt: skip


def _foreign_vllm(facts: Facts) -> list[Finding]:
    """vllm-ascend's platform plug-in takes vLLM over without looking for an NPU."""
    version = facts.distributions.get("vllm-ascend")
    if version is None or facts.nodes(npu.NODES) or _sees(facts, "npu"):
        return []
    return [
        Finding(
            what="vllm-ascend", state="warn", backends=("cuda", "rocm", "cpu"),
            found=f"{version} is installed and there is no NPU: vLLM will take this host for one with NPUs",
            fix="pip uninstall vllm-ascend, or set VLLM_PLUGINS= (empty) for vLLM's process",
        )
    ]  # fmt: skip


def _reached_by_windows(facts: Facts, backend: Backend) -> str | None:
    """Return the library by which WSL reaches the family's devices, or None."""
    return next(iter(facts.drivers(backend.wsl_files)), None) if facts.wsl_gpu else None


def _sees(facts: Facts, device_type: str) -> bool:
    device = facts.torch.devices.get(device_type) if facts.torch else None
    return bool(device and device.available and device.count)


FAMILIES: dict[str, tuple[Callable[[Facts], bool], Callable[[Facts], Iterable[Finding]]]] = {
    "cuda": (_cuda_sign, _cuda),
    "rocm": (_rocm_sign, _rocm),
    "npu": (_npu_sign, _npu),
}
