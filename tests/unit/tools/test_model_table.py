"""The table of known models in docs/compatibility.md."""

import pytest

import model_table
import sglang_registry
from documents import generated, section, tables
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
    refused = sum("refused" in row for row in rows)
    (plain, *_), *others = tables(text)[0][1:]
    models = len(plain.split(", ")) + len(others)
    assert models == len(list(model_table.CONFIGS.glob("*.json"))) == 50
    assert f"\n{models - refused} of these {models} models are compressed.\n" in text


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


def documented() -> dict[str, list[str]]:
    """The architectures of each outcome in the table of SGLang's registry."""
    (rows,) = tables(section(model_table.FILE, "Every architecture"))
    found = {outcome: (int(number), names.split(", ")) for outcome, number, names in rows[1:]}
    assert all(number == len(names) for number, names in found.values())
    return {outcome: names for outcome, (_, names) in found.items()}


def test_every_architecture_of_the_registry_stands_in_the_table_once():
    """Prevents a census that leaves out what a new SGLang serves, or counts it twice."""
    named = [name for names in documented().values() for name in names]
    assert sorted(named) == sorted(sglang_registry.architectures())
    assert len(named) > 250


def test_the_share_is_that_of_the_table():
    """Prevents a promise of more architectures than are accepted."""
    found = [
        model_table.Outcome(name, *(outcome.split(": ", 1) if ": " in outcome else (outcome, "")))
        for outcome, names in documented().items()
        for name in names
    ]
    assert "".join(model_table.registry_lines(found)) == generated(model_table.FILE, model_table.REGISTRY)[1]


def test_no_architecture_without_a_row_is_accepted():
    """Prevents compressing a model of which only a plain config.json is known."""
    accepted = [name for outcome, names in documented().items() if "accepted" in outcome for name in names]
    assert set(accepted) <= set(FAMILIES)


# With a known model's file, which needs no class to be imported: (architecture, module, outcome).
QUICK = [
    ("LlamaForCausalLM", "llama", model_table.ACCEPTED, ""),
    ("GraniteMoeHybridForCausalLM", "granitemoehybrid", model_table.ACCEPTED, ""),
    ("KimiLinearForCausalLM", "kimi_linear", model_table.ACCEPTED, ""),
    ("DeepseekV32ForCausalLM", "deepseek_v2", model_table.REFUSED, "an indexer selects"),
    ("Qwen3_5ForConditionalGeneration", "qwen3_5", model_table.ACCEPTED, ""),
    ("Gemma3ForConditionalGeneration", "gemma3_mm", model_table.ACCEPTED, ""),
    ("Lfm2VlForConditionalGeneration", "lfm2_vl", model_table.TEXT, ""),
    ("LlamaForCausalLMEagle3", "llama_eagle3", model_table.ALONE, ""),
    ("Qwen3Model", "qwen3_embedding", model_table.ALONE, ""),
    ("SDARForCausalLM", "sdar", model_table.ALONE, ""),
    ("Mamba2ForCausalLM", "mamba2", model_table.STATES, ""),
    ("TransformersForCausalLM", "transformers", model_table.OTHERS, ""),
]


@pytest.mark.parametrize(("name", "module", "kind", "reason"), QUICK, ids=lambda value: str(value)[:20])
def test_outcomes(name, module, kind, reason):
    """Prevents a head that drafts, or an encoder, from counting as a model that is or is not compressed."""
    outcome = model_table._outcome(name, module)
    assert outcome.kind == kind
    assert reason in outcome.reason


def test_an_architecture_without_a_configuration_fails_closed(monkeypatch):
    """Prevents an unknown architecture from counting as a plain decoder, and a known one as unknown."""
    monkeypatch.setattr(sglang_registry, "configuration", lambda name, module: None)
    unknown = model_table._outcome("MossVLForConditionalGeneration", "moss_vl")
    assert unknown.kind == model_table.NO_CONFIG + model_table.REFUSED
    assert "not known here" in unknown.reason
    assert model_table._outcome("OrionForCausalLM", "orion").kind == model_table.NO_CONFIG + model_table.ACCEPTED


@pytest.mark.wide
def test_the_table_of_the_registry_is_not_stale(monkeypatch, capsys):
    """Prevents documents that promise an architecture which is refused, or the reverse; builds a configuration of each
    of them."""
    monkeypatch.setattr("sys.argv", ["model_table.py", "--registry", "--check"])
    model_table.main()
    monkeypatch.setitem(FAMILIES, "GemmaForCausalLM", Family(refused=Refused("it is a gemma")))
    with pytest.raises(SystemExit, match="stale"):
        model_table.main()
