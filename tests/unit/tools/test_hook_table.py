"""The table of hooks in docs/architecture.md."""

import pytest

import hook_table
from documents import generated
from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.hooks.registry import register
from sglang_triattn.patches.launch.census_switch import VARIABLE


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def test_it_is_not_stale():
    """Prevents a table that lists other hooks than the package's."""
    assert not hook_table.is_stale(), "run python tools/hook_table.py"


def test_a_new_hook_makes_it_stale(monkeypatch):
    """Prevents a check that always passes."""
    hooks = hook_table.all_hooks()
    hooks["Main process"].pop()
    monkeypatch.setattr(hook_table, "all_hooks", lambda: hooks)
    assert hook_table.is_stale()
    hooks["Main process"].append(Hook("sglang.srt.new.function", "after", register, "", why="is new"))
    assert hook_table.is_stale()
    assert "| `new.function` | after | `patches/hooks/registry.py` | is new |\n" in hook_table.lines()


def test_it_is_written_between_its_markers(tmp_path, monkeypatch):
    """Prevents a tool that loses the text around its table."""
    file = tmp_path / "architecture.md"
    before, table, after = generated(hook_table.FILE, hook_table.NAME)
    file.write_text(f"{before}stale\n{after}")
    monkeypatch.setattr(hook_table, "FILE", file)
    monkeypatch.setattr("sys.argv", ["hook_table.py", "--check"])
    with pytest.raises(SystemExit, match="stale"):
        hook_table.main()
    monkeypatch.setattr("sys.argv", ["hook_table.py"])
    hook_table.main()
    assert file.read_text() == before + table + after == hook_table.FILE.read_text()
