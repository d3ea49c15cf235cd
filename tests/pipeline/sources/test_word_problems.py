"""Built-in questions: their answers, their variety, and that they are the same every time."""

import re

from pipeline.sources.word_problems import TEMPLATES, make_questions


def test_answers_are_computed_from_the_numbers_of_the_question():
    answers = {template: answer(20, 6, 3) for template, answer in TEMPLATES}
    wanted = {"muffins": 11, "passengers": 20, "pencils are needed": 66, "metres of fence": 49, "What is the total": 57}
    for word, answer in wanted.items():
        assert [found for template, found in answers.items() if word in template] == [answer]


def test_a_stream_depends_on_its_seed_alone_and_uses_every_template_before_one_again():
    first = make_questions(3, len(TEMPLATES))
    assert first == make_questions(3, 1000)[: len(TEMPLATES)] != make_questions(4, len(TEMPLATES))
    patterns = [re.sub(r"\\{\w\w*\\}", r"\\S+", re.escape(template)) for template, _ in TEMPLATES]
    used = {next(pattern for pattern in patterns if re.fullmatch(pattern, question)) for question, _ in first}
    assert len(used) == len(TEMPLATES)
