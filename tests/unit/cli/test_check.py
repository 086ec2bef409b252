"""`sglang-triattn check`: whether a model and flags will be compressed."""

import argparse
import json
import re
import shlex
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from sglang.srt.server_args import ServerArgs

from documents import DOCS, fenced_blocks, section
from plan_cases import CONFIGS, QWEN3_32B, ROOT
from sglang_triattn.cli import check
from sglang_triattn.cli import main as cli
from sglang_triattn.compatibility.rule import Rule, Server
from sglang_triattn.compatibility.rules import FIRST_RULES, RULES
from sglang_triattn.compatibility.traits import Traits
from sglang_triattn.config import Config
from sglang_triattn.model.rope import Rope
from sglang_triattn.stats.file import QueryStats, save_stats

# Values to try for a setting; None stands for a switch.
VALUES = (None, "2", "buffer_only", "prefill", "minicpm_flashattn", "something")
DRAFTS = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")


def rules_only_for(settings: dict, **traits) -> list[Rule]:
    """The rules that hold for such a server and model, and for no plain one."""
    server, plain = Server(Config(), settings, Traits("m", **traits)), Server(Config(), {}, Traits("m"))
    return [rule for rule in RULES if rule.when(server) and not rule.when(plain)]


def message(rule: Rule, value: object, **settings) -> str:
    return rule.message(Server(Config(), {**settings, rule.field: value}, Traits("m"))) + "\n"


DRAFT_MODEL_RULES = [
    rule
    for rule in rules_only_for({"speculative_algorithm": "STANDALONE"})
    # Those that branch have a test of their own.
    if rule not in rules_only_for({"speculative_algorithm": "NGRAM"}) and rule.field != "speculative_eagle_topk"
]
STATE_RULES = [
    rule
    for rule in rules_only_for({}, linear_states=True)
    if rule.field not in ("disaggregation_mode", "speculative_algorithm")
]


def fact(output: str, name: str) -> str:
    return re.search(rf"^{name} +(.*)$", output, re.MULTILINE)[1]


def test_the_docs_show_what_the_command_prints(monkeypatch, capsys):
    """Prevents an example in docs/compatibility.md that the command no longer prints."""
    monkeypatch.chdir(ROOT)
    text = section(DOCS / "compatibility.md", "Your model")
    command = re.search(r"^    sglang-triattn (check .*)$", text, re.MULTILINE)[1]
    assert cli.main(shlex.split(command)) == 0
    assert fenced_blocks(text) == [("", capsys.readouterr().out)]


