"""Checks of what rounds did to memory: counters, reports, freed slots, bounds. Each returns a `Finding`."""

from __future__ import annotations

from sglang_triattn.verify.client import COUNTERS, Answer
from sglang_triattn.verify.expected_outcome import Outcome, is_possible, possible, replay
from sglang_triattn.verify.finding import Finding, failed, not_tested, passed
from sglang_triattn.verify.traffic import Evidence


def active(found: Evidence) -> Finding:
    """Finds a replica that serves uncompressed under the same URL."""
    replicas = found.after.replicas
    on = sum(replica is not None for replica in replicas)
    if on < len(replicas):
        return failed(f"{len(replicas) - on} of {len(replicas)} replicas do not compress")
    config, many = found.config, f", on {on} replicas" if on > 1 else ""
    return passed(f"budget {config.budget:,}, interval {config.interval:,}, {config.selection}{many}")


def counters(found: Evidence) -> Finding:
    """Finds sums of `/server_info` that stand still, or that count something else than rounds of requests."""
    ours, delta = own_sums(found), {name: found.after.total(name) - found.before.total(name) for name in COUNTERS}
    return _compare(found, "/server_info", ours, delta)


def metrics(found: Evidence) -> Finding:
    """Finds Prometheus counters that a dashboard must not believe."""
    before, after = found.before.metrics, found.after.metrics
    if before is None or after is None:
        return not_tested("the server was started without --enable-metrics")
    return _compare(found, "/metrics", own_sums(found), {name: round(after[name] - before[name]) for name in COUNTERS})


def report(found: Evidence) -> Finding:
    """Finds reports that are missing, are another request's, or count other rounds than the settings ask for."""
    for answer in [found.warm, found.dense, *found.compressed]:
        counts, tokens = answer.report, len(answer.ask.ids) + len(answer.output) - 1
        if counts.get("logical_length") != tokens:
            return failed(
                f"a request of {tokens} computed tokens reports a logical length of {_logical_length(counts)}"
            )
        if counts["physical_length"] + counts["evicted_tokens"] != tokens:
            return failed(
                f"physical length {counts['physical_length']} + evicted {counts['evicted_tokens']} is not {tokens}"
            )
    for answer in (found.warm, found.dense):
        if answer.report["rounds"]:
            return failed(f"a request within its budget, or without one, had {answer.report['rounds']} rounds")
    for answer in found.compressed:
        counts = answer.report
        if not counts["rounds"] or not counts["evicted_tokens"]:
            return failed("a request that outgrew its budget had no round")
        if found.exact_plan and not _is_right(found, answer):
            due = max(outcomes(found, answer), key=lambda each: -each.rounds)
            return failed(
                f"{counts['rounds']} rounds evicted {counts['evicted_tokens']} tokens of {counts['logical_length']}; "
                f"by its settings, {due.rounds} rounds evict {due.evicted_tokens}"
                f"{', in a prefill without chunks' if _compacts_prompt(answer) else ''}"
            )
    early = "" if found.exact_plan else "; memory was short, so their number was not foreseen"
    rounds = sum(answer.report["rounds"] for answer in found.compressed)
    return passed(f"{len(found.compressed)} requests, {rounds} rounds, each as due{early}")


def freed(found: Evidence) -> Finding:
    """Finds memory that is evicted on paper: fewer slots, or other pages, than the evicted tokens leave empty."""
    page, sums = found.page_size, Outcome()
    for answer in found.compressed:
        counts = answer.report
        slots, evicted, rounds = (counts.get(name, 0) for name in ("freed_slots", "evicted_tokens", "rounds"))
        exact = found.exact_plan and not _compacts_prompt(answer)
        due = _freed_by(found, answer) if exact else evicted
        # Each round may leave, or find, one page that is filled in part.
        slack = 0 if exact or page == 1 else rounds * (page - 1)
        if slots % page or abs(slots - due) > slack:
            return failed(f"a request freed {slots} slots for {evicted} evicted tokens, where {due} were due")
        sums = Outcome(sums.rounds + rounds, sums.evicted_tokens + evicted, sums.freed_slots + slots)
    what = "one for each" if page == 1 else f"whole pages of {page}"
    return passed(f"{sums.freed_slots:,} slots for {sums.evicted_tokens:,} evicted tokens, {what}")


