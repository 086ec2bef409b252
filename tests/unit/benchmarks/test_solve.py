"""Problems with checkable answers: how they are made, read, graded and solved under compaction."""

import json

import pytest

from benchmarks.quality.choices import ALL
from benchmarks.quality.solve import cli, here
from benchmarks.quality.solve.cells import cells_of
from benchmarks.quality.solve.chat import Chat
from benchmarks.quality.solve.format import Lookup, Problem, ProblemError, read_problems, write_problems
from benchmarks.quality.solve.grade import REACHES, grade
from benchmarks.quality.solve.here import Solver
from benchmarks.quality.solve.make import TASKS, make_problems
from benchmarks.quality.solve.table import rows_of
from benchmarks.quality.streams.words import FORMS
from quality_cases import INTERVAL, random_stats, words
from tiny_models import make_tokenizer

ONE_OF_EACH = dict.fromkeys(TASKS, 1)
LONG = ("chain", "states", "table", "search")


@pytest.mark.parametrize("form", FORMS)
def test_a_right_text_gets_all_points(form):
    """Prevents traces, lines and look-ups that contradict one another."""
    for problem in make_problems(form, 3, ONE_OF_EACH):
        found = grade(problem, problem.trace)
        assert found.right
        assert found.lines == found.of == len(problem.lines)
        assert sum(tries for _, tries in found.lookups.values()) == len(problem.lookups) >= 8
        assert all(hits == tries for hits, tries in found.lookups.values())
        if problem.task in LONG:
            assert sum(found.lookups[reach][1] for reach in REACHES[2:]) >= 2
            assert len(problem.trace) > 2500


def test_problems_depend_on_form_seed_and_number_only():
    """Prevents figures that cannot be repeated, and a held-out form that shares what the other was tuned on."""
    first = make_problems("bench", 1, {"programs": 3, "shop": 1})
    assert [problem.task for problem in first] == ["programs", "shop", "programs", "programs"]
    assert make_problems("bench", 1, {"shop": 1, "programs": 2}) == [first[1], first[0], first[2]]
    assert len({problem.messages[-1]["content"] for problem in first}) == 4
    assert make_problems("bench", 2, {"programs": 1})[0].trace != first[0].trace
    for task in TASKS:
        texts = [make_problems(form, 1, {task: 1})[0].messages[-1]["content"].splitlines()[0] for form in FORMS]
        assert texts[0] != texts[1]


def test_look_ups_are_of_the_texts_own_words():
    """Prevents counting one wrong value as many wrong look-ups."""
    problem = Problem(
        "a", "t", ({"role": "user", "content": "?"},), "3: c = 5", ("1: a = 2", "2: b = a + 1 = 3", "3: c = 5"),
        (Lookup(1, 3, 0), Lookup(2, 3, 0), Lookup(2, 3, 1)),
    )  # fmt: skip
    text = "1: a = 4\n\n2: b = 4 + 1 = 5\n**3: c = 5.**\n"
    found = grade(problem, text)
    assert (found.right, found.lines, found.of) == (True, 1, 3)
    assert found.lookups[1, 2] == (2, 3)
    # What was not written is not counted, and a text may be empty.
    assert grade(problem, "1: a = 2").lookups[1, 2] == (0, 0)
    assert not grade(problem, "").right


def test_problems_survive_their_file(tmp_path):
    """Prevents fields that are lost between writing and reading."""
    made = make_problems("held-out", 1, ONE_OF_EACH)
    write_problems(tmp_path / "problems.jsonl", made)
    assert read_problems(tmp_path / "problems.jsonl") == made


GOOD = {"id": "a", "task": "t", "messages": [{"role": "user", "content": "1 + 1?"}], "answer": "2"}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{", "Line 2 of .* is not a problem"),
        ("[]", "not a JSON object"),
        ({**GOOD, "id": "b", "answer": 2}, "answer is 2, but it must be a text"),
        ({**GOOD, "id": "b", "answer": "1\n2"}, "several lines"),
        ({"id": "b", "task": "t"}, "lacks messages, answer"),
        ({**GOOD, "id": "b", "replies": []}, "it has replies"),
        ({**GOOD, "id": "b", "messages": []}, "messages must be a list"),
        ({**GOOD, "id": "b", "messages": ["hi"]}, "messages must be a list"),
        ({**GOOD, "id": "b", "lines": [1]}, "lines must be a list of texts"),
        ({**GOOD, "id": "b", "lookups": 3}, "lookups must be a list"),
        ({**GOOD, "id": "b", "lookups": [[1, 0, 1, -1]]}, "with SOURCE before LINE"),
        (GOOD, "Line 2 of .* repeats the id 'a'"),
    ],
)
def test_bad_lines_are_named(tmp_path, entry, message):
    """Prevents a traceback, or a wrong figure, from a file with one bad line."""
    path = tmp_path / "problems.jsonl"
    bad = entry if isinstance(entry, str) else json.dumps(entry)
    path.write_text(json.dumps(GOOD) + "\n" + bad + "\n")
    with pytest.raises(ProblemError, match=message) as error:
        read_problems(path)
    assert "Line 2" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_empty_file_is_refused(tmp_path):
    """Prevents a table without rows."""
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(ProblemError, match="holds no problem"):
        read_problems(tmp_path / "none.jsonl")


