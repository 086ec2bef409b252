"""Which tests of tests/server exercise a file of the product: they talk to live servers, and import little of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from import_graph import Checkout

FOLDER = "tests/server/"
CORE = ("test_capacity", "test_exactness", "test_known_failures", "test_lifecycle", "test_memory", "test_oracle")
"""What every compaction round of every server goes through."""
CALIBRATED = ("test_auto_stats", "test_calibrate_engine", "test_families")
DRAFTING = ("--speculative-algorithm", "ngram_account", "test_draft_trees")
MODELS = ("family_servers", "test_lora", "test_partial_rotary", "test_vision")

EXERCISED: dict[str, tuple[str, ...]] = {
    "kernels": CORE,
    "kernels/device_round.py": ("test_draft_models", "test_latent", "test_states"),
    "kernels/follower.py": DRAFTING,
    "kernels/round_times.py": ("test_metrics",),
    "kernels/score/latent_kernel.py": ("test_latent",),
    "kernels/score/reference.py": ("test_latent", "test_jitter"),
    "kernels/trial_compile.py": ("test_launch_warm_up",),
    "patches/calibration": CALIBRATED,
    "patches/calibration/stats_source.py": ("test_auto_stats", "test_oracle", "test_refusals"),
    "patches/compression.py": CORE,
    "patches/cpu": ("test_exactness", "test_families"),
    "patches/cpu/attention_dp.py": ("test_dp_attention", "test_disaggregated_models"),
    "patches/cpu/convolution.py": ("test_ngram", "test_states"),
    "patches/cpu/delta_rule.py": ("test_ngram", "test_states"),
    "patches/cpu/draft_model.py": DRAFTING,
    "patches/cpu/drafts.py": DRAFTING,
    "patches/cpu/experts.py": ("test_window_pools",),
    "patches/cpu/host_tier.py": ("test_hicache",),
    "patches/cpu/platform.py": ("test_entrances", "test_wheel"),
    "patches/cpu/process_memory.py": ("test_disaggregation",),
    "patches/cpu/speculation.py": DRAFTING,
    "patches/cpu/state_layers.py": ("test_ngram", "test_states"),
    "patches/cpu/state_space.py": ("test_ngram", "test_states"),
    "patches/doctor/hook_list.py": (),
    "patches/doctor/upstream_check.py": (),
    "patches/grpc_servicer.py": ("test_grpc",),
    "patches/hooks/hook.py": ("test_entrances", "test_refusals"),
    "patches/hooks/hook_search.py": ("test_exactness", "test_refusals"),
    "patches/hooks/registry.py": ("test_entrances", "test_refusals"),
    "patches/launch": ("test_entrances", "test_refusals"),
    "patches/launch/census_switch.py": ("test_served_census",),
    "patches/launch/checks.py": ("test_environment_settings",),
    "patches/launch/handshake.py": ("test_nodes", "test_grpc", "--dp-size", "--pp-size"),
    "patches/launch/nodes.py": ("test_nodes",),
    "patches/launch/preferred.py": ("test_operator_settings",),
    "patches/launch/same_launch.py": ("test_nodes",),
    "patches/launch/server_args.py": ("test_environment_settings", "test_nodes"),
    "patches/launch/workers.py": ("--tokenizer-worker-num",),
    "patches/model": ("test_oracle",),
    "patches/model/buffers.py": MODELS,
    "patches/model/draft.py": DRAFTING,
    "patches/model/eager_batch.py": CALIBRATED,
    "patches/model/inspect.py": MODELS,
    "patches/model/latent.py": ("test_latent", "test_families"),
    "patches/model/layers.py": MODELS,
    "patches/model/pinned.py": CORE,
    "patches/model/rotation.py": (*CALIBRATED, *MODELS),
    "patches/model/served_shape.py": (*CALIBRATED, *MODELS),
    "patches/observability": ("test_memory", "test_metrics"),
    "patches/observability/census.py": ("test_served_census",),
    "patches/observability/census_lengths.py": ("test_served_census", "test_beam_search"),
    "patches/observability/census_peers.py": ("test_window_pool_storms",),
    "patches/observability/notices.py": (
        "test_entrances",
        "test_operator_settings",
        "test_refusals",
        "test_weight_updates",
    ),
    "patches/observability/stopped.py": ("test_served_failures", "test_router"),
    "patches/plugin.py": ("test_entrances", "test_environment_settings", "test_replicas", "test_wheel"),
    "patches/ranks": CORE,
    "patches/ranks/pipeline.py": ("--pp-size",),
    "patches/ranks/tensor_parallel.py": ("--tp-size",),
    "patches/request": CORE,
    "patches/request/batch_lengths.py": (*DRAFTING, "test_disaggregation", "test_beam_search"),
    "patches/request/chunked_prefill.py": ("--chunked-prefill-size", "test_long_requests", "test_mixed_chunks"),
    "patches/request/compressed.py": (
        *("test_beam_search", "test_conversations", "test_reasoning", "test_sglang_kits", "test_structured_output"),
    ),
    "patches/request/draft_reserve.py": DRAFTING,
    "patches/request/failure.py": ("test_served_failures",),
    "patches/request/fields.py": (
        *("test_beam_search", "test_conversations", "test_reasoning", "test_sglang_kits", "test_structured_output"),
    ),
    "patches/request/integrity.py": ("test_served_failures",),
    "patches/request/linear_states.py": ("test_states",),
    "patches/request/positions.py": (*(*DRAFTING, "test_mixed_chunks", "test_seeded_sampling", "test_vision"),),
    "patches/request/row.py": (
        *("test_beam_search", "test_conversations", "test_reasoning", "test_sglang_kits", "test_structured_output"),
    ),
    "patches/request/window_pool.py": ("test_window_pools", "test_window_pool_storms", "test_window_drafts"),
    "patches/request_validation.py": (
        *("chat_client", "test_beam_search", "test_conversations", "test_junk", "test_programs", "test_readme_clients"),
    ),
    "patches/request_names.py": ("test_request_names", "test_tokenizer_workers"),
    "patches/rounds": CORE,
    "patches/rounds/compressor.py": ("test_draft_models", "test_jitter", "test_mixed_chunks", "storm"),
    "patches/rounds/due.py": ("test_draft_models", "test_mixed_chunks", "storm"),
    "patches/rounds/launches.py": ("test_beam_search", "test_mixed_chunks", "test_turn_inputs"),
    "patches/rounds/leveller.py": ("test_level_rounds", "storm"),
    "patches/rounds/memory_pressure.py": ("storm",),
    "patches/rounds/queued_drafts.py": DRAFTING,
    "patches/rounds/recovery.py": ("test_served_failures",),
    "patches/rounds/rehearsal.py": ("test_launch_warm_up",),
    "patches/rounds/window_peers.py": ("test_window_pools", "test_window_pool_storms", "test_window_drafts"),
    "patches/scheduler": CORE,
    "patches/scheduler/circuit_breaker.py": ("test_served_failures",),
    "patches/scheduler/conversations.py": ("conversation", "test_sessions"),
    "patches/scheduler/decode_windows.py": ("test_disaggregated_models",),
    "patches/scheduler/disaggregation.py": (
        "test_disaggregation",
        "test_disaggregated_drafts",
        "test_disaggregated_models",
        "test_disaggregated_settings",
    ),
    "patches/scheduler/idle_rows.py": ("conversation", "test_turn_inputs"),
    "patches/scheduler/release.py": ("test_reasoning", "test_hicache", "test_sessions", "storm"),
    "patches/worker_app.py": ("--tokenizer-worker-num", "test_entrances", "test_refusals"),
    "sglang_triattn/__init__.py": ("test_wheel",),
    "sglang_triattn/calibration": CALIBRATED,
    "sglang_triattn/capacity.py": ("test_serving_benchmarks",),
    "sglang_triattn/census.py": ("test_served_census",),
    "sglang_triattn/census_windows.py": ("test_window_pool_storms",),
    "sglang_triattn/cli/calibrate.py": ("test_calibrate_engine",),
    "sglang_triattn/cli/connecting.py": ("test_tls",),
    "sglang_triattn/cli/main.py": ("test_verify",),
    "sglang_triattn/cli/top.py": ("test_metrics",),
    "sglang_triattn/cli/top_view.py": ("test_metrics",),
    "sglang_triattn/cli/verify.py": ("test_verify",),
    "sglang_triattn/compatibility": ("test_refusals",),
    "sglang_triattn/compatibility/traits.py": (*MODELS, "test_latent"),
    "sglang_triattn/config.py": ("test_entrances", "test_oracle", "test_readme_clients", "test_refusals"),
    "sglang_triattn/model": ("test_refusals",),
    "sglang_triattn/model/families.py": (*MODELS, "test_latent"),
    "sglang_triattn/model/kinds.py": MODELS,
    "sglang_triattn/model/layers.py": MODELS,
    "sglang_triattn/model/layout.py": MODELS,
    "sglang_triattn/model/rope.py": MODELS,
    "sglang_triattn/profiles.py": ("test_entrances",),
    "sglang_triattn/request": (*CORE, "test_conversations", "test_reasoning"),
    "sglang_triattn/request/options.py": ("test_clients", "test_junk"),
    "sglang_triattn/rounds": CORE,
    "sglang_triattn/rounds/inputs.py": ("test_conversations", "test_turn_inputs"),
    "sglang_triattn/rounds/level.py": ("test_level_rounds",),
    "sglang_triattn/rounds/rules.py": ("test_latent", "test_window_pools"),
    "sglang_triattn/rounds/plan.py": ("test_long_requests", "storm"),
    "sglang_triattn/rounds/scoring.py": ("test_partial_rotary", "test_latent"),
    "sglang_triattn/stats": ("test_auto_stats", "test_oracle", "test_refusals"),
    "sglang_triattn/transformers_cache": ("test_cache_against_server", "test_quality_server"),
    "sglang_triattn/variable.py": ("test_calibrate_engine", "test_environment_settings", "test_refusals"),
    "sglang_triattn/verify": ("test_verify",),
    "sglang_triattn/verify/connection.py": ("test_tls",),
}
"""By file or folder of the product: test files by name, and words (a flag, a fixture, a module of tests/support) by
which others are recognised. A file has the entries of its folders too."""


def entries(file: str) -> Iterator[tuple[str, str]]:
    """(place, word) of every entry for a file of the product."""
    for place in (file, *(str(folder) for folder in Path(file).parents)):
        for word in EXERCISED.get(place, ()):
            yield place, word


def has_word(checkout: Checkout, test: str, word: str) -> bool:
    """Whether a word stands in a test file, as an import, a name, or a word of a string."""
    source = checkout.sources[test]
    return any(word in words for words in (source.imports, source.names, source.words))


def server_tests(checkout: Checkout, file: str) -> dict[str, str]:
    """Test files of tests/server that exercise a file of the product, and why."""
    found: dict[str, str] = {}
    own = Path(file).stem.removesuffix("_kernel")
    for test in (each for each in checkout.tests if each.startswith(FOLDER)):
        imported = {each for name in checkout.sources[test].imports for each in checkout.imported(name)}
        if file in imported and Path(file).name != "__init__.py":
            found[test] = f"imports {file}"
        elif Path(test).stem == f"test_{own}":
            found[test] = f"has the name of {file}"
        for place, word in entries(file):
            if test in found:
                break
            if word == Path(test).stem:
                found[test] = f"exercises {place}"
            elif not word.startswith("test_") and has_word(checkout, test, word):
                found[test] = f"exercises {place}: it says {word}"
    return found
