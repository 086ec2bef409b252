"""Settings that cannot work refuse to start, with one sentence that names the setting."""

from __future__ import annotations

import json

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import forked_servers
from harness import SABOTAGE, altered_stats, compressed_args, install_plugin, only_models, plain_args, python_path
from launches import launch
from sets import wide
from sglang_triattn.compatibility.rule import Server
from sglang_triattn.compatibility.rules import FIRST_RULES
from sglang_triattn.compatibility.traits import Traits
from sglang_triattn.config import Config
from sglang_triattn.variable import VARIABLE

# Importing all of SGLang's models would cost each launch several seconds.
LLAMA = only_models("llama")
# (flags, environment, words that the sentence must contain)
SETTINGS = [
    (
        ["--speculative-algorithm", "NGRAM", "--enable-deterministic-inference", "--attention-backend", "triton"],
        {},
        ["--enable-deterministic-inference does not work", "--speculative-algorithm NGRAM"],
    ),
    (["--disaggregation-mode", "prefill"], {}, ["--disaggregation-mode", "prefill"]),
    (["--enable-two-batch-overlap"], {}, ["--enable-two-batch-overlap"]),
    (["--enable-streaming-session"], {}, ["--enable-streaming-session"]),
    (["--kv-canary", "log"], {}, ["--kv-canary"]),
    (["--enable-return-routed-experts"], {}, ["--enable-return-routed-experts"]),
    (
        ["--tokenizer-worker-num", "2"],
        {"SGLANG_HTTP_SERVER_APP_PATH": "mine:app"},
        ["SGLANG_HTTP_SERVER_APP_PATH is mine:app", "--tokenizer-worker-num 2", "use --tokenizer-worker-num 1"],
    ),
    (["--use-ray"], {}, ["--use-ray"]),
    (["--context-length", "96"], {}, ["first round at 100 tokens or more", "the context limit is 96 tokens"]),
    (["--enable-nvidia-megakernel"], {}, ["--enable-nvidia-megakernel does not work", "decode steps"]),
    (["--enable-amd-monokernel"], {}, ["--enable-amd-monokernel does not work", "decode steps"]),
    (["--decode-attention-backend", "minicpm_flashinfer"], {}, ["--decode-attention-backend minicpm_flashinfer"]),
    (["--model-impl", "mindspore"], {}, ["--model-impl mindspore", "use --model-impl auto"]),
    ([], {"SGLANG_RUST_SERVER": "1"}, ["SGLANG_RUST_SERVER"]),
    ([], {"SGLANG_USE_HND_KVCACHE": "1"}, ["SGLANG_USE_HND_KVCACHE"]),
    (
        [],
        {"SGLANG_TRIATTN_CHECK": "on"},
        ["SGLANG_TRIATTN_CHECK is 'on': set it to 1 to check every slot at every round, or to 0."],
    ),
    (["--triattention-budget", "0"], {}, ["--triattention-budget", "at least 1"]),
    (["--triattention-recent", "65"], {}, ["--triattention-recent (65)", "--triattention-budget (64)"]),
    (["--triattention-interval", "-3"], {}, ["--triattention-interval", "at least 1"]),
    (["--triattention-selection", "best"], {}, ["--triattention-selection", "best", "shared-mean, union"]),
    (["--triattention-aggregation", "median"], {}, ["--triattention-aggregation", "median", "mean, max"]),
    (["--triattention-budget-scope", "all"], {}, ["--triattention-budget-scope", "all", "private, total"]),
    (["--triattention-stats", "missing.safetensors"], {}, ["missing.safetensors", "calibrate"]),
    (
        ["--preferred-sampling-params", '{"custom_params": {"triattention": {"budgte": 7}}}'],
        {},
        ["In --preferred-sampling-params, custom_params.triattention.budgte is not a setting of a request"],
    ),
    (
        ["--preferred-sampling-params", '{"custom_params": {"triattention": {"budget": 65}}}'],
        {},
        ["In --preferred-sampling-params, custom_params.triattention.budget is 65", "from 1 to 64"],
    ),
    (
        ["--preferred-sampling-params", '{"custom_params": {"triattention": {"conversation": "a"}}}'],
        {},
        ["In --preferred-sampling-params, custom_params.triattention.conversation is 'a'", "leave it out"],
    ),
    (["--preferred-sampling-params", "[7]"], {}, ["--preferred-sampling-params is [7]", "must be a JSON object"]),
]