class _Words(Chat):
    """Prompt and trace of random tokens."""

    def prompt(self, problem):
        return words(1, 30)

    def ids(self, text):
        return words(2, 120)


def solver_of(model, **changes):
    chat = _Words(make_tokenizer(bos=False))
    options = {"limit": 120, "progress": lambda line: None, **changes}
    return Solver(model, chat, random_stats(model), INTERVAL, **options)


def test_a_whole_budget_writes_the_dense_text(model):
    """Prevents policies that act outside of rounds, and drafts that become text."""
    cells = cells_of([name for name in ALL if name != "read-again"], [1.0], [])
    (problem,) = make_problems("bench", 1, {"programs": 1})
    found = solver_of(model, rows=5).solve(problem, cells)
    assert set(found) == set(cells)
    assert len({answer.text for answer in found.values()}) == 1
    assert {answer.evicted for answer in found.values()} == {0}


def test_drafts_do_not_change_what_a_policy_writes(model, monkeypatch):
    """Prevents queries of rejected drafts from counting as the row's own."""
    names = ("default", "newest", "random", "snapkv", "expected-attention", "r-kv")
    cells = cells_of(names, [0.25], [48])
    (problem,) = make_problems("bench", 1, {"programs": 1})
    drafted = solver_of(model).solve(problem, cells)
    monkeypatch.setattr(here, "BLOCK", 1)
    assert solver_of(model).solve(problem, cells) == drafted
    assert all(answer.evicted for cell, answer in drafted.items() if cell.choice.name != "dense")
    assert len({answer.text for answer in drafted.values()}) > 3


def test_messages_that_a_chat_template_refuses():
    """Prevents a traceback of the template's own code."""
    tokenizer = make_tokenizer(bos=False)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ProblemError, match="refuses problem 'a': roles must alternate"):
        Chat(tokenizer).prompt(Problem("a", "t", tuple(GOOD["messages"]), "2"))


def test_rows_count_and_compare(model):
    """Prevents sums over other problems, and intervals against another size's default."""
    made = make_problems("bench", 1, {"shop": 3})
    cells = cells_of(["newest"], [0.5], [64])
    right, wrong = grade(made[0], made[0].trace), grade(made[0], "x\n" * 9)
    graded = [{cell: (wrong if cell.choice.name == "newest" and cell.budget else right, 7) for cell in cells}] * 3
    rows = {(row["policy"], row["share"], row["budget"]): row for row in rows_of(["shop"] * 3, graded)}
    assert rows["newest", 0.5, None]["right"] == 3
    row = rows["newest", None, 64]
    assert (row["problems"], row["right"], row["lines"], row["of"], row["evicted"]) == (3, 0, 0, 27, 7)
    assert (row["low"], row["high"]) == (-1, -1) == (row["lines_low"], row["lines_high"])
    against = {(row["policy"], row["budget"]): row["low"] for row in rows_of(["shop"] * 3, graded, "newest")}
    assert (against["newest", 64], against["default", 64], against["default", None]) == (0, 1, 0)
    assert rows["default", None, 64]["lookups"] == {"1-2": [6, 6], "3-5": [9, 9], "6-10": [9, 9]}


def test_the_command(folder, tmp_path, monkeypatch, capsys):
    """Prevents a command that cannot be run as the documents say, and texts that are lost."""
    monkeypatch.setattr(cli, "stats_for", lambda options, model, choices: random_stats(model))
    out, texts = tmp_path / "out.json", tmp_path / "texts.txt"
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({**GOOD, "trace": "w3 w4"}) + "\n")
    command = ["--model", str(folder), "--json", str(out), "--texts", str(texts), "--max-tokens", "40"]
    cli.main([*command, "--problems", str(problems), "--budgets", "16", "--policies", "newest", "--interval", "8"])
    rows = json.loads(out.read_text())["rows"]
    assert [row["policy"] for row in rows] == ["dense", "default", "newest"]
    assert {"task", "share", "policy", "problems", "right", "lines", "of", "low", "high"} <= set(rows[0])
    assert texts.read_text().count("===") == 3
    assert "keeping 16 tokens" in capsys.readouterr().out
    problems.write_text("")
    with pytest.raises(SystemExit, match=r"error: .*holds no problem"):
        cli.main([*command, "--problems", str(problems)])
    with pytest.raises(SystemExit):
        cli.main([*command, "--tasks", "programs"])
    assert "TASK=COUNT" in capsys.readouterr().err
