"""Built-in questions: their answers, their variety, and that they are the same every time."""

import re

from pipeline.sources.corpus import TEMPLATES, make_questions


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
