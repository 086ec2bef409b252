"""The progress file of an interrupted calibration: the sums over its finished units."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from sglang_triattn.calibration.job import CalibrationError, CalibrationJob
from sglang_triattn.calibration.query_sums import Sums
from sglang_triattn.files import remove_unfinished, write_safetensors

FORMAT = "sglang-triattn-partial-sums"


@dataclass(frozen=True, eq=False)
class Progress:
    """Progress of a job.

    Attributes:
        done: number of finished units.
        sums: sums over their tokens, or None.
    """

    done: int = 0
    sums: Sums | None = None


def partial_path(out: Path) -> Path:
    """Path of the progress file of a calibration that writes `out`."""
    return out.with_suffix(".partial.safetensors")


def load_progress(job: CalibrationJob) -> Progress:
    """Progress of an earlier run of the same job; none if its file is missing, unreadable or of another job."""
    if job.partial is None or not Path(job.partial).is_file():
        return Progress()
    try:
        with safe_open(job.partial, framework="pt") as file:
            fields = file.metadata() or {}
            if fields.get("format") != FORMAT or fields.get("key") != job.key:
                return Progress()
            sums = Sums(
                torch.view_as_complex(file.get_tensor("total")),
                file.get_tensor("abs_total"),
                file.get_tensor("unrotated"),
                int(fields["count"]),
                int(fields["head_dim"]),
            )
            return Progress(int(fields["done"]), sums)
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError):
        return Progress()


def save_progress(job: CalibrationJob, progress: Progress) -> None:
    """Atomically writes the job's file; does nothing for a job without a file, or before there are sums.

    Raises:
        CalibrationError: it cannot be written.
    """
    if job.partial is None or progress.sums is None:
        return
    sums = progress.sums
    fields = {"format": FORMAT, "key": job.key, "done": progress.done, "count": sums.count, "head_dim": sums.head_dim}
    # safetensors has no complex numbers of this width.
    tensors = {
        "total": torch.view_as_real(sums.total).contiguous(),
        "abs_total": sums.abs_total.contiguous(),
        "unrotated": sums.unrotated.contiguous(),
    }
    try:
        write_safetensors(Path(job.partial), tensors, {name: str(value) for name, value in fields.items()})
    except (OSError, SafetensorError) as error:
        raise CalibrationError(
            f"Cannot write {job.partial} ({error}): choose an --out in a folder with room for it."
        ) from error


def remove_progress(job: CalibrationJob) -> None:
    """Removes the job's file, and any temporary files that a killed run left."""
    if job.partial is not None:
        Path(job.partial).unlink(missing_ok=True)
        remove_unfinished(Path(job.partial))
