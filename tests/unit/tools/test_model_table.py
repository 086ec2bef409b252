"""The table of known models in docs/compatibility.md."""

import pytest

import model_table
from documents import generated
from sglang_triattn.model.families import FAMILIES, Family, Refused


def test_it_is_not_stale():
    """Prevents documents that promise a model which is refused, or the reverse."""
    assert not model_table.is_stale(), "run python tools/model_table.py"


def test_another_answer_makes_it_stale(monkeypatch):
    """Prevents a check that always passes."""
    monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", Family(refused=Refused("it is a llama")))
    assert model_table.is_stale()
    assert "| refused: it is a llama |" in "".join(model_table.lines())


def test_models_are_counted(monkeypatch):
    """Prevents a count of something else than the rows that are not refused."""
    text = "".join(model_table.lines())
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    accepted = [row for row in rows if "refused" not in row]
    assert len(rows) == len(list(model_table.CONFIGS.glob("*.json"))) == 48
    assert f"\n{len(accepted)} of these {len(rows)} models are compressed.\n" in text


def test_a_window_above_the_default_budget_is_listed():
    """Prevents "all" for a model that the default budget does not suit."""
    text = "".join(model_table.lines())
    assert "| 21 layers, all 256 dims of a head | all, with a budget of at least 4,096 |" in text
    assert "| 4 layers, all 256 dims of a head | all |" in text


def test_it_is_written_between_its_markers(tmp_path, monkeypatch):
    """Prevents a tool that loses the text around its table."""
    file = tmp_path / "compatibility.md"
    before, table, after = generated(model_table.FILE, model_table.NAME)
    file.write_text(f"{before}stale\n{after}")
    monkeypatch.setattr(model_table, "FILE", file)
    monkeypatch.setattr("sys.argv", ["model_table.py", "--check"])
    with pytest.raises(SystemExit, match="stale"):
        model_table.main()
    monkeypatch.setattr("sys.argv", ["model_table.py"])
    model_table.main()
    assert file.read_text() == before + table + after
