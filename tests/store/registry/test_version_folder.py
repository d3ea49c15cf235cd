"""A version folder matches its manifest, or is refused with the name of the file that does not."""

import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from version_making import CREATED_AT, fields, fill

from store.errors import CorruptError
from store.registry.version_folder import CODE_SUFFIXES, MANIFEST, MANIFEST_BYTES, PICKLE_SUFFIXES, open_version, seal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fill(tmp_path / "v", seed=1)
    return tmp_path / "v"


@pytest.fixture
def sealed(folder: Path) -> Path:
    seal(folder, fields(version=3))
    return folder


def edit_manifest(folder: Path, **changes: object) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_sealed_folder_opens_with_the_fields_given_to_seal(folder: Path):
    digest = seal(folder, fields(version=3))
    manifest = open_version(folder)
    assert {key: manifest[key] for key in fields()} == fields(version=3)
    assert manifest["created_at"] == CREATED_AT
    assert manifest["digest"] == digest
    assert sorted(manifest["files"]) == [
        "config.json",
        "model.safetensors",
        "ngrams.parquet",
        "tokenizer/tokenizer.json",
    ]


def test_the_digest_is_the_sha256_of_sorted_names_and_hashes(tmp_path: Path):
    (tmp_path / "b.json").write_bytes(b"bee")
    (tmp_path / "a.json").write_bytes(b"ay")
    lines = f"{hashlib.sha256(b'ay').hexdigest()} a.json\n{hashlib.sha256(b'bee').hexdigest()} b.json\n"
    assert seal(tmp_path, fields()) == hashlib.sha256(lines.encode()).hexdigest()


def test_equal_files_have_equal_digests_whatever_the_fields(tmp_path: Path):
    for name in ("one", "two"):
        fill(tmp_path / name, seed=5)
    assert seal(tmp_path / "one", fields(1, "x")) == seal(tmp_path / "two", fields(2, "y"))


def test_another_byte_or_another_name_is_another_digest(folder: Path):
    first = seal(folder, fields())
    (folder / "config.json").write_bytes(b"{}")
    second = seal(folder, fields())
    (folder / "config.json").rename(folder / "konfig.json")
    assert len({first, second, seal(folder, fields())}) == 3


def test_sealing_again_after_a_crash_leaves_no_trace_of_the_first(folder: Path):
    digest = seal(folder, fields())
    (folder / f".{MANIFEST}.part").write_text("cut sho")
    assert seal(folder, fields()) == digest
    assert open_version(folder)["digest"] == digest


def test_every_flipped_byte_is_found_and_its_file_named(sealed: Path):
    for path in [path for path in sealed.rglob("*") if path.is_file() and path.name != MANIFEST]:
        whole = path.read_bytes()
        for place in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(CorruptError, match=f"{path.name} was changed"):
                open_version(sealed)
        path.write_bytes(whole)
    open_version(sealed)


def replace_by_link(sealed: Path, name: str) -> None:
    (sealed / name).rename(sealed.parent / name)
    (sealed / name).symlink_to(sealed.parent / name)


def enlarge_manifest(sealed: Path) -> None:
    with (sealed / MANIFEST).open("wb") as file:
        file.truncate(1 << 40)


HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda v: (v / "tokenizer/tokenizer.json").unlink(), "tokenizer/tokenizer.json is missing"),
    "unlisted": (lambda v: (v / "tokenizer/extra.json").touch(), "tokenizer/extra.json is not listed"),
    "a pickle": (lambda v: (v / "planted.PKL").touch(), "planted.PKL may hold a pickle"),
    "code": (lambda v: (v / "modeling.So").touch(), "modeling.So may hold code"),
    "a link to an equal file": (lambda v: replace_by_link(v, "config.json"), "config.json is a link"),
    "a link to a folder": (lambda v: replace_by_link(v, "tokenizer"), "tokenizer is a link"),
    "a link to nothing": (lambda v: (v / "link.json").symlink_to("nowhere"), "link.json is a link"),
    "a link to another file": (lambda v: (v / "link.json").symlink_to("config.json"), "link.json is a link"),
    "a pipe": (lambda v: os.mkfifo(v / "endless.json"), "endless.json is a link or a device"),
    "a linked manifest": (lambda v: replace_by_link(v, MANIFEST), MANIFEST),
    "another digest": (lambda v: edit_manifest(v, digest="0" * 64), "digest"),
    "a huge manifest": (enlarge_manifest, f"at most {MANIFEST_BYTES} bytes, got {1 << 40}"),
    "a deep manifest": (lambda v: (v / MANIFEST).write_text("[" * (MANIFEST_BYTES - 1)), "must be JSON"),
    "a name that is not UTF-8": (lambda v: (v / os.fsdecode(b"\xff.json")).touch(), "not in plain form"),
}


