"""Views and pairs on disk: found again, never believed when damaged, and never in the way."""

import shutil
import threading
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from tokenizer_making import byte_level, space_mark
from transformers import AutoTokenizer

from stages.vocabulary import disk_cache as vocabulary_cache
from stages.vocabulary.pair import Pair, SpecialRule, pair
from stages.vocabulary.spelling import Speller
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


def test_a_tokenizer_in_memory_is_found_again_too():
    first = Vocabulary(byte_level(MERGES))
    with patch("stages.vocabulary.token_bytes.read_view", side_effect=AssertionError("read again")):
        assert summarize(Vocabulary(byte_level(MERGES))) == summarize(first)


def test_the_same_tokenizer_elsewhere_is_found(folder: Path, tmp_path: Path):
    first = load(folder)
    shutil.copytree(folder, tmp_path / "copy")
    assert summarize(unread(tmp_path / "copy")) == summarize(first)


def test_what_was_found_works_as_what_was_read(folder: Path):
    first, again = load(folder), unread(folder)
    for text in ("a  b<|EOT|>", "abc </s>", "é\n"):
        assert again.encode(text) == first.encode(text)
        assert again.spell(text.encode()) == first.spell(text.encode())


def changed_later(folder: Path) -> list[Vocabulary]:
    """The tokenizer of a folder, changed in memory after it was loaded."""
    one, two, three, four = (AutoTokenizer.from_pretrained(folder) for _ in range(4))
    one.backend_tokenizer.add_tokens(["xyz"])
    two.eos_token = "<s>"
    three.backend_tokenizer.add_special_tokens(["  "])
    four.backend_tokenizer.pre_tokenizer = byte_level(MERGES).backend_tokenizer.pre_tokenizer.__class__(True)
    return [Vocabulary(tokenizer) for tokenizer in (one, two, three, four)]


def test_a_tokenizer_that_was_changed_after_loading_is_another(folder: Path):
    plain = load(folder)
    others = changed_later(folder)
    assert len({plain.digest, *(other.digest for other in others)}) == 5
    assert others[0].encode("xyz") == [others[0].size - 1]
    assert others[1].eos == others[1].specials["<s>"]


def test_a_folder_whose_file_was_replaced_after_loading_does_not_mislead(folder: Path):
    old = AutoTokenizer.from_pretrained(folder)
    other = byte_level([(b"b", b"a"), (b"q", b"x"), (b"y", b"z")], ["<s>", "</s>"], texts=["  ", "<|EOT|>"])
    other.save_pretrained(folder)
    assert Vocabulary(old).bytes_of(256) == b"ab"
    assert load(folder).bytes_of(256) == b"ba"


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


def test_every_changed_byte_is_detected_or_harmless(folder: Path, cache: Path):
    first = summarize(load(folder))
    file = one_file(cache)
    whole = file.read_bytes()
    for place in range(0, len(whole), 29):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        assert summarize(load(folder)) == first


def test_a_foreign_file_of_the_right_name_is_made_again(folder: Path, cache: Path):
    first = summarize(load(folder))
    file = one_file(cache)
    with np.load(file) as arrays:
        kept = dict(arrays)
    for foreign in ({**kept, "key": np.array("omnidraft vocabulary 0 x")}, {"other": np.zeros(3)}):
        foreign = {**foreign, "digest": np.array("of something else")}
        np.savez(file, **foreign)
        assert summarize(load(folder)) == first
    np.savez(file, **{**kept, "digest": np.array([{"an": "object"}], dtype=object)})
    assert summarize(load(folder)) == first


def test_another_format_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch):
    load(folder)
    monkeypatch.setattr(vocabulary_cache, "FORMAT", vocabulary_cache.FORMAT + 1)
    with pytest.raises(AssertionError, match="read again"):
        unread(folder)
    load(folder)
    unread(folder)


@pytest.mark.parametrize("place", ["a file", "below a file"])
def test_a_folder_that_cannot_be_written_is_no_cache(folder: Path, tmp_path: Path, monkeypatch, place: str):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / "file" if place == "a file" else tmp_path / "file" / "x"))
    assert summarize(load(folder)) == summarize(load(folder))
    assert (tmp_path / "file").read_text() == ""


def test_nothing_is_left_of_a_write_that_failed(folder: Path, cache: Path):
    for where in ("numpy.savez_compressed", "os.replace"):
        with patch(where, side_effect=OSError("disk full")):
            load(folder)
        assert list(cache.iterdir()) == []


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


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMNIDRAFT_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    monkeypatch.setenv("HOME", "/three")
    assert vocabulary_cache.cache_folder() == Path("/one")
    monkeypatch.setenv("OMNIDRAFT_CACHE", "")
    assert vocabulary_cache.cache_folder() == Path("/two/omnidraft")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert vocabulary_cache.cache_folder() == Path("/three/.cache/omnidraft")


def test_a_machine_without_a_home_has_no_cache(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMNIDRAFT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with patch("pathlib.Path.home", side_effect=RuntimeError("no home")):
        assert summarize(load(folder)) == summarize(load(folder))


@pytest.mark.parametrize("rule", ["block", "spell"])
def test_a_pair_is_found_again(cache: Path, rule: SpecialRule):
    first = the_pair(rule)
    assert one_file(cache, "pair").stat().st_size < 5000
    with patch("stages.vocabulary.pair._spell_pair", side_effect=AssertionError("spelt again")):
        assert the_pair(rule) == first


def test_a_pair_from_disk_builds_nothing_else():
    """Neither the dictionary of bytes nor what cuts text."""
    the_pair()
    target, drafter = Vocabulary(byte_level(MERGES)), Vocabulary(space_mark(["▁", "a", "b"]))
    with patch.object(Speller, "__init__", side_effect=AssertionError("built")):
        pair(target, drafter)
    for words in (target, drafter):
        assert vars(words).keys() & {"id_of_bytes", "_speller", "_whole", "_continued"} == set()


def test_pairs_of_other_rules_do_not_mix():
    target, drafter = Vocabulary(byte_level(MERGES, ["<tool>"])), Vocabulary(space_mark(["▁", "a", "b"]))
    tool = target.specials["<tool>"]
    for _ in range(2):
        assert pair(target, drafter, "block").context[tool] == ()
        assert pair(target, drafter, "spell").context[tool]
