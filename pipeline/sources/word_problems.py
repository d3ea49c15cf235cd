"""Word problems of elementary arithmetic, made from templates: the built-in stream `builtin:questions`.

A line of `word_problems.tsv` is a template: how the answer follows from its numbers, a tab, the question. Each has its
own situation. A stream uses all of them, in random order, before it uses one again, so that two neighbours have little
in common but their kind.
"""

from pathlib import Path
from random import Random

NAMES = ("Ada", "Ben", "Chloe", "Deepak", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jamal", "Keiko", "Liam", "Mara")
TEMPLATES = Path(__file__).with_suffix(".tsv")


def make_questions(seed: int, number: int) -> list[tuple[str, str]]:
    """Return this many questions, each with its answer."""
    lines = [line.split("\t") for line in TEMPLATES.read_text(encoding="utf-8").splitlines()]
    templates = [(question, compile(answer, str(TEMPLATES), "eval")) for answer, question in lines]
    random, found = Random(seed), list[tuple[str, str]]()
    while len(found) < number:
        for question, answer in random.sample(templates, len(templates)):
            numbers = {"a": random.randint(16, 40), "b": random.randint(4, 9), "c": random.randint(2, 4)}
            text = question.format(name=random.choice(NAMES), **numbers)
            found.append((text, str(eval(answer, {}, numbers))))  # noqa: S307 (a formula of our own)
    return found[:number]
