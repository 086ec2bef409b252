"""`sglang-triattn check` explains wrong files and flags in one sentence."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_cases import CONFIGS
from sglang_triattn.cli.check import _read_flags
from sglang_triattn.compatibility.rule import Server
from sglang_triattn.compatibility.rules import FIRST_RULES, RULES, SETTING_FIELDS
from sglang_triattn.compatibility.traits import Traits
from sglang_triattn.compatibility.verdict import attention_words, judge, scored_words
from sglang_triattn.config import Config
from sglang_triattn.errors import TriAttentionError

FLAGS = ["--" + field.replace("_", "-") for field in sorted(SETTING_FIELDS)]
WORDS = ["1", "-1", "a"]
KNOWN = {file.stem: json.loads(file.read_text()) for file in sorted(CONFIGS.glob("*.json"))}
FIELDS = sorted({name for known in KNOWN.values() for name in (*known, *(known.get("text_config") or ()))})
INNER = ["rope_type", "factor", "full_attention", "partial_rotary_factor", "attention", "full_attn_layers", "no_op"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 5000) | st.floats(-2, 2) | st.sampled_from(["", "mamba", "LG", "*M-"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(INNER), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--page-size 0", "--page-size is 0, but it must be at least 1"),
        ("--page-size -16", "--page-size is -16"),
        ("--tp-size -1", "--tp-size is -1, but it must be at least 1"),
        ("--context-length -2", "--context-length is -2, but it must be a whole number, at least 1"),
        ("--pp-size -2", "--pp-size is -2, but it must be a whole number, at least 1"),
        ("--nnodes two", "--nnodes is two, but it must be a whole number, at least 1"),
        ("--disaggregation-decode-host-receive-threshold few", "receive-threshold is few, but it must be a number"),
        ("--dp many", "--dp is many, but it must be a whole number"),
        ("--triattention-budget -5", "--triattention-budget is -5"),
        ("--triattention-budget 100 --triattention-recent 200", "is greater than --triattention-budget (100)"),
        (
            "--triattention-value-share 0.5 --triattention-selection union",
            "add --triattention-selection per-layer-head",
        ),
        ("--triattention-selection best", "supports only shared-mean, union, per-head, per-layer-head"),
        ("--json-model-override-args [1]", "--json-model-override-args is [1], but a JSON object was expected"),
        ("lost --port 1", "lost belongs to no flag"),
        ("--triattention-budgt 100", "is not a flag of sglang-triattn: use --triattention-budget, or leave it out."),
        ("--triattention-budgt=100", "--triattention-budgt is not a flag of sglang-triattn: use --triattention-budget"),
        ("--port 1 --enable-triatention", "use --enable-triattention, or leave it out."),
        ("--triattention-sinks 5000", "--triattention-sinks (5000) is greater than --triattention-budget (2048)"),
        ("--triattention-window 4", "--triattention-window is not a flag of sglang-triattn"),
    ],
)
def test_flags_that_mean_nothing(run_check, options, words):
    """Prevents a traceback, or an answer to another question."""
    status, output, error = run_check("qwen3-32b", *options.split())
    assert (status, output) == (2, "")
    assert words in error
    assert error.startswith("sglang-triattn: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read (No such file or directory): give a config.json"),
        ("{", "is not a JSON object"),
        ("[]", "is not a JSON object"),
        ("{}", "names no architecture"),
        ('{"architectures": []}', "names no architecture"),
        ('{"architectures": "LlamaForCausalLM"}', "architectures 'LlamaForCausalLM', but a list of names was expected"),
        ('{"architectures": ["LlamaForCausalLM"]}', "has no num_hidden_layers, but"),
        ({"num_hidden_layers": -3}, "num_hidden_layers -3"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"head_dim": True}, "head_dim true"),
        ({"layer_types": ["full_attention"]}, "the kinds of 1 layers, but has 64"),
        ({"layer_types": 5}, "layer_types '5', but a list of names was expected"),
        ({"rope_scaling": "yarn"}, "rope_scaling 'yarn', but an object was expected"),
        ({"partial_rotary_factor": 2}, "RoPE turns 2 of each head"),
        ({"sliding_window": True}, "has sliding_window true, but a whole number was expected"),
        ({"text_config": [1]}, "text_config '[1]', but an object was expected"),
    ],
    ids=str,
)
def test_files_that_mean_nothing(run_check, tmp_path, text, words):
    """Prevents a traceback for a file that is broken, or not that of a language model."""
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text if isinstance(text, str) else json.dumps(KNOWN["qwen3-32b"] | text))
    status, output, error = run_check(str(file))
    assert (status, output) == (2, "")
    assert words in error
    assert error.startswith("sglang-triattn: ")
    assert error.count("\n") == 1


def is_one_line(error: Exception) -> None:
    assert "\n" not in str(error)


@settings(deadline=None, max_examples=400)
@given(data=st.data())
def test_no_file_breaks_it(data):
    """Prevents a traceback for a field that an author spelt in a new way."""
    config = copy.deepcopy(KNOWN[data.draw(st.sampled_from(sorted(KNOWN)))])
    place = config["text_config"] if "text_config" in config and data.draw(st.booleans()) else config
    for name in data.draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3)):
        if data.draw(st.booleans()):
            place.pop(name, None)
        else:
            place[name] = data.draw(VALUES)
    try:
        verdict = judge(config, "m", Config(budget=4096), {"tp_size": data.draw(st.integers(1, 8))})
    except TriAttentionError as error:
        return is_one_line(error)
    json.dumps(verdict.to_dict())
    if verdict.refusal is None:
        assert scored_words(verdict.layout)
        assert attention_words(verdict.layout)
        assert verdict.held_bytes > 0


@given(st.lists(st.sampled_from([*FLAGS, "--x", "--x=", *WORDS])))
def test_no_flags_break_it(words):
    """Prevents a traceback for flags in an unusual order."""
    is_judged_or_one_line(words)


@pytest.mark.parametrize("name", FLAGS)
def test_no_value_breaks_it(name):
    """Prevents a rule that expects a number and gets the word of the command line."""
    for word in WORDS:
        is_judged_or_one_line([name, word])


def is_judged_or_one_line(words: list[str]) -> None:
    """Every rule judges flags, or they are refused in a sentence."""
    try:
        given_, others = _read_flags(words)
    except TriAttentionError as error:
        return is_one_line(error)
    assert set(others) <= {"--x"}
    assert given_.keys() <= {*SETTING_FIELDS, "dp_size"}
    server = Server(Config(), given_, Traits("m"))
    for rule in (*FIRST_RULES, *RULES):
        rule.refuses(server)
