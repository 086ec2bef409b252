"""Words, names and unrelated sentences of the quality benchmark, in two forms that share none of them.

The benchmark runs on `bench`. `held-out` asks for the same kinds of things in other words, so that a choice made on one
form can be checked on the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

Item = TypeVar("Item")

FORMS = ("bench", "held-out")


@dataclass(frozen=True)
class Words:
    """The words of one form."""

    first_names: list[str]
    last_names: list[str]
    secrets: list[str]
    """Words that no unrelated sentence holds."""
    things: list[str]
    """Names for counters, settings and the like."""
    openings: list[str]
    subjects: list[str]
    doings: list[str]
    """What a subject did; `{n}` is a number."""
    endings: list[str]


def words(text: str) -> list[str]:
    """Splits at spaces."""
    return text.split()


def phrases(text: str) -> list[str]:
    """Splits at semicolons."""
    return [" ".join(phrase.split()) for phrase in text.split(";")]


WORDS = {
    "bench": Words(
        first_names=words(
            """Marta Anselm Ilse Bruno Clara Dorian Edith Felix Greta Henrik Irina Jonas Katrin Leopold
            Miriam Norbert Olga Pascal Rosa Stefan Teresa Ulrich Vera Wolfgang Yvonne Zacharias Amalia Benno Cora
            Dietmar"""
        ),
        last_names=words(
            """Vellin Arnborg Castell Duret Ehlers Falkner Gronau Hollis Imhof Jarosz Kestrel Lindqvist
            Marchetti Nordahl Ostrow Pellegrin Quist Rademaker Solberg Thorne Ulvang Verhoef Wendell Xander Yardley
            Zeller Ambrose Brandt Corelli Dahlgren"""
        ),
        secrets=words(
            """lantern walnut copper thunder orchid saddle pepper marble falcon violin ginger anchor velvet
            cactus pirate magnet turtle candle silver dragon rocket lemon tiger castle ribbon hammer island diamond
            coffee shadow"""
        ),
        things=words(
            """amber basil cedar dune ember fjord grove hazel indigo jasper kelp linen mango nickel onyx pearl
            quartz raven sepia topaz umber violet willow zinc"""
        ),
        openings=phrases(
            """In the early morning; Before the bell rang; On the way to the harbour; After a long pause; Late in
            the week; During the second shift; As usual; Without much talk; Near the old mill; For the third time
            that month; Once the fog had lifted; Against all advice; While the kettle boiled; Behind the station;
            With some reluctance; A little later; Under a grey sky; Towards evening"""
        ),
        subjects=phrases(
            """the gardener; a quiet clerk; the ferry crew; one of the carpenters; the night porter; two students
            from the college; the woman at the counter; an elderly surveyor; the baker's apprentice; the whole
            committee; a visiting engineer; the lighthouse keeper; the new librarian; a group of tourists; the
            postman; the choir; an inspector from the ministry; the fishmonger; the schoolmaster; a neighbour; the
            archivist; the crane driver; a stray dog; the owner of the inn; the glazier; the town council"""
        ),
        doings=phrases(
            """looked over the ledger line by line; repaired the hinge of the gate; counted {n} crates on the pier;
            argued about the price of timber; put the kettle on and waited; walked {n} steps along the wall;
            carried the heavy trunk upstairs; forgot an umbrella in the hall; painted the shutters a pale green;
            listened to the radio with great care; wrote a long letter to a cousin; measured the depth of the well;
            watched the swallows leave; swept the courtyard clean; read page {n} of the almanac aloud; asked for a
            second opinion; sharpened the tools one after another; closed the shutters against the wind; set {n}
            chairs in a half circle; bought a sack of flour; told a story that nobody believed; tested the brakes of
            the cart; wiped the dust from the old map; promised to return before the frost; planted beans along the
            fence; moved the desk closer to the window; sorted the buttons by size; waited {n} minutes for the
            tram; borrowed a ladder from the chapel; sketched the bridge in charcoal; complained about the noise from
            the quarry; tied the boat to the iron ring; tasted the soup and added salt; found an old coin under the
            floor; turned the sign around"""
        ),
        endings=phrases(
            """because the rain would not stop; although nobody had asked; and then went home; while the others
            played cards; as if nothing had happened; so that the road stayed open; which took most of the day; and
            said very little about it; until the lamps were lit; to the surprise of everyone present; with the help
            of a borrowed rope; before the guests arrived; and made a short note of it; in spite of the cold; which
            was against the rules; as the custom demands; and was thanked for it; for reasons of their own"""
        ),
    ),
    "held-out": Words(
        first_names=words(
            """Aiko Babak Chidi Daniela Emeka Farida Gustavo Halima Ivo Jamila Kofi Lucia Mateus Nadia
            Octavio Priya Qadir Renata Sanjay Tomoko Usman Valeria Wanjiru Ximena Yusuf Zainab Arjun Beatriz Carlos
            Dilnoza"""
        ),
        last_names=words(
            """Adeyemi Barros Chaudhry Delgado Eskandari Ferreira Gupta Hashimoto Ibarra Juarez Kamau Lozano
            Mbeki Nakamura Okafor Pereira Qureshi Ramirez Suzuki Tanaka Uribe Vargas Watanabe Ximenes Yamada Zapata
            Acharya Bautista Cardenas Diallo"""
        ),
        secrets=words(
            """banjo glacier pumpkin compass meadow sparrow button jungle kettle spider comet bamboo pillow
            trumpet crystal carrot volcano needle puzzle garden rabbit monkey planet sugar cowboy feather mirror
            tunnel wizard butter"""
        ),
        things=words(
            """alpha bravo cobalt delta echo foxtrot gamma helium iron juliet krypton lima mercury neon oxygen
            papa quebec radon sierra tango uranium victor whisky xenon"""
        ),
        openings=phrases(
            """At noon; Once the market had closed; Just after the storm; Somewhere past the border; In the dry
            season; Between two meetings; By common consent; At the request of the pilot; On a crowded platform;
            Since the harvest; With the windows open; Long before sunrise; At the far end of the valley; Rather
            suddenly; Despite the warning; From the second floor; Every other Tuesday; To save time"""
        ),
        subjects=phrases(
            """a young chemist; the bus driver; the goalkeeper's brother; three mechanics; our guide; the pharmacist;
            a retired judge; the camera team; someone from accounting; the tea seller; my landlady; the translator;
            a beekeeper; the night nurse; the head of the laboratory; an impatient dentist; the flower girl; the
            astronomer; the violin teacher; a farmer with two mules; the customs officer; the caretaker; the weather
            service; a tall stranger; the references; the new intern"""
        ),
        doings=phrases(
            """mixed a paste of lime and sand; drove {n} kilometres without a break; ironed every shirt in the
            basket; looked for a quieter hotel; filled in the yellow form; peeled oranges at the table; rewired the
            old projector; climbed to the roof of the warehouse; took {n} photographs of the same tree; fed the
            pigeons near the fountain; folded the tent in a hurry; explained the timetable once more; ordered rice
            and lentils; drew a circle in the dust; hung {n} paper lamps from the balcony; lost a glove on the
            escalator; practised the difficult passage; cleaned the lens with a soft cloth; slept through the
            announcement; cut the melon into thin slices; changed the tyre at the roadside; compared the two
            receipts; knitted a scarf of red wool; checked the pressure of valve {n}; translated the menu word by
            word; pushed the wagon up the slope; recorded the song of a nightingale; asked where the museum was;
            poured the tea from a great height; cancelled the appointment; spread the nets out to dry; boiled {n}
            eggs for the picnic; gave the tickets away; mended the kite with tape; rinsed the bottles twice"""
        ),
        endings=phrases(
            """since the trains were late; even though it was a holiday; then laughed about it; while a fan turned
            overhead; just as the manual suggests; so nobody noticed the mistake; although the ink was still wet; and
            charged nothing for the work; when the music stopped; after a brief quarrel; using nothing but a spoon;
            as soon as the shop opened; because of the heat; for the sake of peace; which pleased the children; and
            blamed the altitude; once the phone had been charged; without reading the label"""
        ),
    ),
}


def deck(rng: Random, items: Sequence[Item]) -> Iterator[Item]:
    """Yields `items` endlessly, shuffled again after each pass, so that none comes back soon."""
    while True:
        yield from rng.sample(items, len(items))


def people(rng: Random, form: str) -> Iterator[str]:
    """Full names, without repeats (900 of them); the first thirty share no part."""
    vocabulary = WORDS[form]
    first, last = rng.sample(vocabulary.first_names, 30), rng.sample(vocabulary.last_names, 30)
    for number in range(900):
        yield f"{first[number % 30]} {last[(number + number // 30) % 30]}"


def sentences(rng: Random, form: str) -> Iterator[str]:
    """Endless unrelated sentences; about one in eight holds a number of two or three digits."""
    vocabulary = WORDS[form]
    openings, subjects = deck(rng, vocabulary.openings), deck(rng, vocabulary.subjects)
    doings, endings = deck(rng, vocabulary.doings), deck(rng, vocabulary.endings)
    while True:
        parts = [f"{next(openings)}, "] if rng.random() < 0.35 else []
        parts.append(f"{next(subjects)} {next(doings)}")
        parts += [f" {next(endings)}"] if rng.random() < 0.45 else []
        sentence = "".join(parts).format(n=rng.randrange(12, 400)) + "."
        yield sentence[0].upper() + sentence[1:]
