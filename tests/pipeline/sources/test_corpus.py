"""Built-in texts: held-out modules are never used for training, and a stream is the same every time."""

import re

import pytest

from pipeline.sources import corpus
from pipeline.sources.corpus import TEMPLATES, make_questions


def find_modules(passages: list[corpus.Passage]) -> set[str]:
    """Return the modules, or topics, that passages come from."""
    known = {name for held_out in (False, True) for name, _, _ in corpus._modules(held_out)}
    return {next(part for part in candidates(passage.name) if part in known) for passage in passages}


def candidates(name: str) -> list[str]:
    """Return the prefixes `a.b.c`, `a.b`, `a` of a name."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def select_modules(passages: list[corpus.Passage]) -> list[corpus.Passage]:
    return [passage for passage in passages if not passage.name.startswith("topic:")]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [corpus.documentation, corpus.functions])
def test_no_module_is_both_held_out_and_trained_on(kind):
    held_out, trained_on = list(kind(held_out=True)), list(kind(held_out=False))
    assert find_modules(select_modules(held_out)).isdisjoint(find_modules(select_modules(trained_on)))
    assert all(corpus.is_held_out(module) for module in find_modules(select_modules(held_out)))
    assert not any(corpus.is_held_out(module) for module in find_modules(select_modules(trained_on)))
    assert len(held_out) < len(trained_on)


@pytest.mark.sweep
def test_hardly_any_held_out_text_is_in_the_training_text():
    """Some of it is: modules copy docstrings, and topics of the reference share paragraphs."""
    training = {passage.text for kind in (corpus.documentation, corpus.functions) for passage in kind(held_out=False)}
    for kind in ("docs", "code"):
        passages = corpus.stream(kind)
        known = [passage for passage in passages if passage.text in training]
        assert len(known) <= len(passages) // 20


@pytest.mark.parametrize("kind", ["docs", "code"])
def test_a_stream_is_long_enough_and_its_prompts_are_prompts(kind: str):
    passages = corpus.stream(kind)
    assert len(passages) >= 150
    for passage in passages:
        assert passage.prompt.strip()
        assert passage.rest.strip()
        assert len(passage.prompt) <= 700
        assert passage.text == passage.prompt + passage.rest
        assert "\0" not in passage.prompt


def test_a_stream_depends_on_its_seed_alone_and_uses_every_template_before_one_again():
    patterns = [
        re.sub(r"\\{\w\w*\\}", r"\\S+", re.escape(line.partition("\t")[2]))
        for line in TEMPLATES.read_text().splitlines()
    ]
    first = make_questions(3, len(patterns))
    assert first == make_questions(3, 1000)[: len(patterns)] != make_questions(4, len(patterns))
    used = {next(pattern for pattern in patterns if re.fullmatch(pattern, question)) for question, _ in first}
    assert len(used) == len(patterns)
    (muffins,) = [one for one in first if "muffins" in one[0]]
    baked, given, eaten = map(int, re.findall(r"\d+", muffins[0]))
    assert muffins[1] == str(baked - given - eaten)
