"""Mutations are drawn by their seed alone, change the code, and are run where no checkout sees them."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from pathlib import Path

import pytest

import mutate
import mutations
from checkout import ROOT
from import_graph import Checkout
from mutant_stages import KERNELS_IN_ROUNDS, STAGES, files_of
from mutations import KINDS, draw, is_change, mutations_of

EVERY_KIND = '''"""A text with a + b and 1 < 2."""
__all__ = ["f"]

def f(a: "1 + 1", b, logger):
    """Not 1 < 2."""
    if a < b:
        logger.info("%d", a - b)
        raise ValueError(f"{a + b} is above {1}", a - b)
    a.append(b)
    a += 1
    return g(a, b), max(a, b), a[b:], "x" % a
'''
# `half` is tested, `double` is not.
PLAN = "def half(count):\n    return count // 2\n\n\ndef double(count):\n    return count + count\n"
TEST = "from sglang_triattn.rounds.plan import half\n\n\ndef test_half():\n    assert half(9) == 4\n"
BROKEN = "from sglang_triattn.rounds import plan\n\n\ndef test_broken():\n    assert plan is None\n"
OPTIONS = '[tool.pytest.ini_options]\npythonpath = []\naddopts = "--strict-markers"\n'
FILES = {
    "pyproject.toml": OPTIONS,
    "sglang_triattn/__init__.py": "",
    "sglang_triattn/rounds/__init__.py": "",
    "sglang_triattn/rounds/plan.py": PLAN,
    "tests/unit/rounds/test_broken.py": BROKEN,
    "tests/unit/rounds/test_plan.py": TEST,
    "tests/unit/tools/test_layout.py": "",
}


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Path:
    """A checkout with a product of one module, half of it tested; its one file of tests is not committed yet."""
    root = tmp_path / "fake"
    write(root, {name: text for name, text in FILES.items() if name != "tests/unit/rounds/test_plan.py"})
    run = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*run, *command], cwd=root, check=True)
    write(root, FILES)
    monkeypatch.setattr(mutate, "ROOT", root)
    # pytest starts several times faster with the one plugin that is needed.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")
    return root


@pytest.fixture
def run(fake, tmp_path, monkeypatch):
    """Runs the command with stage `unit` on all mutations of the fake checkout; returns the rows that it wrote."""

    def run(*options: str) -> list[dict]:
        out = tmp_path / "out.json"
        count = sum(len(mutations_of(fake, file)) for file in mutations.product_files(fake))
        words = ["run", "--count", str(count), "--stages", "unit", "--json", str(out), *options]
        monkeypatch.setattr("sys.argv", ["mutate.py", *words])
        mutate.main()
        return json.loads(out.read_text())["rows"]

    return run


def test_every_kind_is_found_and_nothing_idle(tmp_path):
    """Prevents a kind that is never drawn, and survivors that no test could catch: texts, annotations, logs."""
    write(tmp_path, {"kernels/a.py": EVERY_KIND})
    found = mutations_of(tmp_path, "kernels/a.py")
    assert all(is_change(tmp_path, each) for each in found)
    assert {(each.kind, each.before, each.after) for each in found} == {
        ("negated condition", "a < b", "(not a < b)"),
        ("bound", "a < b", "a <= b"),
        ("missing call", "a.append(b)", "pass"),
        ("sign", "a += 1", "a -= 1"),
        ("bound", "1", "2"),
        ("swapped arguments", "g(a, b)", "g(b, a)"),
        ("dropped argument", "max(a, b)", "(a)"),
        ("dropped argument", "max(a, b)", "(b)"),
        ("bound", "b", "b + 1"),
    }
    assert {each.kind for each in found} == set(KINDS)


def test_a_seed_draws_the_same(tmp_path):
    """Prevents rows whose mutation cannot be found again, and a list that a larger count begins anew."""
    for folder in ("kernels/select", "sglang_triattn/rounds", "sglang_triattn/cli"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    few = draw(tmp_path, 7, 20)
    assert few == draw(tmp_path, 7, 30)[:20]
    assert few != draw(tmp_path, 8, 20)
    assert {each.kind for each in few} == set(KINDS)
    assert not any(each.file.startswith(mutations.LEFT_OUT) for each in few)
    assert all(is_change(tmp_path, each) for each in few)


def test_a_mutation_replaces_its_own_place(tmp_path):
    """Prevents changing another place, after characters of several bytes too, and a file that has changed since."""
    source = 'A = "é"\nB = "é" + f(1, "ü", 2)\n'
    write(tmp_path, {"kernels/a.py": source})
    swap = next(each for each in mutations_of(tmp_path, "kernels/a.py") if each.after == "f('ü', 1, 2)")
    swap.apply(tmp_path)
    assert (tmp_path / "kernels/a.py").read_text() == 'A = "é"\nB = "é" + f(\'ü\', 1, 2)\n'
    with pytest.raises(ValueError, match="is not the file"):
        swap.apply(tmp_path)


def test_survivors_and_what_was_caught(fake, run, capsys):
    """Prevents calling a survivor caught, counting a test that always fails, and touching the checkout."""
    rows = run()
    assert {(row["before"], row["after"]): row["caught_by"] for row in rows} == {
        ("count // 2", "count % 2"): "tests/unit/rounds/test_plan.py::test_half",
        ("2", "3"): "tests/unit/rounds/test_plan.py::test_half",
        ("count + count", "count - count"): "survived",
    }
    output = capsys.readouterr().out
    assert "left out, it fails without a mutation: tests/unit/rounds/test_broken.py::test_broken" in output
    assert "3 mutations, 1 survived" in output
    assert (fake / "sglang_triattn/rounds/plan.py").read_text() == PLAN


def test_a_later_run_goes_on(run, fake, monkeypatch):
    """Prevents running everything again for one more stage, and mixing the rows of different mutations."""
    run("--only", "2")
    monkeypatch.setattr(mutate, "run_mutation", lambda *_: {"stages": ["unit"], "caught_by": "later", "seconds": 1.0})
    rows = run()
    assert [row["number"] for row in rows] == [1, 2, 3]
    assert rows[1]["caught_by"] != "later"
    write(fake, {"sglang_triattn/rounds/plan.py": PLAN.replace("2", "4")})
    with pytest.raises(SystemExit, match="holds other mutations"):
        run()


def test_a_time_out_is_a_catch(run):
    """Prevents an endless loop from being called a survivor, or from never ending."""
    rows = run("--limit", "0.01", "--only", "1")
    assert rows[0]["caught_by"] == "time-out of 0 s in unit"


def test_stages_have_their_files():
    """Prevents a stage that never runs, and a wrong choice of the interpreted tests."""
    files = files_of(Checkout(ROOT), "kernels/select/keep_kernel.py")
    assert set(files) == set(STAGES)
    assert all(files.values())
    assert "test_select_kernel" in {Path(test).stem for test in files["interpreted"]}
    assert set(KERNELS_IN_ROUNDS) < set(files["interpreted"])
    assert all((ROOT / test).exists() for tests in files.values() for test in tests)


def test_unknown_words_are_refused(monkeypatch, capsys):
    """Prevents a run that does something else than it was asked for."""
    for words, sentence in (
        (["run", "--stages", "unit,slow"], "no stage slow"),
        (["run", "--count", "2", "--only", "3"], "1 to 2"),
    ):
        monkeypatch.setattr("sys.argv", ["mutate.py", *words])
        with pytest.raises(SystemExit) as ended:
            mutate.main()
        assert sentence in capsys.readouterr().err + str(ended.value)


def test_the_opposite_of_an_opposite():
    """Prevents a negated condition that is the condition itself."""
    assert ast.dump(ast.parse(mutations.negated(ast.parse("not a", mode="eval").body))) == ast.dump(ast.parse("(a)"))
