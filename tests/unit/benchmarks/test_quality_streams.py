"""The streams of the quality benchmark: the same for the same seed, answerable, and as long as requested."""

import json
import re
from dataclasses import replace

import pytest

import prepare_model
from benchmarks.quality.streams.format import StreamError, read_streams, to_line, write_streams
from benchmarks.quality.streams.make import length_in_characters, length_in_tokens, main, make_streams
from benchmarks.quality.streams.prose import EARLY_TOKENS
from benchmarks.quality.streams.text import SOURCES, TOPICS
from benchmarks.quality.streams.words import FORMS, WORDS

TOKENS = 2048
COUNTS = {"mixed": 2, "state": 1, "dfs": 2, "variables": 1, "agent": 1, "text": 2}
TASKS = {"facts", "early", "words", "state", "dfs", "variables", "agent"}


def count(text: str) -> int:
    """Token count of a tokenizer that keeps words whole and takes digits one by one."""
    return len(re.findall(r" ?[^\W\d_]{1,6}|\d|\s+|[^\w\s]|_", text))


def make(form: str, seed: int = 1):
    length = length_in_tokens(TOKENS, count)
    return make_streams(form, seed, COUNTS, length)


@pytest.fixture(scope="module")
def made():
    return {form: make(form) for form in FORMS}


def of_kind(streams, kind):
    return [stream for stream in streams if f"-{kind}-" in stream.id]


def test_the_seed_decides_everything(made):
    """Prevents figures that cannot be reproduced, and seeds that share a text."""
    assert make("bench") == made["bench"]
    other = make("bench", seed=2)
    for kind in set(COUNTS) - {"text"}:
        texts = [stream.private for stream in [*of_kind(made["bench"], kind), *of_kind(other, kind)]]
        assert len({text[:200] for text in texts}) == 2 * COUNTS[kind]


@pytest.mark.parametrize("form", FORMS)
def test_lengths_and_numbers_of_questions(made, form):
    """Prevents texts that outgrow a budget at another time than intended, and streams that are mostly answers."""
    for stream in made[form]:
        assert 0.94 * TOKENS <= count(stream.private) <= TOKENS, stream.id
        assert 80 <= count(stream.prompt) <= 200, stream.id
        if stream.score_last is not None:
            assert stream.score_last == TOKENS // 2
        else:
            assert 12 <= len(stream.questions) <= 16, stream.id
    assert {question.task for stream in made[form] for question in stream.questions} == TASKS


@pytest.mark.parametrize("form", FORMS)
def test_the_file_reads_back_as_it_was_written(made, form, tmp_path):
    """Prevents a reader that refuses, or changes, what the writer writes."""
    path = tmp_path / "streams.jsonl"
    write_streams(path, made[form])
    assert read_streams(path) == made[form]
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        assert {"id", "prompt", "private"} < set(entry) <= {"id", "prompt", "private", "questions", "score_last"}
        for question in entry.get("questions", []):
            assert {"task", "text", "answer"} <= set(question) <= {"task", "text", "answer", "at"}


@pytest.mark.parametrize("form", FORMS)
def test_tokens_do_not_span_the_joints(made, form):
    """Prevents tokens that would differ if the parts were tokenized together, for tokenizers of either habit."""
    for stream in made[form]:
        for question in stream.questions:
            assert re.match(r" \S", question.answer)
            assert question.text == question.text.strip()
        assert not stream.private[0].isspace()
        assert re.search(r"\S\n\Z", stream.prompt)
        assert re.search(r"\S\n\Z", stream.private) or stream.score_last


@pytest.mark.parametrize("form", FORMS)
def test_statements_are_made_once_and_evenly(made, form):
    """Prevents questions with no answer or two, and measured ages that favour one half of the text."""
    for stream in of_kind(made[form], "mixed"):
        for question in stream.questions:
            stem = question.text.splitlines()[-1].partition(": ")[2]
            statement = f"{stem}{question.answer}."
            assert stream.private.startswith(statement, question.at)
            assert stream.private.count(stem) == 1
            assert len(re.findall(rf"\b{question.answer.strip()}\b", stream.private)) == 1
            if question.task == "early":
                assert count(stream.private[: question.at + len(statement)]) <= EARLY_TOKENS
        places = sorted(question.at / len(stream.private) for question in stream.questions if question.task != "early")
        assert len(places) == 11
        assert max(abs(place - (i + 0.5) / 11) for i, place in enumerate(places)) < 0.06
        asked = sum(count(f"{q.text.splitlines()[-1].partition(': ')[2]}{q.answer}") for q in stream.questions)
        assert 0.05 < asked / TOKENS < 0.12


def values(pattern: str, text: str) -> list[tuple[str, str]]:
    """Name and value of each line."""
    return re.findall(pattern, text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("kind", "form", "pattern", "asked"),
    [
        ("state", "bench", r"counter (\w+) set to (\d+)$", r"counter (\w+) set to$"),
        ("state", "held-out", r"tank (\w+) held (\d+) litres$", r"tank (\w+) held$"),
        ("variables", "bench", r"^(\w+) = (\S+)$", r"assert (\w+) ==$"),
        ("variables", "held-out", r"^(?:let )?(\w+) = (\S+);$", r"\((\w+)\); //$"),
    ],
)
def test_the_last_value_counts(made, kind, form, pattern, asked):
    """Prevents answers given by an earlier line, or by another line than the one named."""
    for stream in of_kind(made[form], kind):
        last = dict(values(pattern, stream.private))
        for question in stream.questions:
            name = re.search(asked, question.text)[1]
            assert question.answer == f" {last[name]}"
            assert values(pattern, stream.private[question.at :])[0] == (name, last[name])
        # Some have an earlier value, which would be wrong.
        assert len(values(pattern, stream.private)) > len(last)


