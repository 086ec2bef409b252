"""Figures in README.md, compared with benchmarks/results."""

import json
from itertools import product

from benchmarks.quality.cells import Unit
from benchmarks.quality.table import difference
from checkout import ROOT
from documents import DOCS, README, code, section, table, tables

KINDS_OF_ANSWERS = ("identifier", "state", "instruction", "own")
LARGER = "quality-held-out-qwen-1.5b"
LIMITS = " ".join(section(README, "Limits").split())


def results(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def right(name: str) -> dict[tuple[str, str, float], str]:
    """Share of right answers by task, policy and share kept."""
    return {(row["task"], row["policy"], row["share"]): f"{row['right']:.2f}" for row in results(name)["rows"]}


def test_cost_and_gains():
    """Prevents figures that are in no results file, and a date or machine that is not theirs."""
    capacity, agents = (results(name) for name in ("capacity", "agents"))
    cost, gains = tables(section(README, "Cost and gains"))
    served, steps, running, prefilled = gains[1:]
    h100 = results("serve-nvidia-h100-80gb-hbm3")
    assert served[1:] == [f"{row['tokens_per_second']:,.0f}" for row in h100["pool"]]
    lines = {(row["server"], row["context"]): f"{row['itl_p50_ms']:.1f}" for row in h100["context"]}
    assert steps[1:] == [f"{lines[name, 500]}, {lines[name, 8000]}" for name in ("plain", "compressed")]
    assert (h100["date"][:10], h100["machine"]["gpu"]) == ("2026-11-26", "NVIDIA H100 80GB HBM3")
    assert running[1:] == [f"{capacity[kind]['mean_running']:.3g}" for kind in ("plain", "compressed")]
    assert prefilled[1:] == [f"{agents[kind]['prefilled_tokens_per_turn'][-1]:.0f}" for kind in ("exact", "continued")]
    for found in (capacity, agents):
        assert found["date"].startswith("2026-11-21")
        assert [found["machine"][name] for name in ("cpu", "cores", "gpu")] == ["AMD EPYC", 2, "none"]
    for line, task in zip(cost[1:], ("facts", "programs", "shop"), strict=True):
        for cell, model in zip(line[1:], both_qwens(), strict=True):
            kept = [model.get((task, *key)) for key in (("dense", 0.25), ("default", 0.5), ("default", 0.25))]
            assert cell == (" ".join(map(share_of, kept)) if all(kept) else "not measured")


def test_limits():
    """Prevents stated limits that differ from the measured ones."""
    agents = results("agents")
    first = [f"{agents[kind]['ttft_ms_per_turn'][-1]:.0f}" for kind in ("exact", "continued")]
    assert "{} ms instead of {} ms to the first token of turn 8".format(*first) in LIMITS
    small = right("quality-held-out-smollm2")
    assert f"({small['text', 'newest', 0.25]}, default {small['text', 'default', 0.25]})" in LIMITS


def test_profiles():
    """Prevents a profile with figures that were measured at another share, or not at all."""
    rows = table(DOCS / "quality.md", "Profiles", "profile")
    qwen, small = (right(name) | right(f"{name}-half") for name in ("quality-held-out", "quality-held-out-smollm2"))
    asked = ("facts", "early", "words"), ("state", "variables", "agent"), ("text",)
    for row, share in zip(rows, (0.25, 0.5, 0.25, 0.125), strict=True):
        policy = "dense" if row[0] == "dense" else "default"
        for measured, tasks, cell in zip((qwen, qwen, qwen, small), (*asked, asked[0]), row[2:6], strict=True):
            found = [measured.get((task, policy, share), "") for task in tasks]
            assert cell == (" ".join(found) if all(found) else "not measured"), (row[0], tasks)


ASKED = {
    "facts": "numbers that a sentence gave",
    "early": "numbers within the first 300 tokens",
    "words": "words that a sentence gave",
    "state": "last values of counters in a log",
    "variables": "values of variables in code",
    "agent": "identifiers in an agent's tool results",
    "programs": "lines of programs that it traces",
    "shop": "word problems, all eight results right",
}
POLICIES = {
    "dense": "dense",
    "default": "default",
    "newest": "newest tokens only",
    "per-layer-head": "scores alone",
}


MEASURED = ((LARGER, "solve-qwen-1.5b"), ("quality-held-out", "quality-held-out-half", "solve-qwen-0.5b"))
"""Files of recall and of solving, of the larger model and of the smaller one."""


def both_qwens() -> list[dict[tuple[str, str, float], dict]]:
    return [
        {(row["task"], row["policy"], row["share"]): row for name in names for row in results(name)["rows"]}
        for names in MEASURED
    ]


def test_what_a_share_costs():
    """Prevents a loss that the results do not show, and an interval of something else."""
    models = both_qwens()
    lines = table(DOCS / "quality.md", "What a share costs", "asked for")
    for (task, name), line in zip(ASKED.items(), lines, strict=True):
        expected, counts = [name], []
        for found in models:
            rows = {key: found.get((task, *key)) for key in product(("dense", "default"), (0.5, 0.25))}
            dense = rows["dense", 0.25]
            counts += [str(counted(dense)[1])] if dense else []
            expected.append(share_of(dense) if dense else "not measured")
            for share in (0.5, 0.25):
                row = rows["default", share]
                expected.append(f"{share_of(row)} {counted(rows['dense', share])[2]}" if row else "not measured")
        expected.insert(1, " and ".join(dict.fromkeys(counts)))
        assert line == expected


def share_of(row: dict) -> str:
    right, count, _ = counted(row)
    return f"{right / count:.2f}"


def counted(row: dict) -> tuple[float, int, str]:
    """Right ones, of how many, and the interval of their share less the default's."""
    if "questions" in row:
        return row["right"] * row["questions"], row["questions"], f"[{row['low']:.2f}, {row['high']:.2f}]"
    if row["task"] == "programs":
        return row["lines"], row["of"], f"[{row['lines_low']:.2f}, {row['lines_high']:.2f}]"
    return row["right"], row["problems"], f"[{row['low']:.2f}, {row['high']:.2f}]"


def mark(low: float, high: float) -> str:
    """Above or below the default at 95 %."""
    return "²" if low > 0 else "¹" if high < 0 else ""


def test_other_choices():
    """Prevents figures of another policy, and marks of certainty that the intervals do not bear."""
    rows = {(row["policy"], row["task"]): row for row in results("quality-ideas")["rows"]}
    lines = table(DOCS / "quality.md", "Other choices, and one that knows the questions", "what decides")
    named = {"nothing: all stays": "dense", "the default": "default"}
    policies = [named.get(line[0]) or code(line[0])[0] for line in lines]
    assert sorted(policies) == sorted({policy for policy, _ in rows})
    for policy, line in zip(policies, lines, strict=True):
        found = [rows[policy, task] for task in ("facts", "early", "words", "state", "variables", "agent", "text")]
        assert line[1:] == [f"{row['right']:.2f}{mark(row['low'], row['high'])}" for row in found]


LOOK_UPS = (
    ("quality-look-ups-qwen-1.5b", "quality-look-ups-mixed-qwen-1.5b", "quality-look-ups-state-qwen-1.5b"),
    ("quality-look-ups",),
)
"""Files of look-ups, of the larger model and of the smaller one."""


def test_look_ups():
    """Prevents figures of another policy or model, and intervals that compare with something else."""
    lines = table(DOCS / "quality.md", "Look-ups", "asked for")
    plain, weighed = "settings:weights=no", "settings:value_share=1"
    models = []
    for names in LOOK_UPS:
        found = [results(name) for name in names]
        assert {one["setting"]["base"] for one in found} == {plain}
        models.append({(row["task"], row["policy"]): row for one in found for row in one["rows"]})
    asked = {task: ASKED[task] for task in ("facts", "early", "words", "state", "variables", "agent")}
    for (task, name), line in zip([*asked.items(), ("text", "next token of prose and code")], lines, strict=True):
        expected = [name]
        for rows in models:
            row = rows[task, weighed]
            expected += [f"{rows[task, policy]['right']:.2f}" for policy in ("dense", plain)]
            expected.append(f"{row['right']:.2f}{mark(row['low'], row['high'])}")
        assert line == expected


def test_look_ups_of_a_small_model():
    """Prevents a loss that the results show and the text does not."""
    rows = {(row["task"], row["policy"]): row for row in results("quality-look-ups-smollm2")["rows"]}
    text = " ".join(section(DOCS / "quality.md", "Look-ups").split())
    names = ("numbers", "early ones", "words", "counters", "code", "identifiers", "prose and code")
    tasks = ("facts", "early", "words", "state", "variables", "agent", "text")
    for task, name in zip(tasks, names, strict=True):
        plain, row = rows[task, "settings:weights=no"], rows[task, "settings:value_share=1"]
        assert f"{name} {plain['right']:.2f} to {row['right']:.2f}{mark(row['low'], row['high'])}" in text


def solved(traced: dict, worked: dict, *, sure: bool = True) -> list[str]:
    """The cells of one policy: programs, their lines and word problems, with marks of certainty where `sure`."""
    problems = [
        f"{row['right']}/{row['problems']}{mark(row['low'], row['high']) if sure else ''}" for row in (traced, worked)
    ]
    return [problems[0], f"{traced['lines']}/{traced['of']}", problems[1]]


NAMES_THAT_SOLVE = {
    "dense": "dense",
    "settings:weights=no": "default",
    "settings:weights=no,recency=0.25": "default, recency 0.25",
    "settings:value_share=1": "look-ups",
    "settings:recency=0.25": "look-ups, recency 0.25",
    "look-ups-near": "`look-ups-near`",
}


def runs_that_solve(*names: str, share: float = 0.25) -> list[dict[tuple[str, str], dict]]:
    """The rows of each run of the 1.5B model with that share kept, by task and policy."""
    runs = [results(f"solve-{name}-qwen-1.5b")["rows"] for name in names]
    return [{(row["task"], row["policy"]): row for row in rows if row["share"] == share} for rows in runs]


def lines_that_solve(label: str, rows: dict[tuple[str, str], dict]) -> list[list[str]]:
    """The lines of a table on one set of problems, `label` first."""
    lines = []
    for policy, name in NAMES_THAT_SOLVE.items():
        if ("shop", policy) in rows:
            pair = [rows[task, policy] for task in ("programs", "shop")]
            traced, worked = (f"{row['lines']}/{row['of']}{mark(row['lines_low'], row['lines_high'])}" for row in pair)
            programs, _, problems = solved(*pair)
            lines.append([label, name, programs, traced, problems, worked])
    return lines


def sums_that_solve(runs: list[dict[tuple[str, str], dict]], policy: str) -> tuple[int, int]:
    """Problems and lines that are right in all runs."""
    found = [rows[task, policy] for rows in runs for task in ("programs", "shop")]
    return sum(row["right"] for row in found), sum(row["lines"] for row in found)


def test_look_ups_that_solve():
    """Prevents figures of another policy: in that run, `default` is a server that leaves a fifth to scores."""
    (rows,) = runs_that_solve("look-ups")
    lines = table(DOCS / "quality.md", "Look-ups", "kept")
    policies = ("dense", "settings:weights=no", "default", "settings:value_share=1")
    for policy, line in zip(policies, lines, strict=True):
        assert line[2:] == solved(rows["programs", policy], rows["shop", policy], sure=False)


def test_the_ceiling_of_what_is_solved():
    """Prevents figures of another policy or budget, and marks of certainty that the intervals do not bear."""
    found = results("solve-eighth-qwen-1.5b")
    assert found["setting"]["base"] == "settings:weights=no"
    rows = {(row["task"], row["policy"], row["share"]): row for row in found["rows"]}
    lines = iter(table(DOCS / "quality.md", "An eighth, and the ceiling", "budget"))
    names = {
        "settings:weights=no": "default",
        "settings:value_share=1": "look-ups",
        "newest": "newest tokens only",
        "oracle": "`oracle`",
    }
    shares = {"a quarter": 0.25, "an eighth": 0.125}
    expected = [("all", "dense", "dense", 0.25)]
    expected += [(kept, name, policy, share) for kept, share in shares.items() for policy, name in names.items()]
    for kept, name, policy, share in expected:
        traced, worked = rows["programs", policy, share], rows["shop", policy, share]
        assert next(lines) == [kept, name, *solved(traced, worked, sure=policy != "dense")]
    assert next(lines, None) is None


def test_what_weights_are_fitted_on():
    """Prevents figures of another fit, and marks of certainty that the intervals do not bear."""
    expected = []
    runs = runs_that_solve("fitted-on-problems", "fitted-on-more-problems")
    for name, rows in zip(("one", "two"), runs, strict=True):
        for policy, called in (("settings:weights=no", "default"), ("settings:value_share=1", "look-ups")):
            expected.append([name, called, *solved(rows["programs", policy], rows["shop", policy])])
    assert list(table(DOCS / "quality.md", "What the weights are fitted on", "fitted on")) == expected


def test_recency_that_solves():
    """Prevents figures of another policy, a sum that the rows do not bear, and marks that the intervals do not bear."""
    first, aged, others = runs_that_solve("recency", "by-age", "recency-others")
    assert all(aged[key]["lines"] == first[key]["lines"] for key in aged.keys() & first.keys())
    expected = [*lines_that_solve("first", aged | first), *lines_that_solve("others", others)]
    assert list(table(DOCS / "quality.md", "How old a token is", "problems")) == expected
    shown = " ".join(section(DOCS / "quality.md", "How old a token is").split())
    (aged_right, aged_lines), (right, lines), (plain_right, plain_lines), (all_right, all_lines) = (
        sums_that_solve([first, others], policy)
        for policy in ("settings:recency=0.25", "settings:value_share=1", "settings:weights=no", "dense")
    )
    assert f"solve {aged_right}** and get {aged_lines} of 348 lines right, without one {right} and {lines}" in shown
    assert f"the default {plain_right} and {plain_lines}; everything kept solves {all_right}, with {all_lines}" in shown


def test_recency_that_recalls():
    """Prevents figures of another policy, and a loss that is called sure and is not."""
    shown = " ".join(section(DOCS / "quality.md", "How old a token is").split())
    asked = {
        (row["task"], row["policy"]): row
        for name in ("quality-recency-mixed-qwen-1.5b", "quality-recency-qwen-1.5b")
        for row in results(name)["rows"]
    }
    order = {"early": "early numbers", "facts": "numbers", "words": "words", "agent": "identifiers"}
    for far, near in (
        ("settings:value_share=1", "settings:recency=0.25"),
        ("settings:weights=no", "settings:weights=no,recency=0.25"),
    ):
        for task, name in (order | {"text": "prose and code"}).items():
            assert f"{name} {asked[task, far]['right']:.2f} to {asked[task, near]['right']:.2f}" in shown
    assert asked["early", "settings:recency=0.25"]["high"] < 0, "surely fewer"
    small = {(row["task"], row["policy"]): row for row in results("quality-recency-qwen2.5-coder-0.5b")["rows"]}
    for task, name in (("early", "early numbers"), ("agent", "identifiers")):
        far, near = small[task, "default"], small[task, "settings:recency=0.25"]
        assert f"{name} ({far['right']:.2f} to {near['right']:.2f})" in shown
        assert near["high"] < 0, "surely fewer"


def test_look_ups_fitted_at_launch():
    """Prevents figures of another policy or share, and sums that the rows do not bear."""
    first, others = runs_that_solve("launch", "launch-others")
    expected = [*lines_that_solve("first", first), *lines_that_solve("others", others)]
    assert list(table(DOCS / "quality.md", "Fitted at launch", "problems")) == expected
    shown = " ".join(section(DOCS / "quality.md", "Fitted at launch").split())
    (right, lines), (aged_right, aged_lines), (plain_right, plain_lines), (all_right, all_lines) = (
        sums_that_solve([first, others], policy)
        for policy in ("settings:value_share=1", "settings:recency=0.25", "settings:weights=no", "dense")
    )
    assert f"solve {right}** with {lines} of 348 lines right" in shown
    assert f"with a recency {aged_right} and {aged_lines}" in shown
    assert f"the default {plain_right} and {plain_lines}; everything kept solves {all_right}, with {all_lines}" in shown
    readme = " ".join(README.read_text().split())
    assert f"it solved {right} of 24 programs and word problems instead of {plain_right}" in readme
    assert f"[everything kept: {all_right}]" in readme
    half, less = (runs_that_solve("launch-more", share=share) for share in (0.5, 0.375))
    served = ("settings:value_share=1", "settings:recency=0.25", "settings:weights=no")
    ((right, lines),) = {sums_that_solve(half, policy) for policy in served}
    assert f"all three solve {right} with {lines} of 174 lines right" in shown
    assert "everything kept solves {} with {}".format(*sums_that_solve(half, "dense")) in shown
    weighed, aged, plain = (sums_that_solve(less, policy)[0] for policy in served)
    assert f"look-ups solve {weighed}, with a recency {aged}, the default {plain}" in shown
    asked = {(row["task"], row["policy"]): row for row in results("quality-launch-qwen-1.5b")["rows"]}
    for task, name in (("early", "early numbers"), ("facts", "numbers"), ("words", "words"), ("agent", "identifiers")):
        plain, weighed = (asked[task, f"settings:{each}"] for each in ("weights=no", "value_share=1"))
        assert f"{name} {plain['right']:.2f} to {weighed['right']:.2f}" in shown
    for task in ("facts", "agent"):
        assert asked[task, "settings:value_share=1"]["low"] > 0, "surely more"


def test_policies_that_solve():
    """Prevents figures of another policy, and marks of certainty that the intervals do not bear."""
    lines = iter(table(DOCS / "quality.md", "What a share costs", "kept"))
    for share, kept in ((0.5, "a half"), (0.25, "a quarter")):
        for policy, name in POLICIES.items():
            traced, worked = (both_qwens()[0][task, policy, share] for task in ("programs", "shop"))
            expected = [
                kept,
                name,
                f"{traced['right']}/{traced['problems']}{mark(traced['low'], traced['high'])}",
                f"{traced['lines']}/{traced['of']}{mark(traced['lines_low'], traced['lines_high'])}",
                f"{worked['right']}/{worked['problems']}{mark(worked['low'], worked['high'])}",
            ]
            assert next(lines) == expected
    assert next(lines, None) is None


def test_tool_loop():
    """Prevents figures of a tool loop that are not those of its run."""
    for size, column in (("0.5b", "policy"), ("1.5b", "policy, 1.5B")):
        found = results(f"tool-loop-qwen2.5-coder-{size}")
        answers = {(row["history"], row["policy"], row["kind"]): row for row in found["answers"]}
        turns = {(row["history"], row["policy"], row["turn"]): row for row in found["turns"]}
        rows = table(DOCS / "agents.md", "A long loop, measured", column)
        for name, *cells in rows:
            policy, _, stripped = name.strip("`").partition("`, ")
            key = ("stripped" if stripped else "kept", policy)
            kinds = [answers[*key, kind] for kind in KINDS_OF_ANSWERS]
            last, second = (turns[*key, turn] for turn in (12, 2))
            assert cells == [
                *(f"{row['right']}/{row['questions']}" for row in kinds),
                "" if policy == "dense" else "[{low:.2f}, {high:.2f}]".format(**answers[*key, "inputs"]),
                f"{last['held']:,.0f}",
                f"{last['prefilled']:.0f}",
                f"{second['ttft_ms'] / 1e3:.1f}, {last['ttft_ms'] / 1e3:.1f}",
            ], name
        assert len(rows) == 8


def loops_of_the_larger_model() -> dict[str, dict]:
    return {name: results(f"tool-loop-{name}qwen2.5-coder-1.5b") for name in ("", "more-", "least-")}


def test_tool_loops_of_more_agents():
    """Prevents figures of further agents that are not those of their runs."""
    runs, expected = loops_of_the_larger_model(), []
    for found, policy in product((runs["more-"], runs["least-"]), ("dense", "keep")):
        answers = {row["kind"]: row for row in found["answers"] if row["policy"] == policy}
        second, last = (row for row in found["turns"] if row["policy"] == policy and row["turn"] in (2, 12))
        expected.append(
            [
                *(f"{answers[kind]['right']}/{answers[kind]['questions']}" for kind in KINDS_OF_ANSWERS),
                "" if policy == "dense" else "[{low:.2f}, {high:.2f}]".format(**answers["inputs"]),
                f"{last['held']:,.0f}",
                f"{second['ttft_ms'] / 1e3:.1f}, {last['ttft_ms'] / 1e3:.1f}",
            ]
        )
    rows = table(DOCS / "agents.md", "A long loop, measured", "policy, twelve agents")
    assert [cells for _, *cells in rows] == expected


def test_tool_loops_of_longer_results():
    """Prevents figures of longer results and thoughts that are not those of their runs."""
    expected = []
    for name, policy in product(("longer-", "longer-other-"), ("dense", "keep")):
        found = results(f"tool-loop-{name}qwen2.5-coder-1.5b")
        assert (found["setting"]["results"], found["setting"]["thoughts"]) == ([300, 900], [100, 250])
        answers = {row["kind"]: row for row in found["answers"] if row["policy"] == policy}
        second, last = (row for row in found["turns"] if row["policy"] == policy and row["turn"] in (2, 12))
        expected.append(
            [
                *(f"{answers[kind]['right']}/{answers[kind]['questions']}" for kind in KINDS_OF_ANSWERS),
                f"{last['held']:,.0f}",
                f"{second['ttft_ms'] / 1e3:.1f}, {last['ttft_ms'] / 1e3:.1f}",
            ]
        )
    rows = table(DOCS / "agents.md", "A long loop, measured", "policy, longer results")
    assert [cells for _, *cells in rows] == expected


def test_tool_loops_of_all_agents():
    """Prevents sums over all agents, and how sure their differences are, that are not those of their runs."""
    agents = [agent for found in loops_of_the_larger_model().values() for agent in found["asked"]]

    def compared(*kinds: str) -> tuple[str, float, float]:
        kept, dense = (
            [
                [Unit(float(one["right"]), 0.0) for one in agent["answers"] if one["kind"] in kinds]
                for agent in agents
                if agent["agent"].startswith(f"kept {policy} ")
            ]
            for policy in ("keep", "dense")
        )
        assert len(kept) == len(dense) == 14
        found, whole = (sum(unit.right for units in each for unit in units) for each in (kept, dense))
        return f"{found:.0f} of {sum(map(len, kept))}, dense {whole:.0f}", *difference(kept, dense, kinds[0])

    text = " ".join(section(DOCS / "agents.md", "The same with a model of 1.5B").split())
    shown, low, high = compared("identifier", "state", "instruction")
    assert f"all fourteen agents with `keep` {shown}, a difference within [{low:.2f}, {high:.2f}]" in text
    shown, low, high = compared("identifier")
    assert f"Identifiers were a little fewer ({shown}; not sure)" in text
    assert low < 0 < high
    shown, low, _ = compared("state")
    assert f"readings that changed more ({shown}; surely)" in text
    assert low > 0
    shown, _, high = compared("own")
    assert f"is lost**, {shown.replace(', dense', ' against')}:" in text
    assert high < 0


def test_what_the_own_text_is_read_for():
    """Prevents figures of hidden text that are not those of its run."""
    rows = table(
        DOCS / "agents.md",
        "What the agent's own text is read for",
        "what the agent wrote in earlier turns is hidden from",
    )
    for (_, *cells), view in zip(rows, results("tool-loop-reads-qwen2.5-coder-0.5b")["views"], strict=True):
        assert cells == [
            f"{view['right']}/{view['questions']}",
            f"{view['logprob']:.2f}",
            "" if view["view"] == "all" else "[{logprob_low:.2f}, {logprob_high:.2f}]".format(**view),
        ]


def test_first_tokens():
    """Prevents times to first tokens that are not those of their run."""
    growths = {(row["policy"], row["part"]): row for row in results("first-token")["growths"]}
    for name, *cells in table(DOCS / "agents.md", "What a first token waits for", "served as"):
        parts = [growths[name.strip("`"), part] for part in ("forward_ms", "rest_ms")]
        assert cells == [f"{part[when]:.0f}" for part in parts for when in ("early_ms", "late_ms")]