# (flags, SGLANG_TRIATTENTION, words that the sentence must contain, none if the launch goes on)
FROM_ENVIRONMENT = [
    ([], "--enable-triattention --triattention-budget 512", []),
    (["--enable-two-batch-overlap"], "--enable-triattention", ["--enable-two-batch-overlap does not work"]),
    (["--context-length", "96"], "--enable-triattention", ["the context limit is 96 tokens"]),
    (
        ["--triattention-budget", "7"],
        "--enable-triattention",
        ["--triattention-budget is set at this launch", "variable SGLANG_TRIATTENTION is '--enable-triattention'"],
    ),
    ([], "--triattention-budget 7", ["In the environment variable SGLANG_TRIATTENTION, ", "add that flag"]),
]


DRAFTS = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
BRANCHES = (
    "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8 "
    "--speculative-draft-attention-backend flashmla"
)


@pytest.fixture(scope="module")
def outcomes(forkserver, tiny, tmp_path_factory):
    """How resolution ends, by kind: for each of SETTINGS; for plain command lines, a good one among them; for each of
    FROM_ENVIRONMENT; for drafts of a model: refused branches, one of the three numbers, all of them, and none."""
    plain = ["--model-path", tiny.path]
    command = [*plain, *compressed_args(tiny)]
    drafting = [*command, "--speculative-draft-model-path", tiny.path, "--speculative-algorithm", "EAGLE3"]
    kinds = {
        "settings": [([*command, *flags], env) for flags, env, _ in SETTINGS],
        "switch": [
            ([*plain, "--triattention-budget", "7"], {}),
            ([*plain, *plain_args(), "--enable-triattention"], {}),
            (command, {}),
            ([*plain, "--enable-two-batch-overlap"], {}),
        ],
        "environment": [([*plain, *flags], {VARIABLE: text}) for flags, text, _ in FROM_ENVIRONMENT],
        "drafts": [([*drafting, *words.split()], {}) for words in (BRANCHES, "--speculative-eagle-topk 1", DRAFTS, "")],
    }
    folder = tmp_path_factory.mktemp("resolved")
    found = iter(forked_servers.resolve(forkserver, folder, [case for cases in kinds.values() for case in cases]))
    return {kind: [next(found) for _ in cases] for kind, cases in kinds.items()}


@pytest.mark.parametrize(
    "index", range(len(SETTINGS)), ids=lambda i: "-".join(map(str, SETTINGS[i][0] or SETTINGS[i][1]))
)
def test_setting_is_refused(outcomes, index):
    """Prevents a server from starting in a mode in which it would corrupt KV or silently run dense."""
    ended = outcomes["settings"][index]
    assert ended.code == 2
    assert "Traceback" not in ended.output
    for word in SETTINGS[index][2]:
        assert word in ended.error


@pytest.mark.parametrize("dtype", ["mxfp8", "nvfp4", "fp4_mx_block16"])
def test_blocks_of_scaled_keys_are_refused(dtype):
    """Prevents keys from being read without the scales of their blocks. SGLang itself first demands a GPU for them."""
    (rule,) = (rule for rule in FIRST_RULES if rule.field == "kv_cache_dtype")
    server = Server(Config(), {"kv_cache_dtype": dtype}, Traits("m"))
    assert rule.refuses(server)
    assert f"--kv-cache-dtype {dtype} does not work" in rule.message(server)


def test_flags_need_the_switch_and_nothing_else(outcomes):
    """Prevents settings without effect, and a switch that does not suffice."""
    without_switch, alone, good, plain = outcomes["switch"]
    assert without_switch.code == 2
    assert "--enable-triattention" in without_switch.error
    assert alone.code == good.code == plain.code == 0, (alone.output, good.output, plain.output)


