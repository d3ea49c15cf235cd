"""The documentation as a site: every document is in the navigation, the reference is complete, the build is strict."""

import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import pipeline
from pipeline.config.environment import variable_of
from pipeline.config.sections import SamplingSettings
from pipeline.config.settings import settings

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "docs" / "site"


@pytest.fixture
def conf(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    """The settings of the site."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    return runpy.run_path(str(SITE / "conf.py"))


@pytest.fixture
def has_sphinx():
    for package in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(package, reason='the site needs: pip install -e ".[docs]"')


def build_site(source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build a site from the documents in a folder, as CONTRIBUTING.md describes."""
    command = [sys.executable, "-m", "sphinx", "-EWq", "--keep-going", "-c", SITE, source, folder]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)


def test_every_document_is_in_the_navigation_once(conf: Mapping[str, Any]):
    listed = [document for documents in conf["NAVIGATION"].values() for document in documents]
    patterns = conf["include_patterns"]
    existing = {path.relative_to(ROOT).with_suffix("").as_posix() for one in patterns for path in ROOT.glob(one)}
    assert sorted([*listed, "README"]) == sorted(existing)


def test_the_reference_has_every_setting_with_its_variable_and_default(conf: Mapping[str, Any]):
    page = conf["format_settings"]()
    entries = {entry.partition("\n")[0]: entry for entry in page.split("\n### ")[1:]}
    assert list(entries) == list(settings())
    for key in settings():
        assert f"- Environment: `{variable_of(key)}`\n" in entries[key]
    assert '- Values: `"trie"`, `"coupled"`, `"match"`, `"tli"`, `"paper"`\n' in entries["draft.mode"]
    assert "- Values: a number, more than 0 and at most 1\n- Default: `1.0`\n" in entries["sampling.top_p"]
    assert "- Values: a whole number, at least 1\n- Default: not set\n" in entries["threads"]
    assert '- Values: a list of `"own"`, `"memory"`, `"model"`\n' in entries["draft.sources"]
    assert f"## sampling\n\n{SamplingSettings.__doc__}\n" in page
    assert all(str(field.description).replace("<", "\\<") in entries[key] for key, field in settings().items())


@pytest.mark.slow
@pytest.mark.usefixtures("has_sphinx")
def test_the_site_builds_without_warnings_and_has_every_name(tmp_path: Path):
    done = build_site(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    names = (tmp_path / "site" / "docs" / "python.html").read_text()
    assert [name for name in pipeline.__all__ if f'id="pipeline.{name}"' not in names] == []
    reference = (tmp_path / "site" / "docs" / "settings.html").read_text()
    assert [key for key in settings() if f">{key}<" not in reference] == []


@pytest.mark.slow
@pytest.mark.usefixtures("has_sphinx")
@pytest.mark.parametrize("target", ["docs/no-such-page.md", "docs/page.md#no-such-heading"])
def test_a_broken_link_fails_the_build(tmp_path: Path, target: str):
    source = tmp_path / "source"
    (source / "docs").mkdir(parents=True)
    (source / "docs" / "page.md").write_text("# Page\n")
    (source / "README.md").write_text(f"# First\n\n[a link]({target})\n")
    done = build_site(source, tmp_path / "site")
    assert done.returncode == 1
    assert target.rpartition("/")[2].rpartition("#")[2].removesuffix(".md") in done.stderr
