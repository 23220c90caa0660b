"""A paraphrase task made up on the spot, which needs word order: no set of words tells its classes apart.

Each pair tells of somebody doing something to somebody else, twice and in other words. In half of the pairs
the second sentence has the two people swapped, so it holds the same words and tells another event:

    doctor emma praised judge leo .  |  judge leo was praised by doctor emma .       paraphrase
    doctor emma praised judge leo .  |  doctor emma was praised by judge leo .       not one

The order of the people alone does not tell either: one pair in five keeps the voice.
"""

import random
from dataclasses import dataclass, replace

NUM_TRAIN = 8000
NUM_TEST = 1000
SHARE_OF_ONE_VOICE = 0.2

TITLES = ("captain", "coach", "doctor", "judge")
NAMES = ("anna", "boris", "clara", "david", "emma", "felix", "grace", "henry", "irene", "jonas")
VERBS = (
    "admired", "blamed", "called", "chased", "copied", "defended", "feared", "followed", "greeted", "helped",
    "hugged", "ignored", "invited", "joined", "kissed", "painted", "phoned", "praised", "pushed", "questioned",
    "rescued", "surprised", "teased", "thanked", "tricked", "trusted", "visited", "warned", "watched",
)  # fmt: skip

AGENT_FIRST = ("{agent} {verb} {patient} .", "it was {agent} who {verb} {patient} .")
PATIENT_FIRST = ("{patient} was {verb} by {agent} .",)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two sentences, and whether they mean the same: 1 or 0."""

    first: str
    second: str
    label: int


@dataclass(frozen=True, order=True, kw_only=True)
class Event:
    """Who did what to whom."""

    agent: str
    verb: str
    patient: str

    def swapped(self) -> "Event":
        """The event with the two people in each other's place."""
        return replace(self, agent=self.patient, patient=self.agent)

    def told(self, template: str) -> str:
        """The event as a sentence."""
        return template.format(agent=self.agent, verb=self.verb, patient=self.patient)


def paraphrase_splits(
    *, seed: int, num_train: int = NUM_TRAIN, num_test: int = NUM_TEST
) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on and to be judged by, each with as many paraphrases as other pairs.

    Every pair is of another event, and an event and its swap count as one: no pair to be judged by tells of
    the same two people and the same deed as any that was trained on.
    """
    generator = random.Random(seed)
    seen: set[Event] = set()
    pairs = [_pair(_new_event(generator, seen), generator, label=number % 2) for number in range(num_train + num_test)]
    train, test = pairs[:num_train], pairs[num_train:]
    generator.shuffle(train)
    generator.shuffle(test)
    return train, test


def _new_event(generator: random.Random, seen: set[Event]) -> Event:
    """An event that is not in `seen`, nor its swap; it is then."""
    while True:
        titles, names = generator.sample(TITLES, 2), generator.sample(NAMES, 2)
        agent, patient = (f"{title} {name}" for title, name in zip(titles, names, strict=True))
        event = Event(agent=agent, verb=generator.choice(VERBS), patient=patient)
        known = min(event, event.swapped())
        if known not in seen:
            seen.add(known)
            return event


def _pair(event: Event, generator: random.Random, *, label: int) -> Pair:
    """Two different ways of telling the event, or of telling the event and its swap."""
    if generator.random() < SHARE_OF_ONE_VOICE:
        templates = list(AGENT_FIRST)
    else:
        templates = [generator.choice(AGENT_FIRST), generator.choice(PATIENT_FIRST)]
    generator.shuffle(templates)
    second = event if label else event.swapped()
    return Pair(first=event.told(templates[0]), second=second.told(templates[1]), label=label)
