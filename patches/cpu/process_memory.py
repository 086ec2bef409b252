"""KV transfer between the prefill and the decode server of one machine without a GPU: for tests.

SGLang parts: the choices of --disaggregation-transfer-backend (sglang/srt/arg_groups/choices.py), `TransferBackend`
(sglang/srt/disaggregation/utils.py), and `MooncakeKVManager` (sglang/srt/disaggregation/mooncake/conn.py), whose
protocol this is: who registers, what is sent where, aborts, timeouts. Only Mooncake's engine, a library that writes to
another server's memory by address, is replaced, by a system call of Linux that does so.

Both servers must belong to one user, and see each other's processes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
    from sglang.srt.disaggregation.utils import TransferBackend

    from sglang_triattn.patches.cpu.backend_choice import Step
    from sglang_triattn.patches.sglang_types import ServerArgs

NAME = "process_memory"
# Most pieces of memory in one call (IOV_MAX of Linux).
_PIECES = 1024
# prctl(2): lets processes that are not this one's parents write to its memory, where the system restricts that.
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)


def offer() -> None:
    """Makes it a choice of the launch. Imports nothing of SGLang that is not a leaf."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    if NAME in choices.DISAGG_TRANSFER_BACKEND_CHOICES:
        return
    choices.add_disagg_transfer_backend_choices([NAME])
    register_resolution_hook("handle_pd_disaggregation")(_before_disaggregation)


def _before_disaggregation(server_args: ServerArgs, previous: Step) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    previous(server_args)
    settings = resolving_view(server_args)
    if settings.disaggregation_transfer_backend != NAME:
        return
    # The main process looks the name up later, and builds no model.
    install()
    if settings.disaggregation_mode == "prefill":
        # SGLang sends cached K/V after a CUDA event of the queued step.
        declare_resolution(server_args, NAME, disable_overlap_schedule=True)


def install() -> None:
    """Lets this process look the name up."""
    from sglang.srt.disaggregation.utils import TransferBackend

    TransferBackend._missing_ = classmethod(_by_name)  # pyright: ignore[reportAttributeAccessIssue]


def _by_name(cls: type[TransferBackend], value: object) -> TransferBackend | None:
    if value != NAME:
        return None
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager, MooncakeKVSender

    MooncakeKVManager.init_engine = _init_engine
    # Otherwise SGLang copies them after a CUDA event of the queued step.
    MooncakeKVSender.supports_host_tensor_indices = False
    return cls.MOONCAKE


def _init_engine(self: MooncakeKVManager) -> None:
    self.engine = ProcessMemory()  # pyright: ignore[reportAttributeAccessIssue]


class _Piece(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("start", ctypes.c_void_p), ("length", ctypes.c_size_t))


class ProcessMemory:
    """What `MooncakeKVManager` calls of Mooncake's engine; a session is a process."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        # Fails where nothing is restricted.
        self._libc.prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)
        # SGLang spreads its work over threads by what follows the colon.
        self._session = f"{_started(os.getpid())}:{os.getpid()}"

    def get_session_id(self) -> str:
        return self._session

    def batch_register(self, ptrs: Sequence[int], lengths: Sequence[int]) -> int:
        return 0

    def batch_deregister(self, ptrs: Sequence[int]) -> int:
        return 0

    def send_probe(self, session: str) -> int:
        """0 if that process lives, else -1."""
        return -1 if _process(session) is None else 0

    def batch_transfer_sync(
        self, session: str, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """Copies `lengths` bytes from addresses here to addresses there; 0, or -1 if not all was copied."""
        for start in range(0, len(lengths), _PIECES):
            part = slice(start, start + _PIECES)
            process = _process(session)
            local, remote = (_pieces(each[part], lengths[part]) for each in (sources, targets))
            count, size = len(local), sum(lengths[part])
            if process is None or self._write(process, local, remote, count) != size:
                return -1
        return 0

    def _write(self, process: int, local: ctypes.Array, remote: ctypes.Array, count: int) -> int:
        write = self._libc.process_vm_writev
        write.restype = ctypes.c_ssize_t
        many = ctypes.c_ulong(count)
        return write(ctypes.c_int(process), local, many, remote, many, ctypes.c_ulong(0))


def _pieces(starts: Sequence[int], lengths: Sequence[int]) -> ctypes.Array:
    return (_Piece * len(starts))(*zip(starts, lengths, strict=True))


def _process(session: str) -> int | None:
    """The session's process; None if it has ended, though another may have its number."""
    started, _, process = session.partition(":")
    return int(process) if _started(int(process)) == started else None


def _started(process: int) -> str | None:
    """When a process started, in ticks since the machine did; None without such a process."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return None
