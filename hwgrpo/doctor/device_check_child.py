"""Runs as a script in a child process: computes on one device and compares. One line before and after every trial.

Its question: {"backend": name, "index": which device, "what": "device" or "ranks", "path": folders of the packages};
for ranks also {"rank", "world", "store": a file they meet in}.
"""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

MIB = 1024**2


class Skip(Exception):
    """A trial does not apply here; the message says why."""


class Wrong(Exception):
    """The device did not do what it should; the message says what it did."""


def expect(holds: bool, message: str) -> None:
    if not holds:
        raise Wrong(message)


def say(**fields: Any) -> None:
    print("\nhwgrpo.doctor " + json.dumps(fields), flush=True)


def trial(what: str, work: Any) -> None:
    """Run one trial and print how it went."""
    say(begun=what)
    try:
        say(what=what, state="PASS", told=work())
    except Skip as reason:
        say(what=what, state="SKIP", told=str(reason))
    except Wrong as wrong:
        say(what=what, state="FAIL", told=str(wrong))
    except Exception as error:  # what goes wrong is what the parent wants to know
        say(what=what, state="FAIL", told=f"{type(error).__name__}: {error}"[:500])


def allocate(device: Any) -> str:
    """Fill 64 MiB on the device and read them back."""
    import torch

    block = torch.arange(16 * MIB, dtype=torch.int32, device=device.torch_device)
    total = int(block.sum(dtype=torch.int64).item())
    expected = (16 * MIB) * (16 * MIB - 1) // 2
    expect(total == expected, f"64 MiB written and read back sum to {total}, not {expected}")
    return f"64 MiB on {device.name}"


def matmul(device: Any) -> str:
    """Multiply bf16 matrices on the device; the products of the same numbers in fp64 on the host are the truth."""
    import torch

    if torch.bfloat16 not in device.compute_dtypes:
        raise Skip(f"{device.name} does not compute in bf16")
    torch.manual_seed(0)
    a, b = (torch.randn(256, 256).to(torch.bfloat16) for _ in range(2))
    truth = a.double() @ b.double()
    product = (a.to(device.torch_device) @ b.to(device.torch_device)).cpu().double()
    error = float((product - truth).norm() / truth.norm())
    expect(error < 2**-7, f"bf16 products are off by {error:.1e} of their norm, more than {2**-7:.1e}")
    return f"relative error {error:.1e}"


def kernel_trials(device: Any) -> Iterator[tuple[str, Any]]:
    """Yield every implementation of every kernel op that can run here, with its comparison."""
    from hwgrpo_kernels import Key, default_registry
    from hwgrpo_kernels.op import shape_class

    dtypes = dict.fromkeys(device.compute_dtypes[:1])
    for op in default_registry.ops():
        shape = op.shapes[1]
        for implementation in default_registry.implementations(op.name):
            if not implementation.is_for(device.backend.device_type):
                continue
            for dtype in dtypes:
                key = Key(op.name, device.backend.device_type, dtype, shape_class(shape.V))
                what = f"kernel {op.name}={implementation.name} {str(dtype).removeprefix('torch.')}"
                yield what, lambda o=op, i=implementation, k=key, s=shape: kernel(device, o, i, k, s)


def kernel(device: Any, op: Any, implementation: Any, key: Any, shape: Any) -> str:
    """Compare one implementation with its op's definition in fp64 on the host, within the op's own tolerance."""
    reason = implementation.reason_against(key)
    if reason is not None:
        raise Skip(reason)
    from torch import Tensor

    inputs = op.inputs(shape, key.dtype, str(device.torch_device), "plain", 0)

    def wide(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.cpu().double().clone() if value.is_floating_point() else value.cpu()

    truth = op.definition(**{name: wide(value) for name, value in inputs.items()})
    found = implementation.function()(**inputs)
    allowed, worst = op.tolerance[key.dtype], 0.0
    for name, value, true in zip(op.outputs, _tensors(found), _tensors(truth), strict=True):
        got = value.detach().cpu().double()
        expect(got.shape == true.shape, f"{name} has the shape {list(got.shape)}, not {list(true.shape)}")
        expect(bool(got.isfinite().all()), f"{name} is not finite")
        if name == "out":
            error, limit = float((got - true).norm() / true.norm()), allowed.backward
        else:
            errors = (got - true).abs() / (1 + true.abs())
            error, limit = float(errors.max()) if errors.numel() else 0.0, allowed.forward
        expect(error <= limit, f"{name} is off by {error:.1e}, more than {limit:.1e}")
        worst = max(worst, error)
    return f"largest error {worst:.1e}"


def _tensors(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple) else (result,)


def memory(device: Any) -> str:
    """See whether memory that is let go of is free for others again, which a sleeping rollout engine relies on."""
    import torch

    device.synchronize()
    device.empty_cache()
    before = device.memory().free
    if before is None:
        raise Skip("a CPU has no device memory to report")
    size = min(512 * MIB, before // 4)
    block = torch.zeros(size, dtype=torch.uint8, device=device.torch_device)
    device.synchronize()
    taken = before - device.memory().free
    del block
    device.empty_cache()
    kept = before - device.memory().free
    expect(taken >= size // 2, f"{size // MIB} MiB were allocated, and {taken // MIB} MiB fewer are free")
    expect(kept <= size // 4, f"of {size // MIB} MiB, {kept // MIB} MiB are not free after empty_cache")
    return f"{(taken - kept) // MIB} of {taken // MIB} MiB free again after empty_cache"


def all_reduce(device: Any, question: dict[str, Any]) -> str:
    """Add up one vector over two ranks."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    rank, world = question["rank"], question["world"]
    dist.init_process_group(
        device.comm_backend, init_method=f"file://{question['store']}", rank=rank, world_size=world,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    try:
        vector = torch.full((1024,), float(rank + 1), device=device.torch_device)
        dist.all_reduce(vector)
        expected = world * (world + 1) / 2
        expect(bool((vector == expected).all()), f"the sum over ranks is {vector[0].item()}, not {expected}")
    finally:
        dist.destroy_process_group()
    return f"{world} ranks, {device.comm_backend}"


def main(question: dict[str, Any]) -> None:
    """Run the trials that the question asks for."""
    sys.path[:0] = [folder for folder in question["path"] if folder not in sys.path]
    from hwgrpo_backends import get
    from hwgrpo_backends.environment import apply

    backend = get(question["backend"])
    apply(backend, "train", os.environ)
    import torch
    from hwgrpo_backends.device import Device

    torch.set_num_threads(1)
    device = Device(backend, question["index"])
    device.set_device()
    if question["what"] == "ranks":
        trial("all-reduce", lambda: all_reduce(device, question))
        return
    trial("allocate", lambda: allocate(device))
    trial("bf16 matmul", lambda: matmul(device))
    for what, work in kernel_trials(device):
        trial(what, work)
    trial("memory given back", lambda: memory(device))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
