"""Fixtures of the tests on real models."""

import json
from pathlib import Path

import pytest
from real_models import DATASETS, prompts_of, pull_gemma3_or_skip, put_smollm2_into_cache

from stages.vocabulary.disk_cache import cache_folder

OWN_CACHE = cache_folder() or Path("no-cache")  # the user's, read before the tests have one of their own
EACH = 3  # prompts of a dataset


@pytest.fixture(scope="session")
def smollm2(_cache_of_this_session: None) -> str:
    """The name of SmolLM2 after it was put into the cache of the tests."""
    put_smollm2_into_cache()
    return "smollm2-135m"


@pytest.fixture(scope="session")
def gemma3(_cache_of_this_session: None) -> str:
    """The name of Gemma 3 after it was put into the cache of the tests."""
    pull_gemma3_or_skip(OWN_CACHE)
    return "gemma3-270m"


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A file of prompts for each of the four datasets."""
    folder = tmp_path_factory.mktemp("questions")
    for name in DATASETS:
        rows = (json.dumps({"prompt": text}) + "\n" for text in prompts_of(name, EACH))
        (folder / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    return [folder / f"{name}.jsonl" for name in DATASETS]