def bound(found: Evidence) -> Finding:
    """Finds requests that hold more than frozen prefix + budget + interval."""
    worst = 0.0
    for answer in found.compressed:
        frozen, settings = found.frozen_of(answer), found.settings_of(answer)
        most = frozen + settings.most_private(frozen, _tokens_computed(answer) - frozen)
        held = answer.report.get("physical_length", 0)
        if held > most or not held:
            return failed(f"a request held {held or 'an unknown number of'} entries at its end; its bound is {most}")
        worst = max(worst, held / most)
    return passed(f"no request held more than {worst:.0%} of its bound at its end")


def memory(found: Evidence) -> Finding:
    """Finds evicted tokens whose slots stay in use, and slots that are not given back when requests end."""
    if found.shared:
        return not_tested("others use the server, whose requests hold memory too")
    before, after = found.load_before.used, found.load_after.used
    if after > before:
        return failed(f"{after - before:,} slots are still in use that were not before these requests")
    page, prefix = found.page_size, len(found.prefix) * len(found.after.replicas)
    bounds = dense = before + prefix
    for answer in found.crowd:
        frozen = found.frozen_of(answer)
        # The step that is queued may hold a page more, and the last page is filled in part.
        private = found.settings_of(answer).most_private(frozen, _tokens_computed(answer) - frozen)
        bounds += frozen + private - answer.cached + 2 * page
        dense += len(answer.ask.ids) + len(answer.output) - answer.cached
    if found.peak > bounds:
        return failed(
            f"{found.peak:,} slots were in use while {len(found.crowd)} requests ran; their bound is {bounds:,}"
        )
    return passed(f"all returned at the end; at most {found.peak:,} slots in use, where dense needs {dense:,}")


def _tokens_computed(answer: Answer) -> int:
    """Tokens whose K/V was computed: the last one has none."""
    return len(answer.ask.ids) + len(answer.output) - 1


def outcomes(found: Evidence, answer: Answer) -> set[Outcome]:
    """What rounds may have done to a request: one thing, unless it ran together with others and rounds are level."""
    of = {
        "prompt": len(answer.ask.ids),
        "frozen": found.frozen_of(answer),
        "logical": _tokens_computed(answer),
        "page_size": found.page_size,
    }
    alone = found.config.rounds_per_step == 0 or (answer is found.small and not found.shared)
    return {replay(found.settings_of(answer), **of)} if alone else possible(found.settings_of(answer), **of)


def _freed_by(found: Evidence, answer: Answer) -> int:
    """Slots that rounds free in the outcome that is closest to what the request reports."""
    evicted, freed = answer.report["evicted_tokens"], answer.report["freed_slots"]
    closest = min(
        outcomes(found, answer), key=lambda due: (abs(due.evicted_tokens - evicted), abs(due.freed_slots - freed))
    )
    return closest.freed_slots


def own_sums(found: Evidence) -> dict[str, int]:
    """The sums of what these requests report."""
    return {name: sum(each.report.get(name, 0) for each in (*found.compressed, *found.resumed)) for name in COUNTERS}


def _compare(found: Evidence, where: str, ours: dict[str, int], delta: dict[str, int]) -> Finding:
    wrong = [name for name in COUNTERS if (delta[name] < ours[name] if found.shared else delta[name] != ours[name])]
    if wrong:
        name = wrong[0]
        hint = "" if delta[name] < ours[name] else "; if others use the server, add --shared"
        return failed(f"{name} of {where} rose by {delta[name]:,}, but these requests report {ours[name]:,}{hint}")
    more = ", others' included" if found.shared else ""
    return passed(", ".join(f"{name.replace('_', ' ')} +{delta[name]:,}" for name in COUNTERS) + more)


def _is_right(found: Evidence, answer: Answer) -> bool:
    """Whether the reported rounds are those that were due."""
    reported = Outcome(
        *(answer.report[name] for name in ("rounds", "evicted_tokens", "freed_slots", "physical_length"))
    )
    if not _compacts_prompt(answer):
        counts = {(due.rounds, due.evicted_tokens) for due in outcomes(found, answer)}
        return (reported.rounds, reported.evicted_tokens) in counts
    return is_possible(
        found.settings_of(answer),
        reported,
        prompt=len(answer.ask.ids),
        frozen=found.frozen_of(answer),
        logical=reported.physical_length + reported.evicted_tokens,
    )


def _compacts_prompt(answer: Answer) -> bool:
    """Whether rounds may have run while the prompt was prefilled, in chunks as long as there was memory for."""
    return answer.ask.control.get("prompt") == "compact"


def _logical_length(report: dict) -> str:
    return str(report.get("logical_length", "nothing at all"))
