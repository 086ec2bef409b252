"""Every hook of the package by the process that it runs in, and what each is for: for the documents and `doctor`."""

from __future__ import annotations

from sglang_triattn.config import Config
from sglang_triattn.patches import request_validation
from sglang_triattn.patches.calibration import engine as calibration
from sglang_triattn.patches.compression import Compression
from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.launch import handshake, server_args
from sglang_triattn.patches.launch.census_switch import VARIABLE
from sglang_triattn.patches.observability import reporting
from sglang_triattn.patches.observability.census import Census
from sglang_triattn.patches.scheduler.conversations import Conversations

MAIN, CONTROLLER, SCHEDULER = "Main process", "Data-parallel controller", "Scheduler process"
CENSUS, CALIBRATION = f"Scheduler process with `{VARIABLE}=1`", "`calibrate --engine sglang`"

# What no longer works when a target differs, because then no hook of that process is applied.
WITHOUT = {
    MAIN: "every launch with --enable-triattention is refused",
    CONTROLLER: "every launch with --enable-triattention and --dp-size above 1 is refused",
    SCHEDULER: "every launch with --enable-triattention is refused",
    CENSUS: f"every launch with {VARIABLE}=1 is refused",
    CALIBRATION: "`sglang-triattn calibrate --engine sglang` is refused",
}