def test_it_imports_neither_torch_nor_sglang():
    """Prevents an answer that takes many seconds."""
    code = (
        "import sys; from sglang_triattn.cli import main as cli\n"
        f"assert cli.main(['check', '--model', {str(QWEN3_32B)!r}, '--page-size', '16']) == 0\n"
        "assert not {'torch', 'transformers', 'sglang', 'triton'} & set(sys.modules), 'heavy import'"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_refusals_are_one_sentence_with_status_1(run_check):
    """Prevents a script that takes a refused model for a compressed one, or for a wrong flag."""
    status, output, error = run_check("deepseek-v3.2")
    assert (status, error) == (1, "")
    assert re.fullmatch(r"The model \S+ \(DeepseekV32ForCausalLM\) .* an indexer selects.*: .*\.\n", output)


def test_json_says_the_same(run_check):
    """Prevents two answers to one question."""
    options = ("--tp-size", "2", "--page-size", "16", "--kv-cache-dtype", "fp8_e4m3", "--port=1")
    _, text, _ = run_check("glm-4.6", *options)
    status, output, _ = run_check("glm-4.6", *options, "--json")
    content = json.loads(output)
    assert status == 0
    assert (content["compressed"], content["refusal"], content["page_size"]) == (True, None, 16)
    assert content["layers"] == {"full": list(range(92))}
    (scored,) = content["scored"]
    assert (scored["layers"], scored["kv_heads"], scored["head_dim"]) == (list(range(92)), 8, 128)
    assert (scored["rotated_dims"], scored["unrotated_dims"]) == (64, 64)
    size = 376832 // 2 // 2
    assert content["kv"] == {
        "dtype": "fp8_e4m3",
        "gpus": 2,
        "bytes_per_token": size,
        "bytes_per_token_in_window": 0,
        "bytes_freed_per_evicted_token": size,
    }
    assert fact(text, "KV") == f"{size:,} bytes per token held on each of 2 GPUs (fp8_e4m3)"
    assert fact(text, "freed") == f"{size:,} bytes per evicted token, whole pages of 16 tokens at a time"
    assert content["not_judged"] == ["--port"] == fact(text, "not judged").split()
    assert content["settings"]["budget"] == 2048
    status, output, _ = run_check("deepseek-v3.2", "--json")
    content = json.loads(output)
    assert (status, content["compressed"], len(content["scored"])) == (1, False, 1)
    assert run_check("deepseek-v3.2")[1] == content["refusal"] + "\n"


def test_flags_reach_the_answer(run_check):
    """Prevents flags that are read and then forgotten."""
    union = "--triattention-selection=union"
    rounds = fact(run_check("qwen3-32b", union, "--triattention-budget", "999")[1], "rounds")
    assert rounds == "budget 999, interval 128, newest 199 kept; union at page size 1: remap"
    assert "union at page size 64: fill" in run_check("qwen3-32b", union, "--page-size", "64")[1]
    assert "page size 64: slide" in run_check("qwen3-32b", "--triattention-recency=0.5", "--page-size", "64")[1]
    assert "nothing, because the value share 1" in run_check("qwen3-32b", "--triattention-value-share", "1")[1]
    assert run_check("qwen3-32b", "--json-model-override-args", '{"attention_chunk_size": 8192}')[0] == 1
    _, output, _ = run_check("qwen3-32b", "--enable-triattention", "--trust-remote-code", "--lora-paths", "a", "b")
    assert fact(output, "not judged") == "--lora-paths"
    assert "not judged" not in run_check("qwen3-32b")[1]
    assert run_check(str(CONFIGS / "qwen3-32b.json"))[0] == 0
    assert cli.main(["check", "--model-path", str(QWEN3_32B), "--tensor-parallel-size", "8"]) == 0


@pytest.mark.parametrize("refusal", FIRST_RULES, ids=lambda refusal: refusal.field)
def test_refused_settings(run_check, refusal):
    """Prevents a setting that a launch refuses, but this command does not."""
    value = next(value for value in VALUES if refusal.applies(int(value) if value == "2" else value or True))
    name = "--" + refusal.field.replace("_", "-")
    status, output, _ = run_check("qwen3-32b", name, *([value] if value else []))
    assert (status, output) == (1, message(refusal, value or True))
    if value:
        assert run_check("qwen3-32b", f"{name}={value}")[:2] == (status, output)


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ("--context-length 2180", "the context limit is 2180 tokens"),
        ("--max-total-tokens=2180", "the KV pool holds 2180 tokens"),
        ("--triattention-budget 40960", "the context limit is 40960 tokens"),
    ],
)
def test_servers_that_would_never_compress(run_check, flags, what):
    """Prevents a yes for a server no request of which gets as long as its first round needs."""
    status, output, _ = run_check("qwen3-32b", *flags.split())
    assert (status, what in output, "none would ever be compressed" in output) == (1, True, True)
    longer = flags.replace("2180", "2181").replace("40960", "40000")
    status, output, _ = run_check("qwen3-32b", *longer.split())
    assert status == 0
    assert "not judged" not in output


def test_deterministic_inference(run_check):
    """Prevents rounds that depend on other requests where answers must not, and a refusal of the default."""
    alone = ("qwen3-32b", "--enable-deterministic-inference")
    assert run_check(*alone)[0] == 0
    assert run_check(*alone, "--triattention-rounds-per-step", "0")[0] == 0
    status, output, _ = run_check(*alone, "--triattention-rounds-per-step", "8")
    assert status == 1
    assert "and --triattention-rounds-per-step 8, because a first round that comes early" in output


