"""Streams of code with assignments whose values are asked for at the end: task `variables`."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from benchmarks.quality.streams.draft import Draft, Order
from benchmarks.quality.streams.format import Question
from benchmarks.quality.streams.words import WORDS, deck, words

VARIABLES, REASSIGNED, QUOTED = 13, 4, 4

CODE_PROMPTS = {
    "bench": '''\
"""Settings and helpers of the warehouse service.

The module is read from top to bottom. Settings are plain assignments at the level of the module, somewhere between the
helper functions that were added over the years, and nobody ever sorted them. A setting holds a number or a short text.
If a setting is assigned more than once, the later assignment counts, as always in Python; what functions assign to
their own local variables does not change a setting. The tests at the end of the module compare settings with the
values that they should have at that point. A test is right only if the value is exactly the one that was assigned
last, digit by digit, with quotes around a text.
"""
''',
    "held-out": """\
// A page of the weather station's dashboard, written in one go and never tidied up.
//
// Between the functions there are global variables with calibration data. Each is declared with let or, if it exists
// already, simply given a new value; only its newest value is in force. Values are numbers, or strings in single
// quotes. Functions work on their parameters and leave the globals as they are. At the end of the script a few globals
// are printed for a check; behind each call a comment says what appears on the console, which is the value in force,
// copied without any change, so that whoever reads the script can compare it with the manual of the station.
""",
}
ASSIGNING = {
    "bench": ("{name} = {value}\n", "{name} = {value}\n"),
    "held-out": ("let {name} = {value};\n", "{name} = {value};\n"),
}
CODE_ASKING = {
    "bench": "# Test of one setting.\nassert {name} ==",
    "held-out": "// Check.\nconsole.log({name}); //",
}
# Verbs, nouns, and kinds of setting.
CODE_PARTS = {
    "bench": (
        words(
            """adjust apply build check clean collect count drop fetch find group load merge move pack parse rank read
            sort trim"""
        ),
        words("batch crate invoice label order pallet parcel queue record route shelf slot supplier truck weight zone"),
        words("limit margin offset quota rate retries size span threshold timeout"),
    ),
    "held-out": (
        words(
            """average blend clamp convert detect draw filter format guess hide interpolate log paint query reset round
            scale shift"""
        ),
        words(
            """barometer cloud dial front gauge gust humidity icon map month needle pollen rainfall sensor storm
            sunshine"""
        ),
        words("amount bias delay factor height index level period range step"),
    ),
}
# Pieces of code unrelated to the settings.
FUNCTIONS = {
    "bench": (
        """\
def {verb}_{noun}({arg}, limit={n}):
    return [item for item in {arg} if item.{verb2} < limit]
""",
        """\
def {verb}_{noun}({arg}):
    result = []
    for item in {arg}:
        result.append(item.{verb2}({n}))
    return result
""",
        """\
def {verb}_{noun}(self, {arg}):
    if not {arg}:
        raise ValueError("no {arg} to {verb}")
    self.{noun} = {arg}
""",
        """\
class {Noun}{Verb}:
    def __init__(self, {arg}):
        self.{arg} = {arg}

    def {verb}(self):
        return self.{arg}.{verb2}()
""",
        """\
def {verb}_{noun}(path):
    with open(path) as file:
        return {verb2}(file.read(), {n})
""",
        """\
# {Verb} each {noun} before the next {arg} arrives.
""",
    ),
    "held-out": (
        """\
function {verb}{Noun}({arg}) {{
  return {arg}.map((entry) => entry.{verb2}({n}));
}}
""",
        """\
function {verb}{Noun}({arg}, done) {{
  if ({arg} === null) {{
    return done(new Error('{arg}'));
  }}
  {arg}.{verb2}(done);
}}
""",
        """\
document.querySelector('#{noun}-{arg}').addEventListener('click', () => {verb}{Noun}({n}));
""",
        """\
const {verb}{Noun} = async ({arg}) => {{
  const reply = await fetch(`/{noun}/${{{arg}}}`);
  return reply.json();
}};
""",
        """\
export class {Noun}{Verb} extends Panel {{
  {verb2}({arg}) {{
    this.{noun} = {arg};
  }}
}}
""",
        """\
/* {Verb} the {noun} while the {arg} is shown. */
""",
    ),
}


def variables(rng: Random, order: Order) -> Draft:
    """A stream of `order.units` pieces of code with thirteen variables among them, four of them assigned twice."""
    form = order.form
    names = _variable_names(rng, form)
    numbers = iter(rng.sample(range(100, 10000), VARIABLES + REASSIGNED))
    quote = {"bench": '"', "held-out": "'"}[form]
    secrets = deck(rng, WORDS[form].secrets)
    values = [f"{quote}{next(secrets)}{quote}" if i < QUOTED else str(next(numbers)) for i in range(VARIABLES)]
    rng.shuffle(values)
    # Where each is last assigned, as a share of the text.
    last = {name: ((i + 0.5) / VARIABLES, value) for i, (name, value) in enumerate(zip(names, values, strict=True))}
    pieces = [(where, name, value, 0) for name, (where, value) in last.items()]
    for name in rng.sample(names[VARIABLES // 3 :], REASSIGNED):
        pieces.append((rng.uniform(0, 0.8 * last[name][0]), name, str(next(numbers)), 0))
    snippets = _functions(rng, form)
    pieces += [((i + rng.random()) / order.units, "", next(snippets), 1) for i in range(order.units)]
    private, at, declared = "", {}, set()
    for number, (_, name, text, _) in enumerate(sorted(pieces)):
        private += "\n" if number else ""
        if name:
            at[name] = len(private)
            text = ASSIGNING[form][name in declared].format(name=name, value=text)
            declared.add(name)
        private += text
    questions = [
        Question("variables", CODE_ASKING[form].format(name=name), f" {last[name][1]}", at[name]) for name in names
    ]
    rng.shuffle(questions)
    return Draft(CODE_PROMPTS[form], private, tuple(questions))


def _variable_names(rng: Random, form: str) -> list[str]:
    _, nouns, kinds = CODE_PARTS[form]
    chosen = rng.sample([(noun, kind) for noun in nouns for kind in kinds], VARIABLES)
    return [f"{noun}_{kind}" if form == "bench" else noun + kind.capitalize() for noun, kind in chosen]


def _functions(rng: Random, form: str) -> Iterator[str]:
    verbs, nouns, _ = CODE_PARTS[form]
    kinds, verb, verb2, noun, arg = (deck(rng, items) for items in (FUNCTIONS[form], verbs, verbs, nouns, nouns))
    while True:
        word = {"verb": next(verb), "verb2": next(verb2), "noun": next(noun), "arg": next(arg)}
        capitals = {"Verb": word["verb"].capitalize(), "Noun": word["noun"].capitalize()}
        yield next(kinds).format(**word, **capitals, n=rng.randrange(2, 500))
