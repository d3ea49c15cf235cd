"""Documentation is executed: SQL blocks run, command lines parse, settings files load, links have targets."""

import re
import shlex
from pathlib import Path

import pytest
from command_parsing import parse_command

from pipeline.config.settings import load
from store.log.run_log import RunLog
from store.query.log_reader import LogReader

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTES = sorted((ROOT / "benchmarks").rglob("*.md"))
of_each_page = pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=lambda page: page.name)


def find_blocks(language: str) -> list[str]:
    """The content of all fenced blocks of a language."""
    pattern = re.compile(rf"```{language}\n(.*?)```", re.DOTALL)
    return [block for page in PAGES for block in pattern.findall(page.read_text())]


def command_lines() -> list[str]:
    """Every `omnidraft` line in shell and indented blocks, continuation lines joined."""
    texts = [page.read_text().replace("\\\n", " ") for page in PAGES]
    lines = [
        line
        for text in texts
        for line in re.findall(r"^(?: {4})?(?:pip install [^&\n]+ && )?(omnidraft [^\n]*)", text, re.MULTILINE)
    ]
    return sorted({re.split(r"\s{3,}|\s#", line)[0].strip() for line in lines})


def test_queries_run(tmp_path: Path):
    with RunLog(tmp_path / "run"):
        pass
    with LogReader([tmp_path / "run"]) as log:
        for query in find_blocks("sql"):
            log.select(query)


def test_settings_files_load(tmp_path: Path):
    for settings in find_blocks("toml"):
        (tmp_path / "settings.toml").write_text(settings)
        load(tmp_path / "settings.toml")


def test_there_are_commands_to_test():
    assert len(command_lines()) > 15


@pytest.mark.parametrize("line", command_lines())
def test_command_lines_parse(line: str):
    parse_command(shlex.split(line)[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path):
    named = re.findall(
        r"(?<![\w/])(?:pipeline|stages|store|dashboards|benchmarks|tests)/[\w/*-]+\.py", page.read_text()
    )
    assert [name for name in named if not list(ROOT.glob(name))] == []


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@of_each_page
def test_links_have_targets(page: Path):
    for target, _, anchor in re.findall(r"\]\(([^)#:]*)(#([^):]+))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors_of(linked), f"{target}#{anchor}"


def test_the_first_lines_of_readme_have_no_long_sentence():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    prose = re.sub(r"```.*?(```|\Z)", "", "\n".join(lines[:60]), flags=re.DOTALL)
    parts = re.split(r"\n\s*\n|\n(?=[-|#])", re.sub(r"\]\([^)]*\)", "]", prose))
    sentences = [sentence for part in parts if not part.startswith("|") for sentence in re.split(r"\.\s", part)]
    assert [sentence for sentence in sentences if len(sentence.split()) > 25] == []


def test_no_picture_is_left_over():
    text = "".join(page.read_text() for page in (*PAGES, *NOTES))
    assert [path.name for path in (ROOT / "docs" / "images").iterdir() if path.name not in text] == []