def test_speculative_decoding(run_check):
    """Prevents drafts that are accepted here and refused by a launch, or the reverse."""
    alone = ("--speculative-algorithm", "ngram")
    assert run_check("qwen3-32b", *alone)[0] == 0
    for model in ("deepseek-v3", "qwen3-next-80b-a3b", "qwen3.5-27b", "falcon-h1-7b", "granite-4-h-small"):
        assert run_check(model, *alone)[0] == 0
    assert run_check("qwen3-32b", *alone, "--disable-overlap-schedule")[0] == 0
    assert run_check("qwen3-next-80b-a3b", *alone, "--enable-hierarchical-cache")[0] == 0
    refused = {
        ("qwen3-32b", "--enable-deterministic-inference"): "--enable-deterministic-inference does not work",
        ("lfm2-1.2b",): "a state instead of KV are not tested with such drafts",
        ("qwen3-next-80b-a3b", "--triattention-conversations", "auto"): "use --triattention-conversations off.",
    }
    for words, reason in refused.items():
        status, output, _ = run_check(*words, *alone)
        assert status == 1
        assert reason in output
        assert run_check(*words)[0] == 0


@pytest.mark.parametrize("refusal", DRAFT_MODEL_RULES, ids=lambda refusal: refusal.field)
def test_settings_refused_with_a_draft_model(run_check, refusal):
    """Prevents a setting that a launch refuses with a draft model, but this command does not."""
    ranks = ("--tp-size", "2")
    drafts = (*ranks, *DRAFTS, "--speculative-algorithm")
    value = next(value for value in (True, 2, "aiter") if refusal.applies(value))
    flag = ("--" + refusal.field.replace("_", "-"), *([] if value is True else [str(value)]))
    for algorithm in ("standalone", "EAGLE", "EAGLE3", "NEXTN"):
        assert run_check("qwen3-32b", *drafts, algorithm)[0] == 0
        status, output, _ = run_check("qwen3-32b", *drafts, algorithm, *flag)
        assert (status, output) == (1, message(refusal, value, speculative_algorithm=algorithm))
    assert run_check("qwen3-32b", *ranks, *flag)[0] == 0


def test_mixed_chunks_with_drafts(run_check):
    """Prevents mixed chunks where SGLang has them, and a refusal where it turns them off by itself."""
    flags = ("--enable-mixed-chunk", *DRAFTS, "--speculative-algorithm")
    for algorithm in ("EAGLE", "EAGLE3", "NEXTN"):
        status, output, _ = run_check("qwen3-32b", *flags, algorithm)
        assert (status, output.split(" does not")[0]) == (1, "--enable-mixed-chunk")
    for algorithm in ("STANDALONE", "NGRAM"):
        assert run_check("qwen3-32b", *flags, algorithm)[0] == 0


def test_harmless_values_of_refused_settings(run_check):
    """Prevents refusing a flag for its name."""
    flags = "--pp-size 1 --disaggregation-mode null --attention-backend fa3 --model-impl auto --dp 4"
    assert run_check("qwen3-32b", *flags.split())[0] == 0
    assert run_check("qwen3-32b", "--enable-dp-attention", "--dp-size", "1")[0] == 0


def test_attention_data_parallelism(run_check):
    """Prevents KV of a rank counted as if --tp-size split the heads, and groups that ranks do not fill."""
    split = [
        run_check("qwen3-32b", "--tp-size", "4", *flags.split())[1] for flags in ("", "--enable-dp-attention --dp 2")
    ]
    assert ("on each of 4 GPUs" in split[0], "on each of 2 GPUs" in split[1]) == (True, True)
    _, output, error = run_check("qwen3-32b", "--tp-size", "4", "--attn-dp-size", "3")
    assert (output, "does not split into 3 groups" in error) == ("", True)


