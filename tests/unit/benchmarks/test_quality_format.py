"""The stream file of the quality benchmark: if damaged, it is refused with the number of the bad line."""

import json

import pytest

from benchmarks.quality.streams.format import StreamError, read_streams


def line(**changes) -> str:
    question = {"task": "facts", "text": "Q", "answer": " 1"}
    entry = {"id": "a", "prompt": "P", "private": "T", "questions": [question]}
    entry |= changes
    return json.dumps({name: value for name, value in entry.items() if value is not None})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{broken", "Line 2 of .* is not JSON .*each line must be one stream"),
        ("[1]", "Line 2 of .* is not an object"),
        (line(id="first"), "Line 2 of .* has the id 'first', which line 1 has already: give"),
        (line(id=""), 'Line 2 of .* has no text as "id": give it'),
        (line(id="b", private=None), 'Line 2 of .* has no text as "private"'),
        (line(id="b", prompt=3), 'Line 2 of .* has no text as "prompt"'),
        (line(id="b", questions=None), 'Line 2 of .* must have either "questions" or "score_last": add'),
        (line(id="b", score_last=5), 'Line 2 of .* must have either "questions" or "score_last"'),
        (line(id="b", questions=None, score_last=0), 'Line 2 of .* has a "score_last" of 0: give'),
        (line(id="b", questions=None, score_last=True), 'has a "score_last" of True'),
        (line(id="b", questions=[]), "Line 2 of .* has no list of questions: give at least one"),
        (line(id="b", questions=[3]), "Question 1 in line 2 of .* is not an object"),
        (
            line(id="b", questions=[{"task": "facts", "text": "Q"}]),
            'Question 1 in line 2 of .* has no text as "answer"',
        ),
        (line(id="b", question=[]), 'Line 2 of .* has the unknown key "question": remove it'),
        (line(id="b", questions=[{"task": "f", "text": "Q", "answer": " 1", "at": -1}]), 'has an "at" of -1: give'),
    ],
)
def test_bad_lines_are_refused_by_number(tmp_path, text, message):
    """Prevents a benchmark that runs for an hour on damaged streams, and a search for the one bad line."""
    path = tmp_path / "streams.jsonl"
    path.write_text(line(id="first") + "\n" + text + "\n")
    with pytest.raises(StreamError, match=message) as error:
        read_streams(path)
    assert "\n" not in str(error.value)


def test_files_without_streams_are_refused(tmp_path):
    """Prevents an empty table, or a traceback, when the file is wrong."""
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    for name, message in (("empty", "holds no streams"), ("latin", "not UTF-8"), ("none", "cannot be read")):
        with pytest.raises(StreamError, match=message):
            read_streams(tmp_path / name)