SEARCH = {
    "bench": (
        r"step (\d+): (?:pop|new root) (\w+)",
        r"push (\w+), which is a neighbour of (\w+)",
        r"neighbour is (\w+)",
        r"in step (\d+)",
    ),
    "held-out": (
        r"Trip (\d+) (?:goes to|begins anew at) (\w+)",
        r"A card for (\w+) is laid; its origin is (\w+)",
        r"the card for (\w+)",
        r"did trip (\d+)",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_search_is_followed(made, form):
    """Prevents a log that is not a depth-first search, and answers that do not follow from it."""
    pop, push, parent, step = SEARCH[form]
    for stream in of_kind(made[form], "dfs"):
        stack, parents, popped, last = [], {}, {}, None
        for text in stream.private.splitlines():
            if match := re.match(push, text):
                child, node = match.groups()
                assert node == last
                assert child not in parents
                parents[child] = node
                stack.append(child)
                continue
            number, last = re.match(pop, text).groups()
            assert not stack if "new root" in text or "anew" in text else stack.pop() == last
            popped[number] = last
        found = set()
        for question in stream.questions:
            if match := re.search(parent, question.text):
                expected, kind = parents[match[1]], "parent"
            elif match := re.search(step, question.text):
                expected, kind = popped[match[1]], "step"
            elif "next" in question.text:
                expected, kind = stack[-1], "next"
            else:
                expected, kind = ", ".join(stack[:-4:-1]), "stack"
            found.add(kind)
            assert question.answer == f" {expected}"
            assert question.at is None or re.match(f"{pop}|{push}", stream.private[question.at :])
        assert found == {"parent", "step", "next", "stack"}


@pytest.mark.parametrize("form", FORMS)
def test_identifiers_belong_to_the_person(made, form):
    """Prevents questions about an identifier that the transcript never showed, or showed for somebody else."""
    for stream in of_kind(made[form], "agent"):
        results = dict(re.findall(r'": "(\w+ \w+)"\}.*\n.*?(\{.*\})', stream.private))
        assert len(results) > 20
        for question in stream.questions:
            name, field = re.search(r'": "(\w+ \w+)", "(\w+)":$', question.text).groups()
            assert question.answer == f" {json.loads(results[name])[field]}"
            assert stream.private.count(question.answer) == 1
            assert name in stream.private[question.at : question.at + 60]


def test_forms_share_no_words(made):
    """Prevents a choice made on one form from being confirmed by the same words in the other."""
    one, two = (WORDS[form] for form in FORMS)
    for field in vars(one):
        assert not set(getattr(one, field)) & set(getattr(two, field)), field
    names = [{*words.first_names, *words.last_names} for words in (one, two)]
    for words in (one, two):
        assert len(words.first_names) == len(words.last_names) == 30
        prose = " ".join([*words.openings, *words.subjects, *words.doings, *words.endings])
        assert not set(words.secrets) & set(re.findall(r"\w+", prose))
    for form, others in zip(FORMS, reversed(names), strict=True):
        for stream in made[form]:
            if stream.score_last is None:
                assert not others & set(re.findall(r"\w+", stream.prompt + stream.private)), stream.id
    prompts = [{stream.prompt for stream in made[form]} for form in FORMS]
    assert not prompts[0] & prompts[1]
    asked = [{" ".join(q.text.split()[:2]) for stream in made[form] for q in stream.questions} for form in FORMS]
    assert not asked[0] & asked[1]


def test_text_is_held_out():
    """Prevents scoring a model on the text that its statistics were measured on, or both forms on the same text."""
    from pydoc_data.topics import topics

    def paragraphs(text: str) -> set[str]:
        return {part.strip() for part in text.split("\n\n") if len(part) > 80}

    calibration = paragraphs(prepare_model.calibration_text())
    seen = [paragraphs("\n\n".join(topics[name] for name in TOPICS[form])) for form in FORMS]
    assert all(len(part) > 50 for part in (calibration, *seen))
    assert not seen[0] & seen[1]
    assert not (seen[0] | seen[1]) & calibration
    assert not set(SOURCES["bench"]) & set(SOURCES["held-out"])


def test_what_cannot_be_made_is_refused():
    """Prevents texts in which every other sentence is a statement, and kinds that are silently left out."""
    length = length_in_tokens(TOKENS, count)
    for changes, message in (
        ({"form": "other"}, "no form 'other'"),
        ({"streams": {"facts": 1}}, "facts=1 names no streams"),
        ({"length": replace(length, amount=500, tokens=500)}, "500 tokens is too short"),
        ({"length": length_in_characters(10**7), "streams": {"text": 1}}, "No text of 10000000"),
    ):
        arguments = {"form": "bench", "seed": 1, "streams": {"state": 1}, "length": length} | changes
        with pytest.raises(StreamError, match=message):
            make_streams(**arguments)


def test_the_command_writes_what_the_reader_reads(tmp_path, capsys):
    """Prevents a command whose options do not reach the streams."""
    out = tmp_path / "out.jsonl"
    main(
        ["--characters", "8000", "--form", "held-out", "--seed", "7", "--streams", "dfs=1", "text=1", "--out", str(out)]
    )
    streams = read_streams(out)
    assert [stream.id for stream in streams] == ["held-out-dfs-7-0", "held-out-text-7-0"]
    assert all(7500 <= len(stream.private) <= 8000 for stream in streams)
    assert out.read_text() == "".join(to_line(stream) + "\n" for stream in streams)
    assert "2 streams, 14 questions" in capsys.readouterr().out
