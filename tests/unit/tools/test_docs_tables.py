"""Tables in README.md and docs/, compared with the code."""

import argparse
import dataclasses
import inspect
import re

import pytest

from documents import DOCS, README, code, section, table, tables
from sglang_triattn.cli import top
from sglang_triattn.compatibility.rules import ENVIRONMENT, FIRST_RULES, RULES
from sglang_triattn.compatibility.uncovered import UNCOVERED
from sglang_triattn.config import NAME_FIELDS, OPTIONS, SELECTIONS, SWITCH, VALUE_SHARE, Config, flag
from sglang_triattn.kernels.compact.reference import STRATEGIES
from sglang_triattn.model.families import FAMILIES
from sglang_triattn.patches.observability import metrics
from sglang_triattn.request import lifecycle
from sglang_triattn.request.names import CONVERSATION
from sglang_triattn.request.options import FIELDS, LONGEST_NAME, REASONS
from sglang_triattn.rounds.plan import Report
from sglang_triattn.verify.checks import CHECKS

CONFIGURATION, COMPATIBILITY = DOCS / "configuration.md", DOCS / "compatibility.md"
ANY = "…"
"""Stands in the documents for what a message says about a particular model."""


def flags() -> dict[str, str]:
    """Each flag with its metavar -> its default, as the documents show them."""
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    shown = {SWITCH: "off"}
    for option in OPTIONS:
        default = defaults[option.name]
        shown[f"{flag(option.name)} {option.metavar}"] = option.default_note if default is None else str(default)
    return shown


def test_flags():
    """Prevents a flag missing from the documents, and a default from an earlier version."""
    rows = table(CONFIGURATION, "Flags", "flag")
    assert {row[0].strip("`"): row[1] for row in rows} == flags()
    shown = table(README, "The flags that matter", "flag")
    assert len(shown) == 6
    assert {row[0].strip("`"): row[1] for row in shown}.items() <= flags().items()


def test_every_flag_named_anywhere_exists():
    """Prevents prose about a flag that was renamed."""
    known = {SWITCH, *(flag(option.name) for option in OPTIONS)}
    for file in (README, *DOCS.glob("*.md")):
        assert set(re.findall(r"--(?:enable-)?triattention[\w-]*", file.read_text())) <= known, file.name


def test_request_fields():
    """Prevents a request field without a row."""
    rows = table(CONFIGURATION, "Per-request control", "field")
    assert tuple(code(row[0])[0] for row in rows) == FIELDS
    assert f"1 to {LONGEST_NAME} characters" in dict(rows)["`conversation`"]


def test_sources_of_names():
    """Prevents a field that may name a conversation from being missing in the documents, or taken by default."""
    rows = table(DOCS / "clients.md", "Names without `custom_params`", "source")
    assert [code(row[0])[0] for row in rows] == [CONVERSATION, *NAME_FIELDS, "metadata.KEY", "X-..."]
    assert [row[3] for row in rows] == ["yes"] + ["no"] * (len(rows) - 1)
    assert Config.name_fields is None


def test_selections_and_strategies():
    """Prevents modes missing from the documents."""
    rows = table(CONFIGURATION, "Which tokens stay", "`--triattention-selection`")
    assert {code(row[0])[0] for row in rows} == set(SELECTIONS)
    assert [code(row[0])[0] for row in rows if "default" in row[0]] == [Config.selection]
    assert {code(row[0])[0] for row in table(DOCS / "method.md", "Selection", "selection")} == set(SELECTIONS)
    strategies = table(CONFIGURATION, "Pages and strategies", "strategy")
    assert {code(row[0])[0] for row in strategies} == {"remap", *STRATEGIES}
    text = section(CONFIGURATION, "Which tokens stay")
    assert VALUE_SHARE == 0.8
    assert "Four fifths of them (`--triattention-value-share`)" in text


