"""The speed a GPU could have at most, by its name. Pure."""

from __future__ import annotations

# Dense 16-bit matrix TFLOPS: of the tensor cores, without sparsity (datasheets that give only the figure with sparsity
# say that it is twice the dense one). The first name that is part of the device's name counts. Sources, all NVIDIA:
# V100, A100, A10, H100, H200 datasheets; DGX B200 datasheet (8 GPUs, 36 PFLOPS with sparsity); AWS's G5 page for A10G.
_TFLOPS = (
    ("V100-PCIE", 112.0),
    ("V100", 125.0),
    ("A100", 312.0),
    ("A10G", 70.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("B200", 2250.0),
)


def peak_flops(device_name: str) -> float | None:
    """Dense 16-bit FLOPs per second of a GPU as torch names it; None for one that is not known here."""
    return next((tflops * 1e12 for name, tflops in _TFLOPS if name in device_name), None)