# Why an SGLang function is hooked, by where it is.
WHY = {
    (MAIN, "ServerArgs.add_cli_args"): "defines the flags",
    (MAIN, "ServerArgs.from_cli_args"): "reads the flags; once compression is asked for, installs the rest",
    (MAIN, "ServerArgs.check_server_args"): "reads `SGLANG_TRIATTENTION` where no flag or keyword could be read",
    (MAIN, "_wait_for_scheduler_ready"): "ends a launch in which a scheduler, or another node, does not compress",
    (MAIN, "TokenizerManager.update_request_meta_info"): "puts the report into `meta_info`",
    (MAIN, "OpenAIServingChat._build_chat_response"): "puts it into whole chats",
    (MAIN, "OpenAIServingChat._generate_chat_stream"): "puts it into streamed chats",
    (MAIN, "OpenAIServingCompletion._build_completion_response"): "puts it into whole completions",
    (MAIN, "OpenAIServingCompletion._generate_completion_stream"): "puts it into streamed ones",
    (MAIN, "TokenizerManager._create_tokenized_object"): (
        "gives a request the operator's preferred settings, and refuses a bad field, whichever endpoint"
    ),
    (MAIN, "serve_generate_request"): "refuses it with status 400 before a stream of `/generate` begins",
    (MAIN, "TokenizerManager.init_metric_collector_watchdog"): "counts refusals beside SGLang's own metrics",
    (CONTROLLER, "DataParallelController._record_scheduler_init_infos"): "reads the replicas' answers",
    (CONTROLLER, "DataParallelController.get_init_info"): "passes them on to the main process",
    (SCHEDULER, "Scheduler.__init__"): "finds the statistics, builds the compressor, rehearses its rounds",
    (SCHEDULER, "Scheduler.get_next_batch_to_run"): "runs the rounds that are due: the safe point",
    (SCHEDULER, "SchedulerDisaggregationDecodeMixin.get_next_disagg_decode_batch_to_run"): (
        "does the same on a decode server"
    ),
    (SCHEDULER, "DecodePreallocQueue._pre_alloc"): "admits a request there",
    (SCHEDULER, "DecodePreallocQueue._pre_alloc_fill_len"): "gives a retracted request a row as long as it had",
    (SCHEDULER, "DecodePreallocQueue._required_admission_tokens"): "reserves by the bound there",
    (SCHEDULER, "DecodePreallocQueue._prealloc_required_tokens"): "does so for requests that were retracted",
    (SCHEDULER, "DecodePreallocQueue._active_reserved_tokens"): "keeps what requests there lack to reach their bounds",
    (SCHEDULER, "DecodePreallocQueue._need_space_for_single_req"): "asks no more than that for them",
    (SCHEDULER, "ScheduleBatchDisaggregationDecodeMixin.prepare_for_prebuilt"): (
        "gives a joining batch the lengths of its rows"
    ),
    (SCHEDULER, "backup_kv_cache"): "copies shortened rows of retracted requests to the host",
    (SCHEDULER, "restore_kv_cache"): "copies them back",
    (SCHEDULER, "Scheduler.get_init_info"): "answers the launch: compresses, or why not",
    (SCHEDULER, "Scheduler.run_event_loop"): "lets a rank that has refused wait for its end",
    (SCHEDULER, "KVCacheConfigurator._profile_available_bytes"): (
        "allocates memory for scoring before the KV pool is sized"
    ),
    (SCHEDULER, "Scheduler.init_req_max_new_tokens"): (
        "attaches the request's settings; lets answers be longer than the pool"
    ),
    (SCHEDULER, "Scheduler.get_prefill_adder_class"): "reserves by the bound; resumes conversations",
    (SCHEDULER, "validate_input_length"): "lets a prompt that is compacted be longer than the pool",
    (SCHEDULER, "Scheduler._add_request_to_queue"): "holds to the pool a prompt that allows no rounds",
    (SCHEDULER, "Req._compute_max_prefix_len"): "leaves room beside the frozen prefix of a compacted prompt",
    (SCHEDULER, "ForwardBatch.init_new"): "gives tokens their logical positions",
    (SCHEDULER, "ForwardBatch._compute_mrope_positions"): "does the same on several axes (M-RoPE)",
    (SCHEDULER, "ModelRunner.sample"): "draws a seeded first token at its logical position",
    (SCHEDULER, "Req.init_next_round_input"): "lets a prefill continue on a row that rounds have shortened",
    (SCHEDULER, "FutureMap.resolve_seq_lens_cpu"): "takes evicted tokens off the lengths that a queued step published",
    (SCHEDULER, "FlashInferMultiStepDraftBackend.common_template"): (
        "lists the KV that each step of a draft reads by physical lengths"
    ),
    (SCHEDULER, "FlashInferMLAMultiStepDraftBackend.common_template"): "does the same for latent KV",
    (SCHEDULER, "TritonMultiStepDraftBackend.common_template"): "does the same with Triton's attention",
    (SCHEDULER, "_compute_chunked_req_next_prompt_token"): "gives a draft model the token behind a chunk",
    (SCHEDULER, "ScheduleBatch.prepare_for_extend"): "keeps `orig_seq_lens` the logical lengths",
    (SCHEDULER, "ScheduleBatch._swa_eviction_trigger"): "compares a window with the shortened row",
    (SCHEDULER, "ScheduleBatch._evict_swa"): "frees what a window leaves behind by its place in the row",
    (SCHEDULER, "SchedulerBatchResultProcessor._mamba_prefix_cache_update"): (
        "notes no copy of a state as that of a text of which something is evicted"
    ),
    (SCHEDULER, "UnifiedRadixCache.session_records"): "counts conversations' rows in SGLang's own books",
    (SCHEDULER, "Scheduler.flush_cache"): "forgets conversations whose memory was flushed",
    (SCHEDULER, "checkpoint_kv_cache"): "keeps the answer of a retracted request out of the tree",
    (SCHEDULER, "release_kv_cache"): "parks, publishes or retracts a row, and writes the report",
    (SCHEDULER, "PoolStats.get_decode_usage_msg_parts"): "adds the sums to the decode log line",
    (SCHEDULER, "SchedulerInternalStateController.get_internal_state"): "adds them to `/server_info`",
    (SCHEDULER, "SchedulerMetricsCollector.log_stats"): "sets gauges when SGLang sets its own",
    (SCHEDULER, "Scheduler.get_output_streamer_class"): "sends each finished request's report along",
    (SCHEDULER, "SchedulerWeightUpdaterManager.record_weight_version_after_update"): (
        "gives back rows of the old weights, and warns of their statistics"
    ),
    (SCHEDULER, "SchedulerWeightUpdaterManager.flush_cache_after_weight_update"): (
        "measures the new weights after the last part of an update, if asked to"
    ),
    (SCHEDULER, "SchedulerWeightUpdaterManager.resume_memory_occupation"): (
        "measures them once the KV pool is there again"
    ),
    (CENSUS, "Scheduler.on_idle"): "takes the census of an idle server",
    (CALIBRATION, "_wait_for_scheduler_ready"): "collects the ranks' answers, any refusal first",
    (CALIBRATION, "Scheduler.__init__"): "measures as soon as the scheduler is built",
    (CALIBRATION, "Scheduler.get_init_info"): "answers what was measured, or why nothing was",
}


def all_hooks() -> dict[str, list[Hook]]:
    """The hooks by the process that they run in."""
    main = (server_args.hooks(*[lambda _: None] * 3), handshake.main_hooks(), reporting.main_hooks())
    census = Census(Conversations(1)).hooks()
    # The scheduler's hooks include the census's where the environment asks for it.
    apart = {hook.target for hook in census}
    return {
        MAIN: [hook for group in (*main, request_validation.main_hooks()) for hook in group],
        CONTROLLER: handshake.controller_hooks(),
        SCHEDULER: [hook for hook in Compression(Config()).hooks() if hook.target not in apart],
        CENSUS: census,
        CALIBRATION: [
            *calibration.main_hooks(),
            *calibration.scheduler_hooks(server_args.CalibrationRequest("", "")),
        ],
    }


def short(target: str) -> str:
    """Class and method, or just the function."""
    *_, owner, name = target.split(".")
    return f"{owner}.{name}" if owner[0].isupper() else name
