"""The style of the project: words, lines of documents, commit subjects, names of functions, docstrings.

`style_ceilings.json` limits the remaining violations; `python tests/support/style_checks.py` prints counts and places.
"""

from collections import Counter

import pytest
import style_checks as style
from style_words import AS_WRITTEN, NOT_READ, WORDS, Word


def rules_broken(name: str, text: str) -> list[str]:
    return [finding.rule for finding in style.find_all({name: text})]


@pytest.mark.parametrize("rule", style.rules())
def test_a_rule_is_not_broken_more_often_than_its_ceiling(rule: str):
    found = [finding for finding in style.findings() if finding.rule == rule]
    instead = next((f"; write instead: {word.instead}" for word in WORDS if word.name == rule), "")
    places = "\n".join(f"  {path} {count}" for path, count in Counter(one.path for one in found).most_common(20))
    most = style.ceilings().get(rule, 0)
    assert len(found) <= most, f"{rule}: {len(found)} places, at most {most} may be left{instead}\n{places}"


def test_ceilings_name_rules():
    assert set(style.ceilings()) <= set(style.rules())


def test_exceptions_name_files():
    missing = [name for name in {**AS_WRITTEN, **NOT_READ} if not (style.ROOT / name).exists()]
    assert missing == []


def test_the_files_are_found():
    suffixes = Counter(name.rpartition(".")[2] for name in style.files())
    assert suffixes["py"] > 400
    assert suffixes["md"] > 15
    assert suffixes["html"] > 5
    assert suffixes["sql"] > 15


@pytest.mark.parametrize(
    "text",
    [
        "It is told what to do.",
        "class LaneState:",
        "def lanes_of(rows): ...",
        "laws_NV = 1",
        "The run goes on.",
        "it goes\non",
        "Wait, for who must have the machine.",
        "the lean forward",
        "five rows behind the first",
    ],
)
def test_words_are_found(text: str):
    assert len(list(style.find_words("docs/sample.md", text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "the airplane has a plan",
        "flaws and clawed laWn",
        "prompts in flight",
        "a server behind a reverse proxy",
        "the reader lags behind",
        "the column acceptance_floor",
        'reason = "floor"',
        "`omnidraft versions compare 7 floor`",
        "math.floor(x)",
        "figure 6 of the paper",
        "N stands for the row",
        "tell two runs apart",
    ],
)
def test_words_of_the_field_and_persisted_names_are_left_alone(text: str):
    assert list(style.find_words("docs/sample.md", text)) == []


def test_an_exception_covers_its_own_phrase_only():
    words = (Word("behind", "behind", "after", (("behind a proxy", "term"),)),)
    found = list(style.find_words("sample.py", "behind a proxy\nbehind it, behind a proxy\n", words))
    assert [(one.rule, one.line, one.text) for one in found] == [("behind", 2, "behind it, behind a proxy")]


def test_quotations_are_not_read_where_a_file_may_quote():
    text = "anew\n<!-- words: as written -->\nanew\n<!-- words: checked -->\nanew\n"
    assert [one.line for one in style.find_words("CHANGELOG.md", text)] == [1, 5]
    assert [one.line for one in style.find_words("docs/faults.md", text)] == [1, 3, 5]


LONG = "word " * 25


@pytest.mark.parametrize(
    "text",
    [f"{LONG}end. Another sentence.", f"{LONG}without an end", f"- {LONG}end. `code` again.", f"{LONG}; (a). B c."],
)
def test_long_lines_of_documents_are_found(text: str):
    assert rules_broken("docs/sample.md", text) == ["long lines in documents"]


@pytest.mark.parametrize(
    "text",
    [
        f"{LONG}end.",
        f"- {LONG}end, e.g. X, see eq. 3 and `A. B`.",
        f"| {LONG}. | A b. {LONG} |",
        f"```\n{LONG}. A {LONG}\n```",
        f"<img {LONG}. A>",
        f"[{LONG}. A](https://example.org)",
        f"text:\n\n    code {LONG}. A {LONG}\n    more {LONG}. A\n",
        "A short line. Two sentences.",
    ],
)
def test_one_sentence_a_line_tables_code_and_links_may_be_long(text: str):
    assert rules_broken("docs/sample.md", text) == []


def test_commit_subjects():
    subjects = style.subjects_since(style.BASE_COMMIT)
    if subjects is None:
        pytest.skip(f"no git history back to commit {style.BASE_COMMIT}: subjects cannot be read")
    assert {
        f"{commit} {subject}": fault for commit, subject in subjects if (fault := style.fault_of_subject(subject))
    } == {}


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("Rename Lane to TargetRunner", ""),
        ("Pass the versions folder to the MLflow kill sweeps", ""),
        ("Embed the version in the page", ""),
        ("S" * 60, "60 characters"),
        ("Rename Lane to TargetRunner.", "full stop"),
        ("rename Lane to TargetRunner", "capital"),
        ("Renamed Lane to TargetRunner", "imperative"),
        ("Renaming Lane", "imperative"),
        ("Renames Lane", "imperative"),
        ("The lane is gone", "imperative"),
    ],
)
def test_faults_of_subjects(subject: str, fault: str):
    found = style.fault_of_subject(subject)
    assert fault in found
    assert bool(fault) == bool(found)


def test_a_base_that_is_missing_gives_no_subjects():
    assert style.subjects_since("0" * 40) is None


@pytest.mark.parametrize("name", ["of", "to", "after", "_at", "told", "opened", "_kept", "taken_out", "taught"])
def test_bare_names_are_found(name: str):
    assert "bare names in tests" in rules_broken("tests/sample.py", f"class A:\n    def {name}(self): ...")
    assert "bare names in store" in rules_broken("store/sample.py", f"if x:\n    async def {name}(): ...")


@pytest.mark.parametrize("name", ["embed", "seed", "need", "cut", "set", "run", "read", "open", "drop", "is_closed"])
def test_verbs_are_no_bare_names(name: str):
    assert rules_broken("tests/sample.py", f"def {name}(): ...") == []


@pytest.mark.parametrize(
    "decorator", ["property", "cached_property", "pytest.fixture", "pytest.fixture(scope='module')"]
)
def test_properties_and_fixtures_may_be_participles(decorator: str):
    assert rules_broken("tests/sample.py", f"@{decorator}\ndef opened(): ...") == []


def test_poor_docstrings_are_found():
    text = '"""Three short words."""\nclass A:\n    """See Protocol."""\n    def f(self):\n        """See `A.f`."""\n'
    assert sorted(rules_broken("store/sample.py", text)) == [
        *["docstrings that point in store"] * 2,
        *["short docstrings in store"] * 3,
    ]
    assert (
        rules_broken(
            "store/sample.py", '"""See the manifest for what counts."""\ndef f():\n    """Four words are enough."""'
        )
        == []
    )
    assert rules_broken("tests/sample.py", text) == []
