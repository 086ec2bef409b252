"""Runs every kernel that a compaction round can need before the first request.

SGLang parts: the scheduler's streams and ranks.

Without this, Triton would compile during the first round, while every request waits; and a kernel that does not compile
on this GPU, or ranks that cannot reach each other, would take down a server that has requests. A warm-up launch reads
only the padding slot, which no request owns, and moves it onto itself: nothing is written.
"""

from __future__ import annotations

import itertools
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sglang_triattn.errors import TriAttentionError
from sglang_triattn.kernels.pools import PADDING_SLOT
from sglang_triattn.patches.model.eager_batch import forward_stream_of
from sglang_triattn.patches.model.layers import UnsupportedModel
from sglang_triattn.patches.rounds.launches import Launch, RoundShape, width_for

if TYPE_CHECKING:
    from sglang_triattn.patches.rounds.compressor import Compressor
    from sglang_triattn.patches.scheduler.row_copy import RowCopier
    from sglang_triattn.patches.sglang_types import Scheduler

logger = logging.getLogger(__name__)

MODEL_PASS = "eager_batch.py, _forward"
"""What `_place` says of an error inside SGLang while `EagerBatch` runs the model."""


def runs_kernels(device: torch.device | str) -> bool:
    """Whether rounds on this device run Triton kernels rather than the torch references."""
    return torch.device(device).type == "cuda"


def rehearse(scheduler: Scheduler, compressor: Compressor, copier: RowCopier | None = None) -> None:
    """Rehearses every kind of launch on the stream that rounds run on, and waits for the device.

    With window layers that have a KV pool of their own, also SGLang's kernel that frees slots of it.

    Does nothing for a server without kernels, which has nothing to compile.

    Args:
        scheduler: SGLang's Scheduler, fully built.
        compressor: its Compressor.
        copier: what copies its rows, if anything does.

    Raises what a kernel raises.
    """
    if not runs_kernels(scheduler.device):
        return
    device, stream = scheduler.device_module, forward_stream_of(scheduler)
    stream.wait_stream(device.current_stream())
    with device.stream(stream):
        for launch in rehearsals(compressor):
            compressor.score_and_move(launch)
        if compressor.windows is not None:
            compressor.windows.rehearse()
        if copier is not None:
            copier.rehearse()
    device.synchronize()


def rehearsals(compressor: Compressor) -> list[Launch]:
    """One launch of each kind that rounds can have, over the padding slot.

    Rows are as wide as what one program reads at once, and wider; the widest have the greatest possible length if that
    takes the layers in several launches.
    """
    from sglang_triattn.kernels.select.keep_kernel import BLOCK

    plan, config = compressor.workspace_plan, compressor.config
    _, layers = plan.launch(plan.longest)
    widest = plan.longest if layers < plan.layers else min(plan.longest, BLOCK + 1)
    made = []
    for num_tokens in sorted({min(plan.num_tokens, BLOCK), widest}):
        slots = torch.full((1, num_tokens), PADDING_SLOT, dtype=torch.int32, device=compressor.device)
        row_info = torch.tensor([[0], [0], [num_tokens], [num_tokens]], device=compressor.device)
        # Evict at least one token: otherwise nothing moves.
        num_kept = min(config.budget, num_tokens - 1)
        # The more kept tokens are not among the newest, the more of the criteria that share them get any.
        recents = {min(config.recent, num_kept), 0} if config.value_share else {min(config.recent, num_kept)}
        for strategy, recent in itertools.product(compressor.strategies, sorted(recents)):
            shape = RoundShape(num_kept, recent, strategy, num_kept, width_for(num_tokens))
            made.append(Launch(shape, (), slots, row_info))
    return made


@contextmanager
def in_one_sentence() -> Iterator[None]:
    """Turns any exception into a TriAttentionError for the user; the log has the whole error at level debug."""
    try:
        yield
    except TriAttentionError:
        raise
    except Exception as error:
        logger.debug("TriAttention could not start", exc_info=True)
        raise refusal_for(error) from error


def refusal_for(error: Exception) -> TriAttentionError:
    """The refusal that a user sees for an exception from building a Compressor or from its warm-up."""
    gist = _gist(error)
    if isinstance(error, torch.OutOfMemoryError):
        return TriAttentionError(
            f"The device has too little memory left for --enable-triattention ({gist}): lower --mem-fraction-static."
        )
    if isinstance(error, ValueError):
        # Ours: something that kernels cannot read, or statistics that contradict each other.
        return UnsupportedModel(gist)
    place, what = _place(error), f"{type(error).__name__}: {gist}"
    if place == MODEL_PASS:
        return TriAttentionError(
            f"A pass through the model failed, probably as it would without TriAttention ({what}): choose another "
            "--dtype or --attention-backend, or start without --enable-triattention to see whether SGLang serves it."
        )
    return TriAttentionError(
        f"TriAttention cannot run on this device, because {place} failed ({what}): "
        "install the versions of torch and triton that this SGLang requires, start with --log-level debug to see the "
        "whole error, or start without --enable-triattention."
    )


def _gist(error: Exception) -> str:
    """The line of an error's message that says what happened.

    Triton puts the code before that line; others put their hints after it.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = lines[-1] if type(error).__module__.startswith("triton") else lines[0]
    return line.rstrip(".")


def _place(error: Exception) -> str:
    """The kernel in which an error occurred, or else the code of this package that was running."""
    frames = traceback.extract_tb(error.__traceback__)
    root = Path(__file__).parents[2]
    ours = [frame for frame in frames if root in Path(frame.filename).parents]
    # What launches all of them says least.
    names = [(frame, Path(frame.filename)) for frame in ours]
    kernels = [frame for frame, path in names if root / "kernels" in path.parents and path.name != "launcher.py"]
    named = (kernels or ours)[-1:]
    return f"{Path(named[0].filename).name}, {named[0].name}" if named else "its start"
