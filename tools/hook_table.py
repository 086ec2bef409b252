"""Write the table of every SGLang function that this package hooks into docs/architecture.md, from the hook lists.

python tools/hook_table.py            writes it
python tools/hook_table.py --check    fails if what stands there is stale
"""

import inspect
import os
from collections.abc import Iterator
from pathlib import Path

from documents import DOCS, generated, write_generated
from env import fail
from sglang_triattn.config import Config
from sglang_triattn.patches import request_validation
from sglang_triattn.patches.calibration import engine as calibration
from sglang_triattn.patches.hooks import Hook
from sglang_triattn.patches.launch import handshake, server_args
from sglang_triattn.patches.observability import reporting
from sglang_triattn.patches.observability.census import VARIABLE, Census
from sglang_triattn.patches.scheduler.conversations import Conversations
from sglang_triattn.patches.scheduler.plugin import Compression

FILE = DOCS / "architecture.md"
NAME = "hook_table"

# Why an SGLang function is hooked, by where it is.
WHY = {
    ("Main process", "ServerArgs.add_cli_args"): "defines the flags",
    ("Main process", "ServerArgs.from_cli_args"): "reads the flags; once compression is asked for, installs the rest",
    ("Main process", "_wait_for_scheduler_ready"): "ends a launch in which a scheduler does not compress",
    ("Main process", "TokenizerManager.update_request_meta_info"): "puts the report into `meta_info`",
    ("Main process", "TokenizerManager._create_tokenized_object"): "refuses a bad request field, whichever endpoint",
    ("Main process", "serve_generate_request"): "refuses it with status 400 before a stream of `/generate` begins",
    ("Main process", "TokenizerManager.init_metric_collector_watchdog"): "counts refusals beside SGLang's own metrics",
    ("Data-parallel controller", "DataParallelController._record_scheduler_init_infos"): "reads the replicas' answers",
    ("Data-parallel controller", "DataParallelController.get_init_info"): "passes them on to the main process",
    ("Scheduler process", "Scheduler.__init__"): "finds the statistics, builds the compressor, rehearses its rounds",
    ("Scheduler process", "Scheduler.get_next_batch_to_run"): "runs the rounds that are due: the safe point",
    ("Scheduler process", "Scheduler.get_init_info"): "answers the launch: compresses, or why not",
    ("Scheduler process", "KVCacheConfigurator._profile_available_bytes"): (
        "allocates memory for scoring before the KV pool is sized"
    ),
    ("Scheduler process", "Scheduler.init_req_max_new_tokens"): (
        "attaches the request's settings; lets answers be longer than the pool"
    ),
    ("Scheduler process", "Scheduler.get_prefill_adder_class"): "reserves by the bound; resumes conversations",
    ("Scheduler process", "validate_input_length"): "lets a prompt that is compacted be longer than the pool",
    ("Scheduler process", "Scheduler._add_request_to_queue"): "holds to the pool a prompt that allows no rounds",
    ("Scheduler process", "Req._compute_max_prefix_len"): "leaves room beside the frozen prefix of a compacted prompt",
    ("Scheduler process", "ForwardBatch.init_new"): "gives tokens their logical positions",
    ("Scheduler process", "ForwardBatch._compute_mrope_positions"): "the same on several axes (M-RoPE)",
    ("Scheduler process", "ModelRunner.sample"): "draws a seeded first token at its logical position",
    ("Scheduler process", "Req.init_next_round_input"): "lets a prefill continue on a row that rounds have shortened",
    ("Scheduler process", "ScheduleBatch.prepare_for_extend"): "keeps `orig_seq_lens` the logical lengths",
    ("Scheduler process", "ScheduleBatch._swa_eviction_trigger"): "compares a window with the shortened row",
    ("Scheduler process", "ScheduleBatch._evict_swa"): "frees what a window leaves behind by its place in the row",
    ("Scheduler process", "UnifiedRadixCache.session_records"): "counts conversations' rows in SGLang's own books",
    ("Scheduler process", "Scheduler.flush_cache"): "forgets conversations whose memory was flushed",
    ("Scheduler process", "checkpoint_kv_cache"): "keeps the answer of a retracted request out of the tree",
    ("Scheduler process", "release_kv_cache"): "parks, publishes or retracts a row, and writes the report",
    ("Scheduler process", "PoolStats.get_decode_usage_msg_parts"): "adds the sums to the decode log line",
    ("Scheduler process", "SchedulerInternalStateController.get_internal_state"): "adds them to `/server_info`",
    ("Scheduler process", "SchedulerMetricsCollector.log_stats"): "sets gauges when SGLang sets its own",
    ("Scheduler process", "Scheduler.get_output_streamer_class"): "sends each finished request's report along",
    ("Scheduler process", "SchedulerWeightUpdaterManager.record_weight_version_after_update"): (
        "warns that the statistics are those of the old weights"
    ),
    ("Scheduler process with `SGLANG_TRIATTN_CHECK=1`", "Scheduler.on_idle"): "takes the census of an idle server",
    ("`calibrate --engine sglang`", "_wait_for_scheduler_ready"): "collects the ranks' answers, any refusal first",
    ("`calibrate --engine sglang`", "Scheduler.__init__"): "measures as soon as the scheduler is built",
    ("`calibrate --engine sglang`", "Scheduler.get_init_info"): "answers what was measured, or why nothing was",
}


def all_hooks() -> dict[str, list[Hook]]:
    """The hooks by the process that they run in."""
    assert os.environ.get(VARIABLE, "") in ("", "0"), f"unset {VARIABLE}, which adds its own hook to the scheduler's"
    main = (server_args.hooks(lambda _: None), handshake.main_hooks(), reporting.main_hooks())
    return {
        "Main process": [hook for group in (*main, request_validation.main_hooks()) for hook in group],
        "Data-parallel controller": handshake.controller_hooks(),
        "Scheduler process": Compression(Config()).hooks(),
        f"Scheduler process with `{VARIABLE}=1`": Census(Conversations(1)).hooks(),
        "`calibrate --engine sglang`": [
            *calibration.main_hooks(),
            *calibration.scheduler_hooks(calibration.Request("", "")),
        ],
    }


def short(target: str) -> str:
    """Class and method, or just the function."""
    *_, owner, name = target.split(".")
    return f"{owner}.{name}" if owner[0].isupper() else name


def place(hook: Hook) -> str:
    """Our file, relative to the root of the repository."""
    path = Path(inspect.getfile(hook.function))
    return "/".join(path.parts[path.parts.index("patches") :])


def lines() -> Iterator[str]:
    """The tables in Markdown, one per process."""
    unused = set(WHY)
    for process, hooks in all_hooks().items():
        yield f"\n**{process}**\n\n| SGLang's function | when | our file | why |\n|---|---|---|---|\n"
        for hook in hooks:
            key = (process, short(hook.target))
            if key not in WHY:
                fail(f"{hook.target} is hooked: say in {NAME}.WHY why.")
            unused.discard(key)
            yield f"| `{hook.target.removeprefix('sglang.srt.')}` | {hook.kind} | `{place(hook)}` | {WHY[key]} |\n"
    if unused:
        fail(f"{' '.join(min(unused))} is not hooked any more: remove it from {NAME}.WHY.")
    yield "\n"


def is_stale() -> bool:
    return generated(FILE, NAME)[1] != "".join(lines())


def main() -> None:
    write_generated(FILE, NAME, "".join(lines()), "hooks")


if __name__ == "__main__":
    main()