@pytest.mark.parametrize("refusal", STATE_RULES, ids=lambda refusal: refusal.field)
def test_settings_refused_with_states(run_check, refusal):
    """Prevents a launch that refuses what this command lets pass, because some layers keep a state."""
    flag = "--" + refusal.field.replace("_", "-")
    status, output, _ = run_check("qwen3-next-80b-a3b", flag)
    assert (status, output.split()[0]) == (1, flag)
    assert refusal.reason in output
    assert run_check("qwen3-32b", flag)[0] == 0


def test_settings_refused_in_stages(run_check):
    """Prevents a launch that refuses what this command lets pass, because of pipeline stages, and the other way."""
    ngram = ("--speculative-algorithm", "NGRAM")
    assert run_check("qwen3-32b", *ngram)[0] == 0
    status, output, _ = run_check("qwen3-32b", "--pp-size", "2", *ngram)
    assert (status, output.split()[0]) == (1, ngram[0])
    for model in ("qwen3-32b", "gpt-oss-20b", "qwen2.5-vl-7b", "nemotron-nano-9b-v2"):
        assert run_check(model, "--pp-size", "2")[0] == 0


def test_other_names_are_those_of_sglang():
    """Prevents a refused setting that is given under its other name, and names that SGLang does not have."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    found = {
        name.removeprefix("--").replace("-", "_"): action.dest
        for action in parser._actions
        for name in action.option_strings
        if action.dest in check._KNOWN | {"tp_size"}
    }
    others = {name: field for name, field in found.items() if name != field}
    assert others | {"dp": "dp_size"} == check.ALIASES
    # As for any flag, argparse takes the start of its name.
    parsed = parser.parse_args(["--model-path", "m", "--dp", "4", "--tp", "2"])
    assert (parsed.dp_size, parsed.tp_size) == (4, 2)


def test_heads_that_do_not_split(run_check):
    """Prevents a launch that fails only after the weights are loaded."""
    status, output, _ = run_check("qwen3-32b", "--tp", "3")
    assert status == 1
    assert "64 query heads and 8 KV heads" in output
    assert "do not split evenly over --tp-size 3: use a number that divides them.\n" in output


def test_a_window_bounds_the_budget(run_check):
    """Prevents a budget in which a window layer loses tokens that it still sees."""
    status, output, _ = run_check("gemma-2-9b")
    assert status == 1
    assert output.startswith(
        "--triattention-budget is 2048, but some layers of this model attend to a sliding window of"
    )
    assert output.endswith("use at least 4096.\n")
    status, output, _ = run_check("gemma-2-9b", "--triattention-budget", "6144")
    assert (status, fact(output, "layers")) == (0, "21 full, 21 with a window of 4,096; 16 query and 8 KV heads")
    assert "newest 4,096 kept" in fact(output, "rounds")
    status, output, _ = run_check("gemma-2-9b", "--triattention-budget", "6144", "--triattention-recent", "64")
    assert status == 1
    assert "--triattention-recent is 64" in output


def test_long_rope_needs_a_short_context(run_check, tmp_path):
    """Prevents scores by frequencies that SGLang gives up as soon as a request of the batch is long."""
    rope = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    content = json.loads((CONFIGS / "phi-4.json").read_text())
    content |= {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_scaling": rope}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    status, output, _ = run_check(str(file))
    assert status == 1
    assert "in a context of more than 4,096 tokens, because" in output
    assert output.endswith("use --context-length 4096, or start without --enable-triattention.\n")
    assert run_check(str(file), "--context-length", "4097")[0] == 1
    assert run_check(str(file), "--context-length", "4096")[0] == 0
    assert run_check(str(file), "--context-length", "4096", "--speculative-algorithm", "NGRAM")[0] == 1
    # As MiniCPM-4, which was trained with its whole context.
    rope["original_max_position_embeddings"] = content["max_position_embeddings"] = 32768
    del content["original_max_position_embeddings"]
    file.write_text(json.dumps(content))
    assert run_check(str(file))[0] == 0


def test_a_pool_for_windows(run_check):
    """Prevents counting as freed what SGLang frees by itself."""
    _, output, _ = run_check("gpt-oss-20b")
    assert "12 full, 12 with a window of 128 in a pool of its own" in output
    assert fact(output, "freed") == "24,576 bytes per evicted token"
    assert "24,576 more while the token is in the window" in output


def test_latent_kv(run_check):
    """Prevents figures for expanded keys and values, a split of what every GPU holds, and values not chosen."""
    size = 61 * 576 * 2
    for ranks in ("1", "8"):
        status, output, _ = run_check("deepseek-v3", "--tp-size", ranks, "--page-size", "64")
        assert (status, fact(output, "layers")) == (0, "61 with latent KV; 128 query and 1 KV heads")
        assert fact(output, "scored") == "61 layers, all 576 dims of a head, of which RoPE turns 64"
        assert fact(output, "freed") == f"{size:,} bytes per evicted token, whole pages of 64 tokens at a time"
    assert json.loads(run_check("kimi-k2", "--json")[1])["settings"]["value_share"] == 0
    status, output, _ = run_check("glm-4.7-flash", "--triattention-value-share", "1")
    assert status == 1
    assert "--triattention-value-share is 1.0, but this model has latent KV" in output


def test_dims_that_rope_does_not_turn(run_check):
    """Prevents telling users that all of a head is scored when a part is, or the reverse."""
    assert fact(run_check("glm-4.6")[1], "scored") == "92 layers, all 128 dims of a head, of which RoPE turns 64"
    assert fact(run_check("smollm3-3b")[1], "scored") == (
        "27 layers, all 128 dims of a head; 9 layers, all 128 dims of a head, of which RoPE turns none"
    )


def stats_of(heads: int, **changes) -> QueryStats:
    """Statistics as Qwen3-32B's, but for their numbers."""
    mean = torch.zeros(64, heads, 64, dtype=torch.complex64)
    frequencies = 1e6 ** (-torch.arange(64, dtype=torch.float64) / 64)
    values = {"num_kv_heads": 8, "fingerprint": "f" * 32, "token_count": 9, "source": "a test"}
    rope = Rope(frequencies, 1.0, 128, "half")
    return QueryStats(mean, mean.abs(), head_dim=128, rope=rope, **{**values, **changes})


