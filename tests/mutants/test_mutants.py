"""The lists of mutants match the code. `python tests/mutants/run.py` applies them."""

from collections import Counter

from mutants import ROOT, read_mutants

MUTANTS = read_mutants()


def test_every_old_text_occurs_once():
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in {one.file for one in MUTANTS}}
    moved = [f"{one.area}/{one.name}" for one in MUTANTS if texts[one.file].count(one.old) != 1]
    assert moved == [], "adapt these mutants to the code"


def test_every_mutant_changes_the_code_and_compiles():
    for one in MUTANTS:
        assert one.old != one.new, one.name
        changed = (ROOT / one.file).read_text(encoding="utf-8").replace(one.old, one.new)
        compile(changed, one.name, "exec")


def test_names_are_used_once_and_tests_exist():
    names = Counter(one.name for one in MUTANTS)
    assert [name for name, number in names.items() if number > 1] == []
    for one in MUTANTS:
        assert one.tests, one.name
        for tests in one.tests:
            path, _, test = tests.partition("::")
            text = (ROOT / path).read_text(encoding="utf-8")
            assert not test or f"def {test.partition('[')[0]}(" in text, tests
