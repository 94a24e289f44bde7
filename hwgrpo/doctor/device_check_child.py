"""Script of a child process: self-tests of one device. Prints a JSON line before and after each.

Its request: {"backend": name, "index": of the device, "what": "device" or "ranks", "path": folders of the packages};
for ranks also {"rank", "world", "store": file of their rendezvous}.
"""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

MIB = 1024**2


class Skipped(Exception):
    """A self-test does not apply here; the message is the reason."""


class Failed(Exception):
    """The device gave a wrong result; the message describes it."""


def expect(holds: bool, message: str) -> None:
    if not holds:
        raise Failed(message)


def print_line(**fields: Any) -> None:
    print("\nhwgrpo.doctor " + json.dumps(fields), flush=True)


def run_test(name: str, test: Any) -> None:
    """Run one self-test and print its result."""
    print_line(started=name)
    try:
        print_line(test=name, state="PASS", detail=test())
    except Skipped as reason:
        print_line(test=name, state="SKIP", detail=str(reason))
    except Failed as failure:
        print_line(test=name, state="FAIL", detail=str(failure))
    except Exception as error:  # every failure is a result
        print_line(test=name, state="FAIL", detail=f"{type(error).__name__}: {error}"[:500])


def allocate(device: Any) -> str:
    """Fill 64 MiB on the device and read them back."""
    import torch

    block = torch.arange(16 * MIB, dtype=torch.int32, device=device.torch_device)
    total = int(block.sum(dtype=torch.int64).item())
    expected = (16 * MIB) * (16 * MIB - 1) // 2
    expect(total == expected, f"64 MiB written and read back sum to {total}, not {expected}")
    return f"64 MiB on {device.name}"


def matmul(device: Any) -> str:
    """Multiply bf16 matrices on the device and compare with fp64 on the host."""
    import torch

    if torch.bfloat16 not in device.compute_dtypes:
        raise Skipped(f"{device.name} does not compute in bf16")
    torch.manual_seed(0)
    a, b = (torch.randn(256, 256).to(torch.bfloat16) for _ in range(2))
    truth = a.double() @ b.double()
    product = (a.to(device.torch_device) @ b.to(device.torch_device)).cpu().double()
    error = float((product - truth).norm() / truth.norm())
    expect(error < 2**-7, f"bf16 products are off by {error:.1e} of their norm, more than {2**-7:.1e}")
    return f"relative error {error:.1e}"


def kernel_tests(device: Any) -> Iterator[tuple[str, Any]]:
    """Yield a self-test of every implementation of every kernel op that can run here."""
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
                name = f"kernel {op.name}={implementation.name} {str(dtype).removeprefix('torch.')}"
                yield name, lambda o=op, i=implementation, k=key, s=shape: kernel(device, o, i, k, s)


def kernel(device: Any, op: Any, implementation: Any, key: Any, shape: Any) -> str:
    """Compare one implementation with its op's definition in fp64 on the host, within the op's own tolerance."""
    reason = implementation.reason_against(key)
    if reason is not None:
        raise Skipped(reason)
    from torch import Tensor

    inputs = op.inputs(shape, key.dtype, str(device.torch_device), "plain", 0)

    def to_fp64(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.cpu().double().clone() if value.is_floating_point() else value.cpu()

    truth = op.definition(**{name: to_fp64(value) for name, value in inputs.items()})
    computed = implementation.function()(**inputs)
    allowed, worst = op.tolerance[key.dtype], 0.0
    for name, value, true in zip(op.outputs, _tensors(computed), _tensors(truth), strict=True):
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
    """Check that released memory is free for other processes, which a sleeping rollout engine relies on."""
    import torch

    device.synchronize()
    device.empty_cache()
    before = device.memory().free
    if before is None:
        raise Skipped("a CPU has no device memory to report")
    size = min(512 * MIB, before // 4)
    block = torch.zeros(size, dtype=torch.uint8, device=device.torch_device)
    device.synchronize()
    allocated = before - device.memory().free
    del block
    device.empty_cache()
    kept = before - device.memory().free
    expect(allocated >= size // 2, f"{size // MIB} MiB were allocated, but {allocated // MIB} MiB fewer are free")
    expect(kept <= size // 4, f"of {size // MIB} MiB, {kept // MIB} MiB are not free after empty_cache")
    return f"{(allocated - kept) // MIB} of {allocated // MIB} MiB free again after empty_cache"


def collectives(device: Any, request: dict[str, Any]) -> str:
    """Run the collectives of strategies over two ranks, in each compute dtype."""
    from datetime import timedelta

    import torch.distributed as dist
    from hwgrpo_backends.conformance_rank import compare

    rank, world = request["rank"], request["world"]
    dist.init_process_group(
        device.comm_backend, init_method=f"file://{request['store']}", rank=rank, world_size=world,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    try:
        dtypes = [str(dtype).removeprefix("torch.") for dtype in device.compute_dtypes]
        done, wrong = compare(rank, world, device.torch_device, dtypes)
        expect(not wrong, "; ".join(wrong))
    finally:
        dist.destroy_process_group()
    return f"{len(done)} of {world} ranks, {device.comm_backend}"


def main(request: dict[str, Any]) -> None:
    """Run the requested self-tests."""
    sys.path[:0] = [folder for folder in request["path"] if folder not in sys.path]
    from hwgrpo_backends import get
    from hwgrpo_backends.environment import apply

    backend = get(request["backend"])
    apply(backend, "train", os.environ)
    import torch
    from hwgrpo_backends.device import Device

    torch.set_num_threads(1)
    device = Device(backend, request["index"])
    device.set_device()
    if request["what"] == "ranks":
        run_test("collectives", lambda: collectives(device, request))
        return
    run_test("allocate", lambda: allocate(device))
    run_test("bf16 matmul", lambda: matmul(device))
    for name, test in kernel_tests(device):
        run_test(name, test)
    run_test("memory released", lambda: memory(device))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