def test_a_statistics_file_is_judged(run_check, tmp_path):
    """Prevents a file of another model from passing here and ending the launch once the weights are loaded."""
    for name, stats, differs in (
        ("right", stats_of(64), None),
        ("heads", stats_of(32), "query heads is 32 there and 64"),
        ("kv", stats_of(64, num_kv_heads=4), "KV heads is 4 there and 8"),
    ):
        path = tmp_path / f"{name}.safetensors"
        save_stats(stats, path)
        status, output, _ = run_check("qwen3-32b", "--triattention-stats", str(path))
        assert (status == 0) == (differs is None), output
        assert differs is None or differs in output
    save_stats(stats_of(64, lookups=torch.zeros(64, 8, 64 + 128)), path)
    weighed = ("qwen3-32b", "--triattention-stats", str(path))
    for flags, share in (
        ((), 1),
        (("--triattention-value-share", "0.5"), 0.5),
        (("--triattention-selection", "union"), 0),
    ):
        assert json.loads(run_check(*weighed, "--json", *flags)[1])["settings"]["value_share"] == share
    status, output, _ = run_check(*weighed, "--triattention-stats-after-update", "measure")
    assert (status, output.count("\n")) == (1, 1)
    assert "holds look-up weights, which would be lost: set it to keep" in output
    weighed = ("qwen3-32b", "--triattention-stats", "look-ups", "--triattention-stats-after-update", "measure")
    assert json.loads(run_check(*weighed, "--json")[1])["settings"]["value_share"] == 1
    status, output, _ = run_check("qwen3-32b", "--triattention-stats", "missing.safetensors")
    assert (status, "does not exist" in output) == (1, True)


