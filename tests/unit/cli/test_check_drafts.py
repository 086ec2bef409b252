"""`sglang-triattn check` on drafts: their numbers, and the models and settings with which they work."""

import json
import re

import pytest
from sglang.srt.arg_groups.speculative_hook import _auto_choose_speculative_params
from sglang.srt.server_args import ServerArgs

from plan_cases import CONFIGS
from sglang_triattn.compatibility.resolve import resolve
from sglang_triattn.compatibility.traits import Traits
from sglang_triattn.config import Config
from sglang_triattn.errors import TriAttentionError

DRAFTS = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "nextn", "STANDALONE"])
@pytest.mark.parametrize("lacking", ["--speculative-num-steps", "--speculative-eagle-topk"])
def test_numbers_of_drafts_that_sglang_takes_together(run_check, algorithm, lacking):
    """Prevents advice that SGLang answers with a bare assertion: the sentence names all numbers, which are accepted."""
    place = DRAFTS.index(lacking)
    left = (*DRAFTS[:place], *DRAFTS[place + 2 :])
    status, output, _ = run_check("qwen3-32b", *left, "--speculative-algorithm", algorithm)
    assert status == 1
    assert re.fullmatch(
        rf"{left[0]} {left[1]} does not work without {lacking}, because .*: use {' '.join(DRAFTS)}\.\n", output
    )
    assert run_check("qwen3-32b", *left, "--speculative-algorithm", "NGRAM")[0] == 0
    advised = output.rstrip(".\n").split(": use ")[1].split()
    assert run_check("qwen3-32b", *advised, "--speculative-algorithm", algorithm)[0] == 0


@pytest.mark.parametrize("model", ["llama-3.3-70b", "qwen3-32b", "glm-4.6", "deepseek-v3"])
@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE"])
def test_drafts_that_sglang_chooses_itself(run_check, model, algorithm):
    """Prevents a model for which SGLang's own choice branches from being accepted here and refused by a launch."""
    content = json.loads((CONFIGS / f"{model}.json").read_text(encoding="utf-8"))
    settings = ServerArgs(model_path=str(CONFIGS), speculative_algorithm=algorithm)
    _, topk, _ = _auto_choose_speculative_params(settings, content["architectures"][0])
    assert run_check(model, "--speculative-algorithm", algorithm)[0] == 0
    status, output, _ = run_check(model, "--speculative-algorithm", algorithm, "--attention-backend", "flashmla")
    assert status == (topk > 1)
    if topk > 1:
        assert output.startswith("--attention-backend flashmla does not work with --enable-triattention and")
        assert f"and --speculative-eagle-topk {topk}, because" in output


# Models with drafts of every kind, each of which may branch, and have lengths that change.
DRAFTING = [
    ("qwen3-32b", ("EAGLE",)),
    ("qwen3-32b", ("EAGLE3", "--disaggregation-mode", "decode")),
    ("qwen3-30b-a3b", ("EAGLE3", "--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")),
    ("deepseek-v3", ("NEXTN",)),
    ("gpt-oss-20b", ("EAGLE3", "--triattention-budget", "4096")),
    ("qwen3-next-80b-a3b", ("NEXTN",)),
    ("qwen2.5-vl-7b", ("EAGLE3",)),
]


def test_drafts_that_branch(run_check):
    """Prevents trees of tokens where they have not been tested, advice that is refused in turn, and trees refused where
    they work."""
    flags = ("--speculative-num-steps", "5", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "8")
    words = ("--speculative-algorithm", "EAGLE")
    status, output, _ = run_check("mimo-v2-flash", *flags, *words)
    assert status == 1
    assert output.startswith("--speculative-eagle-topk 2 does not work with --enable-triattention ")
    reason = "drafts that branch are not tested with a layer for each drafted token"
    assert f"because {reason}: use {' '.join(DRAFTS)}.\n" in output
    assert run_check("mimo-v2-flash", *DRAFTS, *words)[0] == 0
    for model, words in [*DRAFTING, ("qwen3-32b", ("STANDALONE",))]:
        assert run_check(model, *flags, "--speculative-algorithm", *words)[0] == 0, (model, words)


def test_drafts_whose_length_changes(run_check):
    """Prevents drafts of changing lengths from being refused where they work."""
    for model, words in DRAFTING:
        assert run_check(model, "--speculative-adaptive", "--speculative-algorithm", *words)[0] == 0, (model, words)


