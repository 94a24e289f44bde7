"""aten's operators on the device: those that compute are given over to the CPU's kernels."""

import torch

from virtual_ascend import _host

MEMORY = ("empty", "new_empty", "set_", "resize", "record_stream", "is_pinned", "_pin_memory", "pin_memory")
MEMORY += ("_local_scalar_dense", "_copy_from", "is_set_to", "set_data", "copy_", "clone", "contiguous", "_to_copy")
"""Beginnings of aten's operators that make, move or look at memory: torch-npu's own, or those of _host."""


CPU = ("CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
"""Keys under which an operator has a kernel that runs on the CPU."""


def host_calls() -> dict[str, int]:
    """Return how often each of aten's operators ran on the host."""
    return _host.calls()


def _give_over() -> list[str]:
    """Give every operator that torch-npu has, that computes, and that the CPU has too, over to the CPU."""
    names = []
    schemas = {f"{each.name}.{each.overload_name}".rstrip("."): each for each in torch._C._jit_get_all_schemas()}
    for qualified in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        space, _, name = qualified.partition("::")
        if space != "aten" or name.startswith(MEMORY) or qualified not in schemas:
            continue
        aliases = [each.alias_info for each in schemas[qualified].arguments if each.alias_info is not None]
        views = any(not each.is_write for each in aliases)
        if not views and any(torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key) for key in CPU):
            names.append(name)
    _host.give_over(names)
    return names


given_over = _give_over()
