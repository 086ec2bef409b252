"""The tests that a change can break are found, and only those."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import tests_for
from checkout import ROOT
from import_graph import Checkout
from server_tests import EXERCISED, FOLDER, server_tests

PYPROJECT = '[tool.pytest.ini_options]\npythonpath = ["tools", "tests/support/unit"]\n'
FILES = {
    "sglang_triattn/__init__.py": "",
    "sglang_triattn/plan.py": "def late():\n    import sglang_triattn.kernels.score\n",
    "sglang_triattn/lonely.py": "",
    "sglang_triattn/types.py": "",
    "sglang_triattn/data.py": "if TYPE_CHECKING:\n    from sglang_triattn.types import A\n",
    "kernels/score.py": "",
    "tools/helper.py": "",
    "tests/support/unit/cases.py": "from sglang_triattn import plan\n",
    "tests/unit/conftest.py": "import helper\nimport cases\ndef planned():\n    cases.x\ndef other():\n    helper.x\n",
    "tests/unit/test_fixture.py": "def test(planned): ...\n",
    "tests/unit/test_string.py": "CODE = 'import sglang_triattn.data'\n",
    "tests/unit/test_docs.py": "FILE = ROOT / 'docs'\n",
    "tests/unit/tools/test_layout.py": "",
    "docs/a.md": "",
}


@pytest.fixture(scope="module")
def checkout() -> Checkout:
    return Checkout(ROOT)


@pytest.fixture(scope="module")
def served(checkout) -> list[tuple[str, str]]:
    """(test on servers, why) of every file of the product."""
    return [found for file in checkout.product for found in server_tests(checkout, file).items()]


@pytest.fixture
def fake(tmp_path) -> Path:
    """A checkout of a few files under git, all committed."""
    for name, text in {**FILES, "pyproject.toml": PYPROJECT}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    run = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*run, *command], cwd=tmp_path, check=True)
    return tmp_path


def test_every_product_module_has_a_test(checkout):
    """Prevents a change of the product that `make test-for` answers with nothing."""
    for file in checkout.product:
        assert tests_for.tests_for(checkout, file), file


def test_every_server_test_is_chosen(checkout, served):
    """Prevents a server test that no change of the product ever runs."""
    # What forks the servers is no part of the product; its test runs when it changes.
    own = f"{FOLDER}test_forkserver.py"
    assert own in tests_for.tests_for(checkout, "tests/support/server/forkserver.py")
    assert {own, *(test for test, _ in served)} == {test for test in checkout.tests if test.startswith(FOLDER)}


def test_the_table_names_what_exists(served):
    """Prevents entries for files that were moved or renamed, and words that no test says any more."""
    for place, words in EXERCISED.items():
        assert (ROOT / place).exists(), place
        for word in words:
            if word.startswith("test_"):
                assert (ROOT / FOLDER / f"{word}.py").exists(), word
            else:
                assert any(why.endswith(f"it says {word}") for _, why in served), word


@pytest.mark.parametrize(
    ("file", "chosen", "left_out"),
    [
        ("patches/ranks/pipeline.py", ["server/test_pipeline"], ["server/test_lora", "unit/stats/test_stats"]),
        ("patches/scheduler/conversations.py", ["server/test_conversations", "server/test_sessions"], []),
        ("patches/cpu/draft_model.py", ["server/test_draft_models"], ["server/test_oracle", "property/test_census"]),
        ("patches/model/draft.py", ["server/test_draft_models"], ["unit/kernels/test_select"]),
        ("patches/calibration/measure.py", ["server/test_auto_stats", "server/test_calibrate_engine"], []),
        ("patches/observability/metrics.py", ["server/test_metrics"], ["server/test_lora"]),
        ("patches/launch/checks.py", ["server/test_refusals", "server/test_entrances"], ["property/test_ownership"]),
        # By way of a fixture of tests/unit/conftest.py, and of a subcommand that the fixture names.
        ("sglang_triattn/cli/plan.py", ["unit/cli/test_plan"], ["unit/cli/test_top", "server/test_oracle"]),
        ("kernels/select/reference.py", ["unit/kernels/test_select", "slow/test_interpreted_selection"], []),
        ("benchmarks/decode/step.py", ["slow/test_gpu_decode"], ["unit/benchmarks/test_quality"]),
        # By the name that `python -m` takes, whole or as the beginning of an f-string.
        ("benchmarks/quality/__main__.py", ["slow/test_quality_runs"], ["slow/test_benchmarks"]),
        ("benchmarks/serving/agents.py", ["server/test_serving_benchmarks"], ["server/test_quality_server"]),
        ("tests/support/server/oracle.py", ["server/test_oracle"], ["server/test_refusals"]),
        ("tests/server/conftest.py", ["server/test_wheel", "server/test_oracle"], ["unit/test_config"]),
        ("tests/unit/test_config.py", ["unit/test_config"], ["unit/test_profiles"]),
        ("Makefile", ["unit/tools/test_docs"], ["unit/tools/test_upstream"]),
        ("tests/support/configs/qwen3-32b.json", ["unit/cli/test_plan"], ["unit/stats/test_stats"]),
        ("docs/clients.md", ["unit/tools/test_docs", "server/test_readme_clients"], ["server/test_clients"]),
    ],
)
def test_examples(checkout, file, chosen, left_out):
    """Prevents a choice that leaves out the test of a file, or that is all tests."""
    found = tests_for.tests_for(checkout, file)
    assert {f"tests/{name}.py" for name in chosen} <= set(found)
    assert not {f"tests/{name}.py" for name in left_out} & set(found)


def test_ways_to_need_a_file(fake):
    """Prevents missing what a test needs by an import inside a function, a fixture, or code in a string."""
    checkout = Checkout(fake)
    assert "tests/unit/test_fixture.py" in tests_for.tests_for(checkout, "kernels/score.py")
    assert "tests/unit/test_fixture.py" not in tests_for.tests_for(checkout, "sglang_triattn/data.py")
    assert "tests/unit/test_string.py" in tests_for.tests_for(checkout, "sglang_triattn/data.py")
    assert set(tests_for.tests_for(checkout, "docs/a.md")) == {"tests/unit/test_docs.py"}


def test_a_file_without_a_test_is_named(fake, monkeypatch, capsys):
    """Prevents running nothing in silence; what only a type checker reads needs no test."""
    monkeypatch.setattr(tests_for, "ROOT", fake)
    monkeypatch.setattr("sys.argv", ["tests_for.py", str(fake / "sglang_triattn" / "lonely.py")])
    with pytest.raises(SystemExit) as ended:
        tests_for.main()
    assert ended.value.code == 2
    assert "no test is found for sglang_triattn/lonely.py" in capsys.readouterr().err
    assert list(tests_for.tests_for(Checkout(fake), "sglang_triattn/types.py")) == [tests_for.LAYOUT]


def test_what_differs_from_a_revision(fake, monkeypatch, capsys):
    """Prevents overlooking new and deleted files, and choosing a test that was deleted."""
    (fake / "kernels" / "score.py").unlink()
    (fake / "tests" / "unit" / "test_docs.py").unlink()
    (fake / "tests" / "unit" / "test_new.py").write_text("")
    assert tests_for.changed_files(fake, "HEAD") == [
        *("kernels/score.py", "tests/unit/test_docs.py", "tests/unit/test_new.py"),
    ]
    monkeypatch.setattr(tests_for, "ROOT", fake)
    monkeypatch.setattr("sys.argv", ["tests_for.py"])
    tests_for.main()
    lines = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert set(lines) == {tests_for.LAYOUT, "tests/unit/test_fixture.py", "tests/unit/test_new.py"}
    assert lines["tests/unit/test_fixture.py"].startswith("needs kernels/score.py")
    with pytest.raises(SystemExit, match="git diff nowhere failed"):
        tests_for.changed_files(fake, "nowhere")
