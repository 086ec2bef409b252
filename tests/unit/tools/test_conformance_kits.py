"""docs/conformance.md: every test kit of the installed SGLang is run or has its reason, and so has every failure."""

import re

import pytest

import conformance_kits as kits
import conformance_table as table
from conformance_failures import BY_NATURE, FAILURES
from documents import generated


def test_every_kit_is_known():
    """Prevents a new SGLang's tests from being dropped in silence."""
    run = {case.kit for case in kits.CASES if case.kit.startswith("kits.")}
    assert not run & set(kits.NOT_RUN)
    assert run | set(kits.NOT_RUN) == kits.kits_in_wheel()


def test_every_module_is_known():
    """Prevents utilities for tests that no list names."""
    run = {case.kit for case in kits.CASES if not case.kit.startswith("kits.")}
    assert not run & set(kits.other_modules())
    assert run | set(kits.other_modules()) == kits.modules_in_wheel()
    listed = [name for names in kits.OTHER_MODULES.values() for name in names]
    assert len(listed) == len(set(listed))


def test_a_new_kit_is_noticed(tmp_path, monkeypatch):
    """Prevents an enumeration that finds only what it knows."""
    (tmp_path / "kits").mkdir()
    (tmp_path / "kits" / "new_kit.py").write_text("class One:\n    pass\n\n\nclass Two(One):\n    pass\n")
    (tmp_path / "kits" / "functions_kit.py").write_text("def run():\n    class Inner:\n        pass\n")
    (tmp_path / "helpers.py").touch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").touch()
    monkeypatch.setattr(kits, "folder", lambda: tmp_path)
    assert kits.kits_in_wheel() == {"kits.new_kit.One", "kits.new_kit.Two", "kits.functions_kit"}
    assert kits.modules_in_wheel() == {"helpers", "package"}


def test_the_tables_are_not_stale():
    """Prevents documents of another run than the committed one."""
    assert not table.is_stale(), "run python tools/conformance_table.py"


def test_the_run_is_of_the_cases_listed():
    """Prevents a committed run that lacks a case, or had other settings, or was not a whole one."""
    run = table.results()
    assert not run["quick"]
    assert tuple(run["servers"]) == table.SERVERS
    listed = [(case["case"], case["launch"], case["settings"]) for case in run["cases"]]
    assert listed == [(case.name, case.launch, dict(case.settings)) for case in kits.CASES]
    for case in run["cases"]:
        assert len({tuple(case["servers"][server]["tests"]) for server in table.SERVERS}) == 1, case["case"]


def test_the_books_balanced():
    """Prevents a run in which slots were lost, or a server ended, from being shown."""
    for case in table.results()["cases"]:
        assert {found["books"] for found in case["servers"].values()} == {"balanced"}, case["case"]


def test_every_failure_has_its_reason():
    """Prevents failures of compression among those of the model, and reasons for tests that pass."""
    found = table.failures(table.results())
    assert set(found) == {(case, test) for case, tests in FAILURES.items() for test in tests}
    # What a budget that is never reached changes is a fault.
    for key, servers in found.items():
        assert ("plain" in servers) == ("not reached" in servers), key
        by_nature = FAILURES[key[0]][key[1]].startswith(BY_NATURE)
        assert by_nature == ("plain" not in servers), key


def test_the_small_budget_evicts():
    """Prevents a run in which compression had nothing to do."""
    servers = [case["servers"] for case in table.results()["cases"]]
    assert sum(found["small"]["rounds"] > 0 for found in servers) > len(servers) / 2
    for name in ("plain", "not reached"):
        assert not any(found[name]["rounds"] for found in servers)


def test_no_machine_is_named():
    """Prevents paths and addresses of the machine in what is committed."""
    text = table.RESULTS.read_text()
    assert not re.search(r"/(?:work|home|root|tmp|usr)/|127\.0\.0\.1", text)


def test_they_are_written_between_their_markers(tmp_path, monkeypatch):
    """Prevents a tool that loses the text around its tables."""
    file = tmp_path / "conformance.md"
    before, tables, after = generated(table.FILE, table.NAME)
    file.write_text(f"{before}stale\n{after}")
    monkeypatch.setattr(table, "FILE", file)
    monkeypatch.setattr("sys.argv", ["conformance_table.py", "--check"])
    with pytest.raises(SystemExit, match="stale"):
        table.main()
    monkeypatch.setattr("sys.argv", ["conformance_table.py"])
    table.main()
    assert file.read_text() == before + tables + after