def test_assistants(run_check, tmp_path):
    """Prevents Gemma-4's published draft models from being refused as others are, and settings that SGLang, or rounds,
    cannot serve with them from being accepted."""
    path = "--speculative-draft-model-path"
    for algorithm in ("NEXTN", "EAGLE"):
        drafting = (*DRAFTS, "--speculative-algorithm", algorithm, path)
        assert run_check("gemma-4-31b", *drafting, "google/gemma-4-31B-it-assistant", "--enable-mixed-chunk")[0] == 0
        for architecture, status in (("Gemma4AssistantForCausalLM", 0), ("LlamaForCausalLMEagle", 1)):
            (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
            assert run_check("gemma-4-31b", *drafting, str(tmp_path))[0] == status
        for others in (drafting[:-1], drafting, (*drafting, str(tmp_path))):
            assert "use one of these as --speculative-draft-model-path" in run_check("gemma-4-31b", *others)[1]
    # A launch reads it, and says more.
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    assert run_check("gemma-4-31b", *drafting, str(tmp_path))[0] == 0
    for flags, reason in (
        (("--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "8"), "gives branches of such a draft"),
        (("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"), "not tested in groups of ranks"),
        (("--disable-overlap-schedule",), "ends at the first request without overlap scheduling"),
        (("--disaggregation-mode", "decode"), "hands the first drafts over"),
        (("--disable-hybrid-swa-memory",), "keeps no pool of window layers"),
    ):
        status, output, _ = run_check("gemma-4-31b", *drafting, "google/gemma-4-31B-it-assistant", *flags)
        assert (status, reason in output) == (1, True), output


@pytest.mark.parametrize("field", ["attention", "prefill-attention", "decode-attention", "speculative-draft-attention"])
def test_attention_for_branches(run_check, field):
    """Prevents a backend whose plans for branches have not been held to the lengths of rows."""
    flags = ("--speculative-num-steps", "5", "--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "8")
    flags = (*flags, "--speculative-algorithm", "EAGLE", f"--{field}-backend")
    for name in ("flashinfer", "fa3", "triton"):
        assert run_check("qwen3-32b", *flags, name)[0] == 0
    status, output, _ = run_check("qwen3-32b", *flags, "fa4")
    assert (status, output.split(" with ")[0]) == (1, f"--{field}-backend fa4 does not work")
    assert output.endswith(f": use flashinfer, fa3 or triton, or use {' '.join(DRAFTS)}.\n")


@pytest.mark.parametrize(
    ("model", "algorithm", "reason"),
    [
        ("qwen2.5-vl-7b", "NGRAM", ""),
        ("qwen2.5-vl-7b", "EAGLE3", ""),
        ("qwen3-vl-8b", "EAGLE3", ""),
        ("qwen3-vl-8b", "EAGLE", "draft model is not tested with images: use --speculative-algorithm NGRAM, or "),
        ("glm-4.5v", "STANDALONE", "such a draft model is not tested with images"),
        ("qwen3.5-27b", "NEXTN", ""),
        ("qwen3.5-27b", "EAGLE3", "layers that keep a state instead of KV are not tested with such drafts"),
    ],
)
def test_images_where_tokens_are_drafted(run_check, model, algorithm, reason):
    """Prevents rounds on rows with images whose drafted tokens follow at untested positions."""
    status, output, _ = run_check(model, *DRAFTS, "--speculative-algorithm", algorithm)
    assert status == bool(reason)
    assert reason in output


def test_where_drafts_after_images_are_tested(run_check):
    """Prevents a draft model of a model that takes images where no test has held the two together."""
    drafts = (*DRAFTS, "--speculative-algorithm", "EAGLE3")
    for flags in (("--disaggregation-mode", "decode"), ("--enable-hierarchical-cache",)):
        assert run_check("qwen2.5-vl-7b", *drafts, *flags)[0] == 0
    groups = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
    for model, status in (("qwen2.5-vl-7b", 1), ("qwen3-32b", 0)):
        found, output, _ = run_check(model, *drafts, *groups)
        assert (found, "not tested in groups of ranks" in output) == (status, status == 1)


def test_drafts_of_a_model_served_text_alone():
    """Prevents drafts with a model that takes images, but of which compression covers text alone."""
    traits = Traits("m", images=True, image_prompts=False)
    with pytest.raises(TriAttentionError, match=r"drafted tokens are not tested with a model of which .* text alone"):
        resolve(Config(stats="auto"), {"speculative_algorithm": "NGRAM"}, traits)
    assert not resolve(Config(stats="auto"), {}, traits).images


def test_draft_layers_for_one_token_each(run_check):
    """Prevents a start with what is untested: SGLang gives each drafted token a layer of MiMo-V2's and of Step-3.5's
    own, but only for EAGLE by itself, and rounds leave those of no other model whole."""
    eagle, switch = ("--speculative-algorithm", "EAGLE"), "--enable-multi-layer-eagle"
    nextn = ("--speculative-algorithm", "NEXTN")
    for model in ("mimo-v2-flash", "step-3.5-flash"):
        assert run_check(model, *eagle)[0] == 0
        assert run_check(model, *nextn, switch)[0] == 0
    groups = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
    for flags in (("--enable-hierarchical-cache",), ("--disaggregation-mode", "decode"), groups):
        assert run_check("mimo-v2-flash", *eagle, *flags)[0] == 0
    for model, flags, reason in (
        ("step-3.5-flash", nextn, "a sliding window are not tested with such a draft model"),
        ("step-3.5-flash", (*eagle, "--attention-backend", "flashinfer"), "shows a row's first tokens"),
        (
            "mimo-v2-flash",
            (*eagle, "--speculative-draft-attention-backend", "flashinfer"),
            "shows a row's first tokens",
        ),
        ("mimo-v2-flash", nextn, "a sliding window are not tested with such a draft model"),
        ("mimo-v2-flash", ("--speculative-algorithm", "STANDALONE"), "a sliding window are not tested"),
        ("step-3.5-flash", (*eagle, "--enable-hierarchical-cache"), "keeps no pool of window layers"),
        ("step-3.5-flash", (*eagle, *groups), "add up over all ranks"),
        ("mimo-v2-flash", (*eagle, "--disable-hybrid-swa-memory"), "keeps no pool of window layers"),
        ("gpt-oss-20b", (*eagle, switch), "draft models of several layers are not tested with rounds"),
    ):
        status, output, _ = run_check(model, *flags)
        assert status == 1
        assert reason in output
    # EAGLE-3's draft model has no window.
    eagle3 = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-attention-backend", "flashinfer")
    assert run_check("gpt-oss-20b", *DRAFTS, *eagle3)[0] == 0


@pytest.mark.parametrize("model", ["gpt-oss-20b", "olmo-3-7b"])
def test_drafts_of_models_with_windows(run_check, model):
    """Prevents a draft model, or an attention backend, with which a window would read other tokens than its newest."""
    drafts = (*DRAFTS, "--speculative-algorithm")
    budget = ("--triattention-budget", "4096")
    assert run_check(model, *budget, *drafts, "NGRAM")[0] == 0
    # With EAGLE-3's, where windows have a KV pool of their own.
    assert run_check(model, *budget, *drafts, "eagle3")[0] == (model != "gpt-oss-20b")
    for algorithm in ("standalone", "EAGLE", "NEXTN"):
        status, output, _ = run_check(model, *budget, *drafts, algorithm)
        assert status == 1
        assert output.startswith(f"--speculative-algorithm {algorithm} does not work with --enable-triattention for ")
        assert output.endswith(": use --speculative-algorithm NGRAM, or leave --speculative-algorithm out.\n")
    for field in ("attention-backend", "prefill-attention-backend", "decode-attention-backend"):
        status, output, _ = run_check(model, *budget, *drafts, "NGRAM", f"--{field}", "flashinfer")
        assert (status, output.split(" with ")[0]) == (1, f"--{field} flashinfer does not work")
        assert "--enable-triattention and --speculative-algorithm NGRAM for " in output
        assert run_check(model, *budget, *drafts, "NGRAM", f"--{field}", "triton")[0] == 0
        assert run_check(model, *budget, f"--{field}", "flashinfer")[0] == 0
    assert run_check("qwen3-32b", *drafts, "NGRAM", "--attention-backend", "flashinfer")[0] == 0


@pytest.mark.parametrize("field", ["attention-backend", "speculative-draft-attention-backend"])
def test_layers_of_a_draft_model_in_a_window(run_check, field):
    """Prevents a draft model with `--speculative-draft-window-size` that sees a row's first tokens, or a refusal where
    SGLang lists the row's newest."""
    window = (*DRAFTS, "--speculative-draft-window-size", "512")
    refused = run_check("llama-3.3-70b", *window, "--speculative-algorithm", "EAGLE3", f"--{field}", "flashinfer")
    assert refused[0] == 1
    both = "--enable-triattention and --speculative-draft-window-size 512, because "
    assert refused[1].startswith(f"--{field} flashinfer does not work with {both}")
    for algorithm, backend in (("EAGLE3", "triton"), ("EAGLE", "flashinfer")):
        found = run_check("llama-3.3-70b", *window, "--speculative-algorithm", algorithm, f"--{field}", backend)
        assert found[0] == 0


@pytest.mark.parametrize(
    ("model", "algorithm", "status"),
    [
        ("qwen3-next-80b-a3b", "NEXTN", 0),
        ("qwen3-next-80b-a3b", "EAGLE", 0),
        ("qwen3.5-27b", "NEXTN", 0),
        ("qwen3-next-80b-a3b", "EAGLE3", 1),
        ("qwen3.5-27b", "STANDALONE", 1),
        ("nemotron-nano-9b-v2", "NEXTN", 1),
    ],
)
def test_drafts_with_states(run_check, model, algorithm, status):
    """Prevents drafts whose states have not been tested from being accepted, or the others from being refused."""
    found, output, _ = run_check(model, *DRAFTS, "--speculative-algorithm", algorithm)
    assert found == status
    assert ("are not tested with such drafts: leave --speculative-algorithm out." in output) == bool(status)
