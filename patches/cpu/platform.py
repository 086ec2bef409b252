"""Plain-CPU platform: SGLang's server on machines without an accelerator.

Entry point in the group `sglang.srt.platforms`. SGLang's own CPU engine needs the `sgl_kernel` CPU build; this platform
needs only torch, so everything except the CUDA kernels can be run and tested anywhere.
"""

import os

from sglang_triattn.patches.cpu import host_tier

# Default size of the pool in tokens. SGLang's own default is most of the machine's memory, which takes a minute to fill
# with zeros.
POOL_TOKENS = 65_536

PLATFORM_CLASS = "sglang_triattn.patches.cpu.platform.PlainCpuPlatform"


def activate() -> str | None:
    """Returns the platform's dotted class name, or None to stay out of SGLang's way.

    It stays out if an accelerator is present, or if the user chose SGLang's own CPU engine (SGLANG_USE_CPU_ENGINE=1).
    Source: `_resolve_platform`, sglang/srt/platforms/__init__.py.
    """
    import torch
    from sglang.srt import platforms

    accelerated = (
        torch.cuda.is_available()
        or platforms._is_cpu_available()
        or platforms._is_npu_available()
        or platforms._is_xpu_available()
        or platforms._is_musa_available()
        or platforms._is_mps_available()
        or os.environ.get("SGLANG_USE_MLX", "0").lower() in ("1", "true")
    )
    if accelerated:
        return None
    # Not at the top: on a GPU server, none of it is imported.
    from sglang_triattn.patches.cpu import backend_choice, process_memory
    from sglang_triattn.patches.hooks.hook_search import search_once

    backend_choice.offer()
    process_memory.offer()
    # What these offer are hooks in every process, the detokenizer's too.
    search_once()
    return PLATFORM_CLASS


def __getattr__(name: str):
    # Built on first use: importing SGLang's platform classes while SGLang is still discovering platforms
    # would import a half-initialised module.
    if name != "PlainCpuPlatform":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

    class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):
        """Out-of-tree platform for ordinary CPUs: torch-native attention, eager execution, no pinned memory."""

        _enum = PlatformEnum.OOT
        device_name = "cpu"
        device_type = "cpu"

        def get_device(self, device_id=None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
            # The base class promises a string, but the mixin returns a torch.device, which crashes a launch without
            # --device: SGLang splits the index off.
            return "cpu"

        def get_default_attention_backend(self) -> str:
            # For models that it cannot serve, `backend_choice` takes another.
            return "torch_native"

        def get_compile_backend(self, mode: str | None = None) -> str:
            return "eager"

        def is_pin_memory_available(self, device=None) -> bool:
            return False

        def support_mamba_cache_extra_buffer(self) -> bool:
            return True

        def get_speculative_cache_locs_fn(self):
            from sglang_triattn.patches.cpu import drafts

            return drafts.read_rows

        def supports_speculative_algorithm(self, algorithm: str) -> bool:
            from sglang_triattn.patches.cpu import speculation

            return algorithm in speculation.ALGORITHMS

        def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
            from sglang_triattn.patches.cpu import backend_choice

            return backend == backend_choice.NAME

        def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
            from sglang_triattn.patches.cpu import backend_choice

            return backend_choice.NAME

        def get_speculative_worker_cls(self, algorithm: str) -> None:
            # SGLang asks right before it imports its own.
            from sglang_triattn.patches.cpu import speculation

            speculation.install(algorithm)

        def apply_server_args_defaults(self, server_args) -> None:
            from sglang_triattn.patches.cpu import speculation

            speculation.allow_overlap()
            # The other io backends of --enable-hierarchical-cache are GPU kernels.
            server_args.hicache_io_backend = host_tier.IO_BACKEND
            if server_args.max_total_tokens is None and server_args.mem_fraction_static is None:
                server_args.max_total_tokens = POOL_TOKENS

        def init_backend(self) -> None:
            from sglang_triattn.patches.cpu import (
                attention_dp,
                backend_choice,
                experts,
                process_memory,
                state_layers,
            )

            attention_dp.install()
            backend_choice.register()
            experts.install()
            state_layers.install()
            host_tier.install()
            process_memory.install()

    globals()[name] = PlainCpuPlatform
    return PlainCpuPlatform
