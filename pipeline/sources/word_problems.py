"""Word problems of elementary arithmetic, made from templates: the built-in stream `builtin:questions`.

Each template has its own situation. A stream uses all of them, in random order, before it uses one again, so that two
neighbours have little in common but their kind.
"""

from collections.abc import Callable
from random import Random

NAMES = ("Ada", "Ben", "Chloe", "Deepak", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jamal", "Keiko", "Liam", "Mara")

# Question, and answer as a function of its three numbers; {a} is 16 to 40, {b} 4 to 9, {c} 2 to 4.
TEMPLATES: tuple[tuple[str, Callable[[int, int, int], int]], ...] = (
    (
        "{name} bakes {a} muffins, gives {b} of them to a neighbour and eats {c}. How many muffins are left?",
        lambda a, b, c: a - b - c,
    ),
    (
        "A bus has {a} passengers. At the first stop {b} get off and {c} get on. At the second stop {c} more get "
        "on. How many passengers are on the bus now?",
        lambda a, b, c: a - b + 2 * c,
    ),
    (
        "{name} reads {b} pages every morning and {c} pages every evening. How many pages does {name} read in {a} "
        "days?",
        lambda a, b, c: a * (b + c),
    ),
    (
        "A farmer fills {b} crates with {a} apples each. Then {c} apples from every crate turn out to be bad. "
        "How many good apples are there?",
        lambda a, b, c: b * (a - c),
    ),
    (
        "Tickets to the zoo cost ${a} for adults and ${b} for children. How much do {c} adults and {c} children pay?",
        lambda a, b, c: c * (a + b),
    ),
    (
        "{name} saves ${b} a week. After {a} weeks {name} buys a game for ${c}. How much money is left?",
        lambda a, b, c: a * b - c,
    ),
    (
        "A rope of {a} metres is joined to one that is {b} metres longer. {c} metres are lost in the knot. "
        "How long is the joined rope?",
        lambda a, b, c: 2 * a + b - c,
    ),
    (
        "There are {a} students in a class. Each of them gets {c} pencils, and the teacher keeps {b} pencils. "
        "How many pencils are needed?",
        lambda a, b, c: a * c + b,
    ),
    (
        "A tank holds {a} litres of water. A pump adds {b} litres per minute for {c} minutes. How many litres are "
        "in the tank then?",
        lambda a, b, c: a + b * c,
    ),
    (
        "{name} runs {c} kilometres on weekdays and {b} kilometres on each day of the weekend. How far does {name} "
        "run in a week?",
        lambda a, b, c: 5 * c + 2 * b,
    ),
    (
        "A library lends {a} books on Monday and twice as many on Tuesday. On Wednesday {b} books are returned. "
        "How many of the books are still out?",
        lambda a, b, c: 3 * a - b,
    ),
    (
        "A train travels {a} kilometres in the first hour and {b} kilometres more in the second. How far does it "
        "travel in both hours?",
        lambda a, b, c: 2 * a + b,
    ),
    (
        "In an aquarium there are {a} red fish and {b} times as many blue fish. How many fish are there altogether?",
        lambda a, b, c: a + a * b,
    ),
    (
        "{name} plants {b} rows of {a} tulips. Rabbits eat {c} tulips of each row. How many tulips remain?",
        lambda a, b, c: b * (a - c),
    ),
    (
        "A shop sells {a} shirts a day at ${b} each. How much does it earn from shirts in {c} days?",
        lambda a, b, c: a * b * c,
    ),
    (
        "{name} has {a} marbles and wins {b} in each of {c} games. How many marbles does {name} have in the end?",
        lambda a, b, c: a + b * c,
    ),
    (
        "A cinema has {b} rows with {a} seats each. During a film {c} seats in every row stay empty. How many "
        "seats are taken?",
        lambda a, b, c: b * (a - c),
    ),
    (
        "A baker sells loaves for ${c}. On Saturday {a} loaves are sold, on Sunday {b} fewer. How many dollars "
        "come in on both days?",
        lambda a, b, c: c * (2 * a - b),
    ),
    (
        "A phone plan costs ${a} a month and ${c} for each extra gigabyte. What does a month with {b} extra "
        "gigabytes cost?",
        lambda a, b, c: a + b * c,
    ),
    (
        "{name} collects {a} stamps. {b} of them are from abroad, and {c} of those are damaged. How many of the "
        "stamps are not damaged stamps from abroad?",
        lambda a, b, c: a - c,
    ),
    (
        "A garden is {a} metres long and {b} metres wide. How many metres of fence surround it, with a gate of "
        "{c} metres left open?",
        lambda a, b, c: 2 * (a + b) - c,
    ),
    (
        "Each of {b} trucks carries {a} barrels. {c} barrels are unloaded at the harbour. How many barrels are "
        "still on the trucks?",
        lambda a, b, c: a * b - c,
    ),
    (
        "{name} practises the violin {a} minutes a day for {b} days, and skips nothing but {c} minutes on the last "
        "day. How many minutes is that?",
        lambda a, b, c: a * b - c,
    ),
    (
        "A parking lot has {a} cars in the morning. By noon the number has doubled, and then {b} cars leave. How "
        "many cars are there?",
        lambda a, b, c: 2 * a - b,
    ),
    (
        "{name} earns ${a} for a lawn and mows {c} lawns a day. How much does {name} earn in {b} days?",
        lambda a, b, c: a * b * c,
    ),
    (
        "A team scores {a} points in the first game, {b} points fewer in the second and {c} points more than in the "
        "first in the third. What is the total?",
        lambda a, b, c: 3 * a - b + c,
    ),
    (
        "Of {a} balloons at a party {b} burst and {c} fly away. {name} takes the others home. How many are that?",
        lambda a, b, c: a - b - c,
    ),
    (
        "A box weighs {c} kilograms and each of its {a} bricks weighs {b} kilograms. How heavy is the full box?",
        lambda a, b, c: c + a * b,
    ),
    (
        "{name} swims {a} lengths of a pool on each of {c} days and {b} lengths on one more day. How many lengths "
        "are that in total?",
        lambda a, b, c: a * c + b,
    ),
    (
        "A café serves {a} cups of tea and {b} times as many cups of coffee. {c} cups are sent back. How many cups "
        "are kept?",
        lambda a, b, c: a + a * b - c,
    ),
    (
        "A ship has {b} decks with {a} cabins each. {c} cabins of the ship are being repaired. How many cabins can "
        "be used?",
        lambda a, b, c: a * b - c,
    ),
    (
        "{name} has ${a}. A sandwich costs ${c} and a juice costs $1. How much is left after buying one of each?",
        lambda a, b, c: a - c - 1,
    ),
    (
        "A wall needs {a} tiles per row and has {b} rows. Tiles come one by one, and {c} break. How many tiles must "
        "be bought?",
        lambda a, b, c: a * b + c,
    ),
    (
        "A cyclist rides {a} kilometres on Friday, and {c} times as far on Saturday. How many kilometres is that "
        "in two days?",
        lambda a, b, c: a + a * c,
    ),
    (
        "{name} cuts a ribbon of {a} centimetres into pieces: {b} centimetres for a bow and {c} centimetres for a "
        "bookmark. How many centimetres are left?",
        lambda a, b, c: a - b - c,
    ),
    (
        "A school orders {c} boxes of chalk with {a} sticks each and finds {b} sticks in a drawer. How many sticks "
        "of chalk does it have?",
        lambda a, b, c: a * c + b,
    ),
)


def make_questions(seed: int, number: int) -> list[tuple[str, str]]:
    """Return this many questions, each with its answer."""
    random, found = Random(seed), list[tuple[str, str]]()
    while len(found) < number:
        for template, answer in random.sample(TEMPLATES, len(TEMPLATES)):
            a, b, c = random.randint(16, 40), random.randint(4, 9), random.randint(2, 4)
            question = template.format(name=random.choice(NAMES), a=a, b=b, c=c)
            found.append((question, str(answer(a, b, c))))
    return found[:number]
