"""Programs that the model traces line by line.

    programs  one program of twenty lines, about 370 tokens
    chain     five programs that read one another's results, 1,500 to 2,000 tokens

Constants stand in the prompt, derived values only in what the model writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from benchmarks.quality.solve.format import Lookup, Problem
from benchmarks.quality.streams.words import words

LINES, EXAMPLE_LINES = 20, 6
CHAINED, CHAINED_LINES = 5, 16
LARGEST = 99
"""No value is larger, so that arithmetic is never what fails."""
# Lines back, from where operands are drawn evenly.
_REACHES = ((1, 2), (3, 5), (6, 10), (11, LINES * CHAINED))

NAMES = {
    "bench": words(
        """amber birch cedar delta ember fjord grove hazel inlet jade kelp lilac maple north ocean pearl quartz ridge
        slate thorn"""
    ),
    "held-out": words(
        """actor baker clerk diver envoy fisher guard hiker judge king lawyer miner nurse owner pilot queen rider
        sailor tailor usher"""
    ),
}
SIGNS = {"bench": {"+": "+", "-": "-", "*": "*"}, "held-out": {"+": "plus", "-": "minus", "*": "times"}}
CONSTANTS = {
    "bench": ("{n}: {name} = {v}", "{n}: {name} = {v}"),
    "held-out": ("{n}. let {name} be {v}", "{n}. {name} is {v}"),
}
"""How a program gives a name a number, and how its trace says so."""
ASKING = {
    "bench": "Trace this program. For every line write the line, the values put in, and the result.",
    "held-out": "Go through these instructions one after another and say what each name stands for.",
}
READS_EARLIER = {
    "bench": " A program may read what earlier programs computed.",
    "held-out": " A part may use names of earlier parts.",
}
HEADINGS = {"bench": "program {number}:", "held-out": "part {number}."}


@dataclass
class Program:
    """Source and right trace, as far as they are written.

    Attributes:
        source, trace: lines.
        lookups: derived values that a line of the trace takes from an earlier one.
        values: name -> (line of the trace that gave it, value, whether it was derived).
    """

    form: str
    source: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    values: dict[str, tuple[int, int, bool]] = field(default_factory=dict)

    def heading(self, number: int) -> None:
        for lines in (self.source, self.trace):
            lines.append(HEADINGS[self.form].format(number=number))

    def constant(self, number: int, name: str, value: int) -> None:
        first, second = CONSTANTS[self.form]
        self.values[name] = (len(self.trace), value, False)
        self.source.append(first.format(n=number, name=name, v=value))
        self.trace.append(second.format(n=number, name=name, v=value))

    def derived(self, number: int, name: str, left: str, sign: str, right: str | int) -> None:
        """`right` is a name or a number."""
        line, word = len(self.trace), SIGNS[self.form][sign]
        a = self.values[left][1]
        b = self.values[right][1] if isinstance(right, str) else right
        result = compute(a, sign, b)
        if self.form == "bench":
            self.source.append(f"{number}: {name} = {left} {word} {right}")
            self.trace.append(f"{number}: {name} = {left} {word} {right} = {a} {word} {b} = {result}")
        else:
            self.source.append(f"{number}. let {name} be {left} {word} {right}")
            self.trace.append(f"{number}. {name} is {left} {word} {right}, so {a} {word} {b}, and that is {result}")
        for place, operand in ((7, left), (9, right)):
            if isinstance(operand, str) and self.values[operand][2]:
                self.lookups.append(Lookup(line, place, self.values[operand][0]))
        self.values[name] = (line, result, True)


def compute(a: int, sign: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


def extend(program: Program, rng: Random, names: list[str]) -> None:
    """Adds a line for each name: two or three constants, then mostly derived values."""
    for number, name in enumerate(names, 1):
        if len(program.values) < 3:
            program.constant(number, name, rng.randint(3, 30))
            continue
        while True:
            left, right = _operand(program, rng), _operand(program, rng)
            if rng.random() < 0.4:
                right = rng.randint(2, 9)
            sign = rng.choice("++--*" if isinstance(right, int) else "+-")
            if sign == "*":
                right = 2
            b = program.values[right][1] if isinstance(right, str) else right
            if left != right and 0 < compute(program.values[left][1], sign, b) <= LARGEST:
                break
        program.derived(number, name, left, sign, right)


def _operand(program: Program, rng: Random) -> str:
    line = len(program.trace)
    derived = {name: at for name, (at, _, derived) in program.values.items() if derived}
    known = derived if len(derived) > 2 else {name: at for name, (at, _, _) in program.values.items()}
    near = {name: line - at for name, at in known.items()}
    choices = [[name for name, back in near.items() if low <= back <= high] for low, high in _REACHES]
    return rng.choice(rng.choice([choice for choice in choices if choice]))


def _program(rng: Random, form: str, lines: int) -> Program:
    program = Program(form)
    extend(program, rng, rng.sample(NAMES[form], lines))
    return program


def _chain(rng: Random, form: str, programs: int, lines: int) -> Program:
    chain = Program(form)
    for number in range(1, programs + 1):
        chain.heading(number)
        extend(chain, rng, [f"{name}{number}" for name in rng.sample(NAMES[form], lines)])
    return chain


def _problem(task: str, form: str, name: str, asking: str, example: Program, program: Program) -> Problem:
    messages = (
        {"role": "user", "content": "\n".join([asking, *example.source])},
        {"role": "assistant", "content": "\n".join(example.trace)},
        {"role": "user", "content": "\n".join([asking, *program.source])},
    )
    trace = program.trace
    return Problem(name, task, messages, trace[-1], tuple(trace), tuple(program.lookups), "\n".join(trace))


def programs(rng: Random, form: str, name: str) -> Problem:
    example = _program(rng, form, EXAMPLE_LINES)
    return _problem("programs", form, name, ASKING[form], example, _program(rng, form, LINES))


def chain(rng: Random, form: str, name: str) -> Problem:
    example = _chain(rng, form, 2, 4)
    asking = ASKING[form] + READS_EARLIER[form]
    return _problem("chain", form, name, asking, example, _chain(rng, form, CHAINED, CHAINED_LINES))