@pytest.mark.parametrize(
    ("flags", "others"),
    [
        ((), "page size and selection"),
        (("--triattention-stats", "look-ups"), "page size"),
        (("--triattention-value-share", "0.5"), "page size"),
        (("--triattention-recency", "0.5"), "page size"),
    ],
)
def test_other_selections_are_offered_where_no_value_must_choose(run_check, flags, others):
    """Prevents advice that the next launch refuses."""
    status, output, _ = run_check("qwen3-32b", *flags)
    assert (status, f"also works   every other {others}\n" in output) == (0, True)
    assert (run_check("qwen3-32b", *flags, "--triattention-selection", "union")[0] == 0) == (not flags)


def test_the_weights_next_to_a_config_are_compared_too(run_check, tmp_path):
    """Prevents statistics of another model of the same sizes from passing."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text((CONFIGS / "qwen3-32b.json").read_text())
    save_stats(stats_of(64), tmp_path / "s.safetensors")
    asked = (str(folder), "--triattention-stats", str(tmp_path / "s.safetensors"))
    assert run_check(*asked)[0] == 0
    save_file({"model.norm.weight": torch.ones(8)}, folder / "model.safetensors")
    status, output, _ = run_check(*asked)
    assert (status, "model fingerprint" in output) == (1, True)


def test_models_that_a_decode_server_refuses(run_check):
    """Prevents `check` from accepting what the launch refuses."""
    decoding = ("--disaggregation-mode", "decode")
    for drafts, refused in (("NGRAM", 1), ("STANDALONE", 1), ("EAGLE", 0), ("NEXTN", 0)):
        flags = (*DRAFTS, "--speculative-algorithm", drafts)
        assert run_check("qwen3-32b", *flags)[0] == 0
        status, output, _ = run_check("qwen3-32b", *decoding, *flags)
        assert (status, "SGLang hands the first drafts over" in output) == (refused, refused == 1)
    flags = ("--disable-overlap-schedule", *DRAFTS, "--speculative-algorithm", "NEXTN")
    assert run_check("qwen3-next-80b-a3b", *flags)[0] == 0
    assert run_check("qwen3-next-80b-a3b", *decoding, *flags)[0] == 0
    status, output, _ = run_check("qwen3-next-80b-a3b", *decoding)
    assert (status, "use --disable-overlap-schedule" in output) == (1, True)
    assert run_check("qwen3-next-80b-a3b", *decoding, "--disable-overlap-schedule")[0] == 0
    for model in ("gpt-oss-20b", "deepseek-v3", "qwen2.5-vl-7b"):
        assert run_check(model, *decoding)[0] == 0
    for flag in ("--enable-lora", "--disaggregation-decode-enable-radix-cache", "--enable-hierarchical-cache"):
        assert run_check("qwen3-32b", *decoding, flag)[0] == 0
    tree, overlap = "--disaggregation-decode-enable-radix-cache", "--disable-overlap-schedule"
    for model, flags in (
        ("qwen3-32b", (*DRAFTS, "--speculative-algorithm", "EAGLE")),
        ("gpt-oss-20b", ()),
        ("qwen3-next-80b-a3b", ()),
    ):
        assert run_check(model, *decoding, overlap, tree, *flags)[0] == 0
    status, output, _ = run_check("qwen3-32b", *decoding, "--pp-size", "2")
    assert (status, output.split()[0]) == (1, "--pp-size")


def test_ranks_that_cannot_measure_together(run_check):
    """Prevents a server that waits for ever once its weights are updated."""
    for flags in (("--pp-size", "2"), ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")):
        status, output, _ = run_check("qwen3-32b", "--triattention-stats-after-update", "measure", *flags)
        assert (status, "cannot measure together" in output) == (1, True)
        assert run_check("qwen3-32b", *flags)[0] == 0


def test_images_that_sglang_takes_on_request(run_check):
    """Prevents `check` from refusing for its images a model that SGLang serves with text alone by default, or drafts
    that are tested with images."""
    for images in ((), ("--enable-multimodal",)):
        drafts = ("--speculative-algorithm", "NGRAM", "--attention-backend", "triton")
        status, output, _ = run_check("gemma-3-27b", *drafts, *images)
        assert (status, "refused" in output) == (0, False)
    status, output, _ = run_check("gemma-3-27b", "--enable-multimodal")
    assert (status, "not judged" in output) == (0, False)
