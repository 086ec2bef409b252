"""Streams of prose with statements that are asked for at the end: tasks `facts`, `early` and `words`.

A statement ties four digits (`facts`, `early`) or a word (`words`) to a person who is named once. Statements of `facts`
and `words` are spread evenly over the whole text, those of `early` over its first EARLY_TOKENS tokens.
"""

from __future__ import annotations

from itertools import islice
from random import Random

from benchmarks.quality.streams.draft import Draft, Order
from benchmarks.quality.streams.format import Question
from benchmarks.quality.streams.words import WORDS, deck, people, sentences

EARLY_TOKENS = 300
COUNTS = {"facts": 6, "early": 3, "words": 5}
# Sentences per paragraph.
PARAGRAPH = 7

PROMPTS = {
    "bench": """\
You keep the notebook of a small harbour town. You write down what happened during the day in plain sentences, in the \
order in which you hear of it, whether it matters or not. Now and then somebody gives you a number or a word to keep \
for them: an access code, a locker number, a password. You write that down exactly as it was said, once, in the middle \
of everything else. At the end of the page you will be asked for some of these numbers and words. Each belongs to one \
person, who is named in full, and nobody has two of the same kind. Answer with the number or the word alone, copied \
from the notebook digit by digit or letter by letter, and never guess. The notebook begins here.
""",
    "held-out": """\
This is a recording of everything that people told the receptionist of a large building, typed without comment. Most \
of it is small talk that nobody will need again. Some remarks, however, say which parking space, contract, shelf or \
nickname goes with which visitor. Visitors are always mentioned by first and last name, and each of them comes up a \
single time. When the recording is over, somebody calls and wants to know a few of these things. Repeat what was said, \
character for character, and add nothing of your own; a wrong number is worse than none. Here is the recording.
""",
}
# The statement and the question; the answer continues the statement's stem.
DIGITS = {
    "bench": (
        ("The access code of {name} is", "What is the access code of {name}?"),
        ("The locker number of {name} is", "What is the locker number of {name}?"),
        ("The badge number of {name} is", "What is the badge number of {name}?"),
        ("The telephone extension of {name} is", "What is the telephone extension of {name}?"),
    ),
    "held-out": (
        ("{name} leaves the car in parking space", "In which parking space does {name} leave the car?"),
        ("{name} has signed contract number", "Which contract has {name} signed?"),
        ("The parcel for {name} lies on shelf", "On which shelf does the parcel for {name} lie?"),
        ("{name} has to be reached in room", "In which room can {name} be reached?"),
    ),
}
WORD = {
    "bench": (
        ("The password of {name} is", "What is the password of {name}?"),
        ("The call sign of {name} is", "What is the call sign of {name}?"),
        ("The secret word of {name} is", "What is the secret word of {name}?"),
    ),
    "held-out": (
        ("Friends of {name} use the nickname", "Which nickname do friends of {name} use?"),
        ("{name} owns a dog called", "What is the dog of {name} called?"),
        ("On the box of {name} is the label", "Which label is on the box of {name}?"),
    ),
}
ASKING = {"bench": "Question: {question}\nAnswer: {stem}", "held-out": "Caller: {question}\nReception: {stem}"}


def mixed(rng: Random, order: Order) -> Draft:
    """A stream of `order.units` unrelated sentences and the statements of all three tasks."""
    statements = _statements(rng, order.form)
    wide = [entry for entry in statements if entry[0] != "early"]
    rng.shuffle(wide)
    early = [entry for entry in statements if entry[0] == "early"]
    # Positions are shares of the sentences, which differ in length, so `early` stays clear of its limit.
    share = min(1.0, 0.8 * EARLY_TOKENS / order.tokens)
    placed = [((i + 0.5) / len(wide), entry) for i, entry in enumerate(wide)]
    placed += [((i + 0.5) / len(early) * share, entry) for i, entry in enumerate(early)]
    lines = [(i / order.units, sentence, None) for i, sentence in enumerate(islice(_filler(rng, order), order.units))]
    lines += [(where, f"{stem}{secret}.", (task, text, secret)) for where, (task, stem, text, secret) in placed]
    private, questions = "", []
    for number, (_, sentence, asked) in enumerate(sorted(lines, key=lambda line: line[0])):
        if number:
            private += "\n\n" if number % PARAGRAPH == 0 else " "
        if asked:
            task, text, secret = asked
            questions.append(Question(task, text, secret, at=len(private)))
        private += sentence
    rng.shuffle(questions)
    return Draft(PROMPTS[order.form], private + "\n", tuple(questions))


def _filler(rng: Random, order: Order):
    return sentences(Random(rng.random()), order.form)


def _statements(rng: Random, form: str) -> list[tuple[str, str, str, str]]:
    """Task, stem, question text and secret of each statement."""
    names = people(rng, form)
    digits = iter(rng.sample(range(1000, 10000), COUNTS["facts"] + COUNTS["early"]))
    words = deck(rng, WORDS[form].secrets)
    found = []
    for task, count in COUNTS.items():
        kinds = WORD[form] if task == "words" else DIGITS[form]
        for number in range(count):
            stem, question = (text.format(name=name) for name in [next(names)] for text in kinds[number % len(kinds)])
            secret = f" {next(words) if task == 'words' else next(digits)}"
            found.append((task, stem, ASKING[form].format(question=question, stem=stem), secret))
    return found
