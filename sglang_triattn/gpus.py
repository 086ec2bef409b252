"""Memory and memory bandwidth of GPUs, from the vendor's data sheets: what they promise, not what a kernel reaches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuModel:
    """One GPU.

    Attributes:
        memory_bytes: a "GB" of memory on a data sheet is 2^30 bytes. The driver keeps some of it.
        bandwidth: bytes per second that the memory delivers at most, 10^9 to a "GB/s".
    """

    memory_bytes: int
    bandwidth: float


GPUS = {
    # NVIDIA H100 Tensor Core GPU data sheet, H100 SXM: 80GB, 3.35TB/s.
    "H100": GpuModel(80 << 30, 3.35e12),
    # NVIDIA H200 Tensor Core GPU data sheet, H200 SXM: 141GB, 4.8TB/s.
    "H200": GpuModel(141 << 30, 4.8e12),
    # NVIDIA DGX B200 data sheet: 1,440GB and 64TB/s for eight GPUs.
    "B200": GpuModel(180 << 30, 8e12),
    # NVIDIA A100 Tensor Core GPU data sheet, A100 80GB SXM: 80GB HBM2e, 2,039GB/s.
    "A100": GpuModel(80 << 30, 2.039e12),
    # NVIDIA L40S data sheet: 48GB GDDR6 with ECC, 864GB/s.
    "L40S": GpuModel(48 << 30, 864e9),
    # NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090: 24GB GDDR6X, 1,008GB/s.
    "RTX4090": GpuModel(24 << 30, 1.008e12),
    # NVIDIA RTX Blackwell GPU architecture whitepaper, GeForce RTX 5090: 32GB GDDR7, 1,792GB/s.
    "RTX5090": GpuModel(32 << 30, 1.792e12),
}