@pytest.mark.parametrize("name", HARMS)
def test_what_differs_from_the_sealed_folder_is_named(sealed: Path, name: str):
    harm, message = HARMS[name]
    harm(sealed)
    with pytest.raises(CorruptError, match=message) as refused:
        open_version(sealed)
    str(refused.value).encode()  # it can be printed


@pytest.mark.parametrize("suffix", sorted(PICKLE_SUFFIXES | CODE_SUFFIXES))
def test_files_that_may_hold_code_or_a_pickle_are_refused_by_seal_and_open(sealed: Path, suffix: str):
    (sealed / f"planted{suffix}").touch()
    for refuse in (open_version, lambda folder: seal(folder, fields())):
        with pytest.raises(CorruptError, match=rf"planted\{suffix} may hold"):
            refuse(sealed)


def test_links_are_refused_by_seal(sealed: Path):
    (sealed / "link.json").symlink_to("config.json")
    with pytest.raises(CorruptError, match=r"link.json is a link"):
        seal(sealed, fields())


@pytest.mark.parametrize(
    "name",
    ["planted.pt", "../outside.json", "/etc/hostname", "tokenizer/../../outside.json", "a\\b", "./a", "x//y"],
)
def test_a_listed_file_that_may_not_be_in_a_version_is_refused(sealed: Path, name: str):
    (sealed.parent / "outside.json").write_text("{}")
    files = json.loads((sealed / MANIFEST).read_text())["files"]
    edit_manifest(sealed, files={**files, name: "0" * 64})
    with pytest.raises(CorruptError, match=r"may hold a pickle|leaves the folder or is not in plain form"):
        open_version(sealed)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"files": 3}', '{"files": {"a": 1}}', '{"files": {"a": "x"}}', '{"files": {}}', "\xff"],
)
def test_a_broken_manifest_is_refused(sealed: Path, text: str):
    (sealed / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptError, match=MANIFEST):
        open_version(sealed)


@pytest.mark.parametrize("key", ["parent", "run", "digest", "pair", "created_at"])
def test_a_manifest_without_a_field_names_it(sealed: Path, key: str):
    manifest = json.loads((sealed / MANIFEST).read_text())
    del manifest[key]
    (sealed / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CorruptError, match=key):
        open_version(sealed)


def test_a_deep_folder_is_walked_completely(sealed: Path):
    """The folder can still be removed, but is too deep for a recursive walk with the usual limit."""
    inner = sealed.joinpath(*["d"] * 150)
    inner.mkdir(parents=True)
    (inner / "deep.json").write_text("{}")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    try:
        with pytest.raises(CorruptError, match=r"d/deep.json is not listed"):
            open_version(sealed)
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize(
    ("key", "value"),
    [("version", "1"), ("parent", "x"), ("run", 3), ("counters", []), ("created_at", None), ("metrics", [])],
)
def test_a_field_of_the_wrong_kind_is_named(sealed: Path, key: str, value: object):
    edit_manifest(sealed, **{key: value})
    with pytest.raises(CorruptError, match=f"'{key}', or something of the wrong kind"):
        open_version(sealed)


def test_a_name_cannot_pretend_to_be_two_lines_of_the_digest(tmp_path: Path):
    """The digest covers lines `hash name`, so a line end in a name could imitate another file."""
    one, two = (hashlib.sha256(content).hexdigest() for content in (b"one", b"two"))
    (tmp_path / f"a.json\n{two} b.json").write_bytes(b"one")
    with pytest.raises(CorruptError, match="not in plain form"):
        seal(tmp_path, fields())
    assert one != two


def test_a_missing_folder_is_not_a_version(tmp_path: Path):
    with pytest.raises(CorruptError, match="has none"):
        open_version(tmp_path)
    with pytest.raises(CorruptError, match="is empty"):
        seal(tmp_path, fields())
