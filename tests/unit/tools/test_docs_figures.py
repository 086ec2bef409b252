"""Figures in README.md, compared with benchmarks/results."""

import json

from checkout import ROOT
from documents import DOCS, README, section, table, tables

LIMITS = " ".join(section(README, "Limits").split())


def results(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def right(name: str) -> dict[tuple[str, str, float], str]:
    """Share of right answers by task, policy and share kept."""
    return {(row["task"], row["policy"], row["share"]): f"{row['right']:.2f}" for row in results(name)["rows"]}


def test_three_numbers():
    """Prevents figures that are in no results file, and a date or machine that is not theirs."""
    capacity, agents, quality = (results(name) for name in ("capacity", "agents", "quality-held-out"))
    numbers, running, prefilled = tables(section(README, "Three numbers"))[0][1:]
    assert running[1:] == [f"{capacity[kind]['mean_running']:.3g}" for kind in ("plain", "compressed")]
    assert prefilled[1:] == [f"{agents[kind]['prefilled_tokens_per_turn'][-1]:.0f}" for kind in ("exact", "continued")]
    recalled = right("quality-held-out")
    assert numbers[1:] == [recalled["facts", policy, 0.25] for policy in ("dense", "default")]
    for found, date in ((capacity, "2026-11-21"), (agents, "2026-11-21"), (quality, "2026-11-22")):
        assert found["date"].startswith(date)
        assert [found["machine"][name] for name in ("cpu", "cores", "gpu")] == ["AMD EPYC", 2, "none"]


def test_limits():
    """Prevents stated limits that differ from the measured ones."""
    recalled = right("quality-held-out")
    keys = (("default", 0.25), ("dense", 0.25), ("default", 0.125))
    found, dense, least = (recalled["agent", *key] for key in keys)
    sentence = f"finds {found} of the identifiers in an agent's tool results (dense: {dense}), with an eighth {least}."
    assert sentence in LIMITS
    agents = results("agents")
    first = [f"{agents[kind]['ttft_ms_per_turn'][-1]:.0f}" for kind in ("exact", "continued")]
    assert "{} ms instead of {} ms to the first token of turn 8".format(*first) in LIMITS
    small = right("quality-held-out-smollm2")
    assert f"({small['text', 'newest', 0.25]}, default {small['text', 'default', 0.25]})" in LIMITS


def test_profiles():
    """Prevents a profile with figures that were measured at another share, or not at all."""
    rows = table(DOCS / "quality.md", "Profiles", "profile")
    qwen, small = right("quality-held-out") | right("quality-held-out-half"), right("quality-held-out-smollm2")
    asked = ("facts", "early", "words"), ("state", "variables", "agent"), ("text",)
    for row, share in zip(rows, (0.25, 0.5, 0.25, 0.125), strict=True):
        policy = "dense" if row[0] == "dense" else "default"
        for measured, tasks, cell in zip((qwen, qwen, qwen, small), (*asked, asked[0]), row[2:6], strict=True):
            found = [measured.get((task, policy, share), "") for task in tasks]
            assert cell == (" ".join(found) if all(found) else "not measured"), (row[0], tasks)