@pytest.mark.parametrize("index", range(len(FROM_ENVIRONMENT)))
def test_a_command_line_reads_the_environment(outcomes, index):
    """Prevents a dense server whose settings stand in the environment alone, and one with two sources of settings."""
    ended, (_, _, expected) = outcomes["environment"][index], FROM_ENVIRONMENT[index]
    assert ended.code == (2 if expected else 0), ended.output
    for words in expected:
        assert words in ended.error


@pytest.mark.parametrize("index", [0, 1])
def test_what_a_refused_draft_is_advised_is_accepted(outcomes, index):
    """Prevents advice that ends in a bare assertion of SGLang, which takes the numbers of a draft together."""
    refused, good, chosen = outcomes["drafts"][index], *outcomes["drafts"][2:]
    assert refused.code == 2
    assert "Traceback" not in refused.output
    assert refused.error.strip().endswith(f" use {DRAFTS}.")
    assert good.code == chosen.code == 0, (good.output, chosen.output)


# These folders hold only config.json: looking for a weight would be an error of its own.
SHAPE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
FAMILIES = [
    wide("HunYuanMoEV1ForCausalLM", {"model_type": "hunyuan_v1_moe", "use_cla": True}, "share KV"),
    wide("GlmMoeDsaForCausalLM", {"model_type": "glm_moe_dsa", "index_topk": 2048}, "an indexer selects"),
]


@pytest.mark.parametrize(("architecture", "fields", "reason"), FAMILIES, ids=lambda value: str(value)[:20])
def test_model_is_refused_by_its_file(tmp_path, architecture, fields, reason):
    """Prevents minutes of loading weights for a model whose config.json shows that it is not supported."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **SHAPE, **fields}))
    ended = launch("--model-path", tmp_path, "--enable-triattention")
    assert ended.code == 2
    assert architecture in ended.error
    assert reason in ended.error
    assert "Traceback" not in ended.output
    assert ended.cpu_seconds < 30


FETCHED_LATER = """
import json, pathlib, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

load_plugins()
record = prepare_server_args(["--model-path", sys.argv[1], "--enable-triattention"])
file = pathlib.Path(sys.argv[1], "config.json")
file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_chunk_size": 64}))
record.resolve_once()
"""


def test_a_file_that_comes_later_is_read_too(forkserver, tiny, tmp_path):
    """Prevents a model that SGLang has to fetch first from passing unchecked."""
    model, script = tmp_path / "model", tmp_path / "fetched_later.py"
    model.mkdir()
    (model / "config.json").write_text((tiny.path / "config.json").read_text())
    script.write_text(FETCHED_LATER)
    ended = forked_servers.run_script(forkserver, script, [str(model)], LLAMA)
    assert ended.code == 2
    assert "its attention is local to chunks" in ended.error


def test_broken_stats_are_refused_first(tmp_path):
    """Prevents waiting for a model whose statistics cannot be read; here there is no model at all."""
    (tmp_path / "broken.safetensors").write_text("{}")
    words = ("--enable-triattention", "--triattention-stats", tmp_path / "broken.safetensors")
    ended = launch("--model-path", tmp_path / "nowhere", *words)
    assert ended.code == 2
    assert "broken.safetensors" in ended.error
    assert "Traceback" not in ended.output
    assert ended.cpu_seconds < 15


@pytest.fixture(scope="module")
def foreign_stats(tiny, tmp_path_factory):
    """Statistics like the tiny model's, but measured with a different rotary base."""
    path = tmp_path_factory.mktemp("stats") / "foreign.safetensors"
    return altered_stats(tiny, path, lambda tensors: tensors["inv_freq"][3].mul_(1.01))


