"""Streams of an agent's work, with identifiers returned by its tools that it needs again at the end: task `agent`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random

from benchmarks.quality.streams.draft import Draft, Order
from benchmarks.quality.streams.format import Question
from benchmarks.quality.streams.words import deck, people

FIELDS = 13

AGENT_PROMPTS = {
    "bench": """\
You are an agent that helps the staff of a mail-order shop. You work in steps. Each step has a thought, an action, \
which is a call of one tool as a line of JSON, and an observation, which is the JSON that the tool returns. The tools \
are find_order, open_ticket, check_payment and, to act on what was found, ship_order, close_ticket and refund_payment. \
Those that act need the identifiers that earlier observations showed, and calling them with a wrong identifier cannot \
be undone. So never make one up: look back at the observation for that customer and copy the identifier exactly. Go \
through all customers first, then act.
""",
    "held-out": """\
The assistant below runs a hotel's front desk by calling functions. A call is written between call tags as the \
function's name and its arguments in JSON; what the function returned follows between result tags, also in JSON. First \
the assistant gathers what is known about every guest with get_booking, get_invoice and get_transfer. Afterwards it \
uses change_booking, send_invoice and confirm_transfer, whose arguments must be taken from the results above, \
character by character. An argument that belongs to another guest is a serious mistake, because guests see each \
other's data then.
""",
}


@dataclass(frozen=True)
class Tool:
    """What the agent looks up and what it does with the result later."""

    name: str
    thought: str
    identifier: str
    """The field of the result that is asked for."""
    others: dict[str, int | tuple[str, ...]]
    """Further fields: numbers below a limit, or one of several words."""
    acts: str
    """The tool that needs the identifier."""


TOOLS = {
    "bench": (
        Tool(
            "find_order",
            "I look up the order of {name}.",
            "order_id",
            {"status": ("packed", "paid", "waiting"), "items": 9, "shelf": 60},
            "ship_order",
        ),
        Tool(
            "open_ticket",
            "{name} has complained, so I open a ticket.",
            "ticket_id",
            {"priority": ("low", "normal", "high"), "queue": 30},
            "close_ticket",
        ),
        Tool(
            "check_payment",
            "Has {name} paid?",
            "payment_id",
            {"method": ("card", "transfer", "cash"), "amount": 400},
            "refund_payment",
        ),
    ),
    "held-out": (
        Tool(
            "get_booking",
            "Let me see when {name} stays.",
            "reference",
            {"nights": 14, "view": ("sea", "park", "street")},
            "change_booking",
        ),
        Tool(
            "get_invoice",
            "What does {name} owe?",
            "invoice",
            {"total": 900, "currency": ("EUR", "CHF", "GBP"), "settled": ("yes", "no")},
            "send_invoice",
        ),
        Tool(
            "get_transfer",
            "{name} wants to be picked up.",
            "pickup",
            {"seats": 6, "from": ("airport", "station", "harbour")},
            "confirm_transfer",
        ),
    ),
}
PERSON = {"bench": "customer", "held-out": "guest"}
STEP = {
    "bench": (
        "Thought: {thought}\nAction: ",
        '{{"tool": "{tool}", "arguments": {arguments}',
        "}}\nObservation: {result}\n",
    ),
    "held-out": ("{thought}\n<call>", "{tool} {arguments}", "</call>\n<result>{result}</result>\n"),
}
ACT = {
    "bench": "All customers are known. Now I act for {name}.",
    "held-out": "That was everybody. Next I do what {name} asked for.",
}


def agent(rng: Random, order: Order) -> Draft:
    """A stream of `order.units` steps of an agent, with questions about thirteen of the identifiers."""
    form = order.form
    opening, call, closing = STEP[form]
    names, tools = people(rng, form), deck(rng, TOOLS[form])
    identifiers = iter(rng.sample(range(10000, 100000), order.units))
    private, steps = "", []
    for _ in range(order.units):
        name, tool, identifier = next(names), next(tools), next(identifiers)
        result: dict[str, int | str] = {tool.identifier: identifier}
        for other, values in tool.others.items():
            result[other] = rng.randrange(1, values) if isinstance(values, int) else rng.choice(values)
        # The identifier is not always first.
        result = dict(rng.sample(list(result.items()), len(result)))
        steps.append((len(private), name, tool, identifier))
        arguments = json.dumps({PERSON[form]: name})
        private += opening.format(thought=tool.thought.format(name=name)) + call.format(
            tool=tool.name, arguments=arguments
        )
        private += closing.format(result=json.dumps(result))
    questions = []
    for part in range(min(FIELDS, len(steps))):
        low, high = (len(steps) * edge // min(FIELDS, len(steps)) for edge in (part, part + 1))
        at, name, tool, identifier = steps[rng.randrange(low, high)]
        arguments = json.dumps({PERSON[form]: name})[:-1] + f', "{tool.identifier}":'
        text = opening.format(thought=ACT[form].format(name=name)) + call.format(tool=tool.acts, arguments=arguments)
        questions.append(Question("agent", text, f" {identifier}", at))
    rng.shuffle(questions)
    return Draft(AGENT_PROMPTS[form], private, tuple(questions))
