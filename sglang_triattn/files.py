"""Atomic file writes: a file appears complete or not at all. And whose files may be believed."""

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Atomically replaces `path` with a safetensors file whose mode follows the umask.

    Raises:
        OSError or SafetensorError: it cannot be written; `path` is then unchanged.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    # Refuses a name that exists, links included.
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    mode = stat.S_IMODE(os.fstat(handle).st_mode)
    os.close(handle)
    try:
        # It puts a private file in the place of this one.
        save_file(dict(tensors), temporary, dict(metadata))
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def who_else_writes(path: Path) -> str | None:
    """Who else than this user and root may write a file or folder, for a sentence; None if no one may.

    A link counts as its target, and no one else writes what does not exist. A group may write: many systems give each
    user a group of their own.

    Raises:
        OSError: it cannot be looked at.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}"
    return "can be written by everybody" if found.st_mode & stat.S_IWOTH else None


def remove_unfinished(path: Path) -> None:
    """Removes the temporary files that a killed `write_safetensors` of `path` left in its folder."""
    for leftover in path.parent.glob(f"{path.name}*.tmp"):
        leftover.unlink(missing_ok=True)
