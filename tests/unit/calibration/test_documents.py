"""Calibration texts: what is read from files, and what is refused."""

import json

import pytest

from sglang_triattn.calibration.job import CalibrationError
from sglang_triattn.calibration.prompts import PROMPTS, trace_prompts
from sglang_triattn.calibration.texts import read_windows
from tiny_models import make_text, make_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ {'user': 'w0', 'assistant': 'w1', 'system': 'w2'}[m.role] }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}w1{% endif %}"
)


@pytest.fixture
def tokenizer():
    tokenizer = make_tokenizer(bos=True)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def read(tokenizer, *paths, max_tokens=1000, window=10):
    return read_windows([str(path) for path in paths], tokenizer, max_tokens=max_tokens, window=window)


def test_each_file_is_a_document(tmp_path, tokenizer):
    """Prevents a window that runs from one text into the next or lacks its own BOS."""
    one, two = make_text(tmp_path / "a.txt", 12), make_text(tmp_path / "b", 5, seed=1)
    windows = read(tokenizer, tmp_path / "a.txt", tmp_path / "b")
    assert windows == ((1, *one[:9]), (1, *one[9:]), (1, *two))


def test_chats_go_through_the_template(tmp_path, tokenizer):
    """Prevents chats from losing their speakers, in either of the two common spellings."""
    spellings = [
        [{"role": "user", "content": "w10"}, {"role": "assistant", "content": "w11 w12"}],
        {"messages": [{"role": "system", "content": "w10"}]},
        {"conversations": [{"from": "human", "value": "w10"}, {"from": "gpt", "value": "w11"}]},
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n\n".join(map(json.dumps, spellings)) + "\n")
    assert read(tokenizer, file) == ((2, 12, 3, 13, 14), (4, 12), (2, 12, 3, 13))


def test_tokens_are_limited_over_all_files(tmp_path, tokenizer):
    """Prevents a limit per file instead of over all of them, and reading on after it."""
    one = make_text(tmp_path / "a.txt", 12)
    make_text(tmp_path / "b.txt", 12)
    windows = read(tokenizer, tmp_path / "a.txt", tmp_path / "b.txt", "/none", max_tokens=20, window=100)
    assert [len(ids) for ids in windows] == [13, 7]
    assert windows[0] == (1, *one)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "Line 2 of .*x.jsonl is not JSON"),
        ("3", "Line 2 of .*x.jsonl is not a chat"),
        ("[]", "Line 2 of .*x.jsonl is not a chat"),
        ('{"text": "w1"}', "Line 2 of .*x.jsonl is not a chat"),
        ('[{"role": "user"}]', "Line 2 of .*x.jsonl is not a chat"),
        ('["w1"]', "Line 2 of .*x.jsonl is not a chat"),
        ('[{"role": "tool", "content": "w1"}]', "Line 2 of .*x.jsonl does not fit .*'no tools'"),
    ],
)
def test_bad_lines_are_named(tmp_path, tokenizer, line, message):
    """Prevents a search through a large file for the one bad line, and silently dropped chats."""
    file = tmp_path / "x.jsonl"
    file.write_text('[{"role": "user", "content": "w1"}]\n' + line + "\n")
    with pytest.raises(CalibrationError, match=message) as error:
        read(tokenizer, file)
    assert "\n" not in str(error.value)


def test_model_without_template_refuses_chats(tmp_path):
    """Prevents chats run through a made-up format that the model never saw."""
    (tmp_path / "x.jsonl").write_text('[{"role": "user", "content": "w1"}]\n')
    with pytest.raises(CalibrationError, match="no chat template"):
        read(make_tokenizer(bos=False), tmp_path / "x.jsonl")


def test_prompts_of_traces(tokenizer):
    """Prevents prompting a model without its template, and failing when there are more traces than prompts."""
    prompts = trace_prompts(tokenizer, len(PROMPTS) + 2)
    assert len(prompts) == len(PROMPTS) + 2
    assert prompts[-2:] == prompts[:2]
    assert (prompts[0][0], prompts[0][-1]) == (2, 3)
    assert trace_prompts(tokenizer, 0) == ()
    assert trace_prompts(make_tokenizer(bos=True), 1)[0][0] == 1
