"""The end of a request whose compression failed.

SGLang parts: `FINISH_ABORT` and `Req.to_finish` (sglang/srt/managers/schedule_batch.py),
`Scheduler._pending_chunked_abort_req`.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from sglang_triattn.patches.request.compressed import compression_of, write_tree_rule

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

    from sglang_triattn.patches.sglang_types import Scheduler


def end_with_error(request: Req, message: str, evicted: int = 0) -> None:
    """Has SGLang end a running request with status 500, and keeps what it holds out of the tree.

    SGLang computes one more step for it, whose token it does not send.

    Args:
        message: one sentence for the client.
        evicted: tokens evicted from its row by a round that was not recorded.
    """
    compression_of(request).fail(evicted)
    write_tree_rule(request)
    request.to_finish = _server_error(message)
    request.finished_len = len(request.output_ids)


def end_prefill_with_error(scheduler: Scheduler, request: Req, message: str) -> None:
    """The same for a request between two chunks of its prefill; SGLang ends it before the next step."""
    compression_of(request).fail(0)
    write_tree_rule(request)
    request.discard_output_reason = _server_error(message)
    scheduler._pending_chunked_abort_req = request


def _server_error(message: str) -> FINISH_ABORT:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