def test_reports():
    """Prevents a report with fields that no row explains."""
    rows = table(DOCS / "operations.md", "One response", "field")
    assert [code(row[0])[0] for row in rows] == [field.name for field in dataclasses.fields(Report)]
    starts = table(DOCS / "clients.md", "Conversations", "`conversation`")
    known = {lifecycle.NEW, lifecycle.RESUMED, lifecycle.LOST, lifecycle.DIVERGED}
    assert {code(row[0])[0] for row in starts} == known


def test_metrics():
    """Prevents a metric that no row explains, and an explanation of one that does not exist."""
    rows = table(DOCS / "operations.md", "Metrics", "metric")
    kinds = {
        "counter": [*metrics.COUNTERS, metrics.REFUSED],
        "gauge": [*metrics.GAUGES, metrics.STOPPED],
        "histogram": list(metrics.HISTOGRAMS),
    }
    known = {(metrics.PREFIX + name, kind) for kind, names in kinds.items() for name in names}
    assert {(code(row[0])[0], row[1]) for row in rows} == known
    (refusals,) = (row[2] for row in rows if metrics.REFUSED in row[0])
    assert code(refusals) == ["reason", *REASONS]


def test_checks_of_verify():
    """Prevents a row of `sglang-triattn verify` whose failure no row explains."""
    rows = table(DOCS / "operations.md", "Is it right?", "check")
    known = {name: " ".join((check.__doc__ or "").split()) for name, check in CHECKS.items()}
    assert {name: f"Finds {finds}." for name, finds in rows} == known


def test_transitions():
    """Prevents documenting a life of requests that is not the code's."""
    rows = table(DOCS / "architecture.md", "The life of a request", "transition")
    named = {row[0] for row in rows} - {"arrive"}
    documented = {
        name
        for name, member in vars(lifecycle.CompressedRequest).items()
        if inspect.isfunction(member) and "->" in (member.__doc__ or "").partition("\n")[0]
    }
    assert named == documented
    drawing = inspect.getdoc(lifecycle).partition("\n\n")[2].partition("\n\n")[0]
    assert drawing in section(DOCS / "architecture.md", "The life of a request")


def test_refused_settings():
    """Prevents a refusal that is missing from the documents, or explained differently."""
    rows = table(COMPATIBILITY, "Refused settings", "setting")
    others = "pp-size|smg-grpc-mode|disaggregation-mode|speculative-draft-window-size|triattention"
    shown = {
        (name, reason, remedy if remedy.startswith(("use ", "add ")) else "")
        for names, reason, remedy in rows
        for name in re.findall(r"`--([\w-]+)", re.split(f", with `--(?:{others})", names)[0])
    }
    # A sentence of its own says of which model such a rule speaks.
    rules = [rule for rule in (*FIRST_RULES, *RULES) if not rule.names_model]
    known = {(rule.field.replace("_", "-"), rule.reason, rule.remedy) for rule in rules}
    assert shown == known
    variables = table(COMPATIBILITY, "Refused settings", "environment variable")
    assert {code(name)[0]: reason for name, reason in variables} == ENVIRONMENT


def test_refused_models():
    """Prevents a refusal that is missing from the documents, and one that the code no longer makes."""
    of_families = {family.refused.reason for family in FAMILIES.values() if family.refused}
    known = of_families | {text.format(ANY) for mark, text in UNCOVERED.items() if mark != "family"}
    assert {row[0] for row in table(COMPATIBILITY, "Refused models", "refused, because")} == known


@pytest.mark.parametrize("file", [README, *sorted(DOCS.glob("*.md"))], ids=lambda file: file.name)
def test_tables_are_whole(file):
    """Prevents a row with too many or too few cells, which would be shown wrongly."""
    for rows in tables(file.read_text()):
        assert len({len(row) for row in rows}) == 1, rows[0]


def test_options_of_top():
    """Prevents an option of `top` without a row."""
    parser = argparse.ArgumentParser(add_help=False)
    top.add_options(parser)
    shown = {code(row[0])[0].split()[0] for row in table(DOCS / "operations.md", "Top", "option")}
    assert shown == {name for action in parser._actions for name in action.option_strings}
