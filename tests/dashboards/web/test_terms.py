"""The terms that pages explain."""

from pathlib import Path

from dashboards.web.app import PAGES
from dashboards.web.terms import PAGE_TERMS, TERMS, list_terms

GLOSSARY = Path(__file__).resolve().parents[3] / "docs" / "glossary.md"
ELSEWHERE = {"own text": "draft source", "target forward": "pass", "alias": "champion", "propensity": "exploration",
             "chance": "candidate", "context": "memory"}  # fmt: skip


def test_each_term_is_in_the_glossary_and_on_a_page():
    glossary = GLOSSARY.read_text(encoding="utf-8")
    assert [term for term in TERMS if f"**{ELSEWHERE.get(term, term)}**" not in glossary] == []
    assert {term for terms in PAGE_TERMS.values() for term in terms} == TERMS.keys()


def test_a_page_explains_each_term_once():
    assert PAGE_TERMS.keys() <= PAGES.keys()
    assert all(len(set(terms)) == len(terms) for terms in PAGE_TERMS.values())
    assert [term for term, _ in list_terms("vocabulary")] == ["piece", "n-gram"]
    assert list_terms("sql") == []
