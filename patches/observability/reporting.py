"""Proof of activity: decode log line, `/server_info`, and `meta_info` of each response.

SGLang parts: `PoolStats` (sglang/srt/managers/scheduler_components/pool_stats_observer.py),
`SchedulerInternalStateController` (internal_state.py), `SchedulerOutputStreamer` (output_streamer.py),
`TokenizerManager.update_request_meta_info` (sglang/srt/managers/tokenizer_manager.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_triattn.config import Config
from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.observability import openai_reports
from sglang_triattn.patches.observability.stopped import record_stop
from sglang_triattn.patches.request.compressed import compression_of
from sglang_triattn.request.lifecycle import CompressedRequest
from sglang_triattn.rounds.plan import Report, Totals

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager

KEY = "triattention"
STOPPED = "triattention_stopped"

_NOTHING = Report(0, 0, 0, 0, 0, 0)


def scheduler_hooks(
    read: Callable[[], tuple[Config, Totals] | None],
    describe: Callable[[], dict[str, Any]],
    stopped: Callable[[], str | None],
) -> list[Hook]:
    """Hooks for the scheduler process.

    Args:
        read: returns its settings and totals, or None before it is built.
        describe: returns what else `/server_info` shows of a scheduler that is built.
        stopped: returns why compression has stopped, or None.
    """

    def add_to_log_line(parts: list[str], _: object) -> list[str]:
        found = read()
        if found is None:
            return parts
        totals = found[1]
        shown = (
            f"triattn rounds: {totals.rounds}",
            f"evicted tokens: {totals.evicted_tokens}",
            f"freed slots: {totals.freed_slots}",
        )
        return [*parts, *shown]

    def add_to_server_info(output: GetInternalStateReqOutput, *_: object) -> None:
        found = read()
        if found is not None:
            config, totals = found
            shown = {**dataclasses.asdict(config), **dataclasses.asdict(totals), **describe(), "stopped": stopped()}
            output.internal_state[KEY] = shown

    components = "sglang.srt.managers.scheduler_components"
    return [
        Hook(
            f"{components}.pool_stats_observer.PoolStats.get_decode_usage_msg_parts",
            "after",
            add_to_log_line,
            "self",
            why="adds the sums to the decode log line",
        ),
        Hook(
            f"{components}.internal_state.SchedulerInternalStateController.get_internal_state",
            "after",
            add_to_server_info,
            "self recv_req",
            why="adds the sums to `/server_info`",
        ),
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.get_output_streamer_class",
            "after",
            lambda streamer, _: reporting_streamer(streamer, stopped),
            "self",
            why="sends each finished request's report along",
        ),
    ]


def main_hooks() -> list[Hook]:
    """Hooks for the main process."""
    return [
        Hook(
            "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
            "around",
            _add_to_meta_info,
            "self meta_info state customized_info index finish_reason",
            why="puts the report into `meta_info`",
        ),
        *openai_reports.main_hooks(),
    ]


def reporting_streamer(
    streamer: type[SchedulerOutputStreamer], stopped: Callable[[], str | None]
) -> type[SchedulerOutputStreamer]:
    """A subclass of SGLang's output streamer that carries each finished request's report, and that of a stop.

    It is asked in every step, in most of which none of the requests has finished. SGLang releases the rows of all that
    finish in a batch before it asks about that batch, so without a release it looks at none. A request that is sent by
    itself may have finished without a row.
    """
    seen = -1

    class ReportingStreamer(streamer):
        has_additional_customized_info = True

        def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list]:
            nonlocal seen
            if len(reqs) <= 1:
                reports = list(map(_report, reqs))
            elif seen == CompressedRequest.releases:
                reports = [None] * len(reqs)
            else:
                seen, reports = CompressedRequest.releases, list(map(_report, reqs))
            info = {**streamer.build_additional_customized_info(self, reqs), KEY: reports}
            reason = stopped()
            return info if reason is None else {**info, STOPPED: [reason] * len(reqs)}

    return ReportingStreamer


def _report(request: Req) -> dict[str, Any] | None:
    """The report of a finished request; None for another."""
    return None if request.finished_reason is None else (compression_of(request).report or _NOTHING).to_dict()


def _add_to_meta_info(
    original: Callable,
    manager: TokenizerManager,
    meta_info: dict,
    state: ReqState,
    customized_info: dict,
    index: int,
    finish_reason: dict | None,
) -> None:
    """Puts a request's report into its `meta_info` as one object; SGLang would make a list of it."""
    others = {key: values for key, values in customized_info.items() if key not in (KEY, STOPPED)}
    original(manager, meta_info, state, others, index, finish_reason)
    if STOPPED in customized_info:
        record_stop(customized_info[STOPPED][index])
    report = customized_info.get(KEY, {index: None})[index]
    if report is not None:
        meta_info[KEY] = report
