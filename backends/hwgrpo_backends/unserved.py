"""Accelerators that there is no built-in backend for, and what shows them: training beside one uses the CPU."""

from __future__ import annotations

DEVICE_TYPES = {"xpu": "Intel GPUs (xpu)", "mps": "the Apple GPU (mps)", "hpu": "Intel Gaudi (hpu)"}
"""Device type of torch -> its devices."""

SIGNS = {
    # /dev/accel/accel0 alone may be of another driver
    DEVICE_TYPES["hpu"]: ("dev/accel/accel_controlD*", "dev/hl_controlD*"),
    "AWS Neuron": ("dev/neuron[0-9]*",),
    "Moore Threads GPUs": ("dev/mtgpu.[0-9]*",),
    "Cambricon MLUs": ("dev/cambricon_dev[0-9]*",),
    "MetaX GPUs": ("dev/mxcd",),
}
"""Accelerator -> patterns of paths below /."""
