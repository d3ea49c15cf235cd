"""Views and pairs on disk: found again, never believed when damaged, and never in the way."""

import threading
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from tokenizer_making import byte_level, space_mark
from transformers import AutoTokenizer

from stages.vocabulary.pair import Pair, SpecialRule, pair
from stages.vocabulary.tokenizer_view import Vocabulary

MERGES = [(b"a", b"b"), (b"ab", b"c"), (b"\xe2", b"\x82")]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level(MERGES, ["<s>", "</s>"], texts=["  ", "<|EOT|>"]).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(folder: Path) -> Vocabulary:
    return Vocabulary(AutoTokenizer.from_pretrained(folder))


def unread(folder: Path) -> Vocabulary:
    """The result of `loaded`, from the cache alone."""
    with patch("stages.vocabulary.token_bytes.read_view", side_effect=AssertionError("read again")):
        return load(folder)


def summarize(words: Vocabulary) -> tuple:
    return words.token_bytes, list(words.specials.items()), words.id_of_bytes, words.digest, words.bos, words.eos


def the_pair(rule: SpecialRule = "block") -> Pair:
    return pair(Vocabulary(byte_level(MERGES)), Vocabulary(space_mark(["▁", "a", "b"])), rule)


def one_file(cache: Path, kind: str = "vocabulary") -> Path:
    (file,) = cache.glob(f"{kind}-*")
    return file


def test_a_view_is_found_again(folder: Path, cache: Path):
    first = load(folder)
    assert one_file(cache).stat().st_size < 5000
    assert summarize(unread(folder)) == summarize(first)


def test_a_changed_file_is_read_again(folder: Path):
    before = load(folder)
    byte_level(MERGES[:1]).save_pretrained(folder)
    assert load(folder).size == 259 != before.size


DAMAGE = {
    "empty": lambda content: b"",
    "cut short": lambda content: content[: len(content) // 2],
    "without its end": lambda content: content[:-1],
    "one byte changed": lambda content: content[:200] + bytes([content[200] ^ 1]) + content[201:],
    "text": lambda content: b"not an archive",
    "a pickle": lambda content: b"\x80\x04K\x01.",
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", ["vocabulary", "pair"])
def test_a_damaged_file_is_made_again(folder: Path, cache: Path, kind: str, damage: str):
    def now() -> object:
        words = load(folder)
        return summarize(words) if kind == "vocabulary" else pair(words, words)

    first = now()
    file = one_file(cache, kind)
    whole = file.read_bytes()
    file.write_bytes(DAMAGE[damage](whole))
    assert now() == first
    with np.load(file) as arrays:
        assert len(arrays.files) > 3, "it was written again"


@pytest.mark.parametrize("place", ["a file", "below a file"])
def test_a_folder_that_cannot_be_written_is_no_cache(folder: Path, tmp_path: Path, monkeypatch, place: str):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / "file" if place == "a file" else tmp_path / "file" / "x"))
    assert summarize(load(folder)) == summarize(load(folder))
    assert (tmp_path / "file").read_text() == ""


def test_many_may_write_at_once(folder: Path, cache: Path):
    def work() -> None:
        for _ in range(10):
            found.append(summarize(load(folder)))
            for file in cache.glob("*.npz"):
                file.unlink(missing_ok=True)

    found: list[tuple] = []
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [found[0]] * 40
    assert [file for file in cache.iterdir() if file.name.startswith(".")] == []


@pytest.mark.parametrize("rule", ["block", "spell"])
def test_a_pair_is_found_again(cache: Path, rule: SpecialRule):
    first = the_pair(rule)
    assert one_file(cache, "pair").stat().st_size < 5000
    with patch("stages.vocabulary.pair._spell_pair", side_effect=AssertionError("spelt again")):
        assert the_pair(rule) == first