def test_foreign_stats_end_the_launch(forkserver, tiny, foreign_stats, tmp_path):
    """Prevents scoring with another model's frequencies; only the loaded model shows it, in another process."""
    words = ["--model-path", tiny.path, *compressed_args(tiny, "--triattention-stats", foreign_stats)]
    ended = forked_servers.run_module(forkserver, ["sglang.launch_server", *words], LLAMA, tmp_path / "log")
    assert ended.code == 2
    assert "inv" in ended.error.lower() or "frequenc" in ended.error.lower()
    assert "calibrate" in ended.error
    assert "Traceback (most recent call last)" not in ended.output.split("TriAttention")[-1]


def test_stats_of_another_model_are_refused_before_its_weights_load(forkserver, tiny, tmp_path):
    """Prevents minutes of loading before a wrong file is noticed."""
    path = tmp_path / "other.safetensors"
    with safe_open(tiny.stats, "pt") as file:
        save_file(load_file(tiny.stats), path, {**file.metadata(), "fingerprint": "e" * 32})
    words = ["--model-path", tiny.path, *compressed_args(tiny, "--triattention-stats", path)]
    ended = forked_servers.run_module(forkserver, ["sglang.launch_server", *words], LLAMA, tmp_path / "log")
    assert ended.code == 2
    assert "model fingerprint" in ended.error
    assert "Load weight begin" not in ended.output


def test_a_pool_without_room_for_a_round_ends_the_launch(forkserver, tiny, tmp_path):
    """Prevents a server that says it is active and can never have a round; only the scheduler knows its pool."""
    words = ["--model-path", tiny.path, *compressed_args(tiny, "--max-total-tokens", "96")]
    ended = forked_servers.run_module(forkserver, ["sglang.launch_server", *words], LLAMA, tmp_path / "log")
    assert ended.code == 2
    assert "first round at 100 tokens or more" in ended.error
    assert "the KV pool holds 96 tokens" in ended.error


ENGINE = """
import json, os, sys
import psutil, sglang

def main():
    settings = json.loads(sys.argv[1])
    try:
        sglang.Engine(**settings)
    except ValueError as error:
        left = [child for child in psutil.Process().children(recursive=True) if child.status() != "zombie"]
        left = [child for child in left if "sglang::" in " ".join(child.cmdline())]
        print("REFUSED", error, len(left))

if __name__ == "__main__":
    main()
"""


def test_engine_raises_and_leaves_no_process(forkserver, tiny, foreign_stats, tmp_path):
    """Prevents an Engine that refused from holding memory in schedulers that are out of reach."""
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    settings = {
        "model_path": str(tiny.path),
        "enable_triattention": True,
        "triattention_stats": str(foreign_stats),
        "skip_tokenizer_init": True,
        "max_total_tokens": 4096,
        "dtype": "float32",
    }
    ended = forked_servers.run_script(forkserver, script, [json.dumps(settings)], LLAMA)
    refused = next((line for line in ended.output.splitlines() if line.startswith("REFUSED")), "")
    assert refused.endswith(" 0"), ended.output[-3000:]
    assert "calibrate" in refused


def test_scheduler_without_the_plugin_ends_the_launch(forkserver, tiny, tmp_path):
    """Prevents a server that runs dense because the plugin failed to load in the scheduler, which SGLang only logs."""
    install_plugin(tmp_path / "plugin", "sabotage", SABOTAGE)
    command = ["sglang.launch_server", "--model-path", tiny.path, *compressed_args(tiny)]
    env = {**LLAMA, "PYTHONPATH": python_path(tmp_path / "plugin")}
    ended = forked_servers.run_module(forkserver, command, env, tmp_path / "log")
    assert ended.code == 2
    assert "did not confirm" in ended.error


def test_shadowed_package_ends_the_launch(tiny, tmp_path):
    """Prevents a dense server when a folder at the user's place hides the package."""
    (tmp_path / "sglang_triattn").mkdir()
    # The user's PYTHONPATH would come after the folder, and find the package after all.
    ended = launch("--model-path", tiny.path, *compressed_args(tiny), cwd=str(tmp_path), env={"PYTHONPATH": ""})
    assert ended.code == 2
    assert "--enable-triattention" in ended.output
