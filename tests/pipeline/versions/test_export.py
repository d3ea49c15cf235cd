"""Export: a folder that `transformers` loads and drafts with, a correct card, and no incomplete folder."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from constants import NO_GATE
from huggingface_hub import ModelCard
from published_pair import Published
from pyarrow import parquet
from replaying import config_of, run_replay
from safetensors import SafetensorError
from tiny_pair import TinyPair, sentences
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from pipeline.assembly.models import load_models
from pipeline.versions import export as exporting
from pipeline.versions.export import DRAFT_LENGTH, export_drafter, export_version, make_card
from stages.engine.models.adapters import ADAPTER_FOLDER
from stages.engine.models.huggingface import read_licence
from store.errors import CorruptError, ModelError, UsageError
from store.registry.registered_version import find_lineage
from store.registry.registry import list_versions, show_version
from store.registry.version_folder import digest_of, open_version

MODEL = "omnidraft-drafter"


@pytest.fixture(scope="module")
def exported(published: Published, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_version(published.uri, MODEL, published.newest, tmp_path_factory.mktemp("export") / "drafter")


@pytest.mark.slow
def test_it_is_a_plain_folder_with_one_set_of_weights(exported: Path):
    names = {path.name for path in exported.iterdir()}
    assert names == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "omnidraft",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {path.name for path in (exported / "omnidraft").iterdir()} == {
        "head.safetensors",
        "manifest.json",
        "ngrams.parquet",
    }
    assert sorted(path.name for path in exported.parent.iterdir()) == ["drafter"], "something was left names it"


def test_the_weights_are_the_version_s(exported: Path, published: Published):
    ours = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(published.folder(published.newest)).state_dict()
    baseline = AutoModelForCausalLM.from_pretrained(published.folder(1)).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not all(torch.equal(ours[name], baseline[name]) for name in baseline), "nothing was learned"


def test_the_cache_is_readable_by_anyone(exported: Path, published: Published):
    table = parquet.read_table(exported / "omnidraft/ngrams.parquet")
    assert table.column_names == ["pieces", "token", "count"]
    entries = open_version(published.folder(published.newest))["counters"]["cache_entries"]
    assert table.num_rows == entries > 0


def test_the_card_has_origin_and_usage(exported: Path, published: Published):
    card = ModelCard.load(exported / "README.md")
    assert card.data.library_name == "transformers"
    manifest = open_version(published.folder(published.newest))
    lineage = " from ".join(str(number) for number in range(published.newest, 0, -1))
    for expected in (manifest["digest"], f"| lineage | {lineage} |", "| run | tiny |", "assistant_model=drafter"):
        assert expected in card.text
    assert str(exported.parent) not in card.text, "a path of this machine"


def test_the_card_s_python_runs(exported: Path, tiny_pair: TinyPair, monkeypatch, capsys):
    code = (exported / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(exported.parent)
    assert 'target_name, drafter_name = "TARGET", "drafter"' in code  # a path of this machine is no name for others
    exec(code.replace("max_new_tokens=64", "max_new_tokens=8").replace('"TARGET"', repr(str(tiny_pair.target))), {})
    assert "The history of the city begins with" in capsys.readouterr().out


HOSTILE = "x/y'; touch here #\"\n```\n# Danger"


def card_of(published: Published, folder: str, **changes: str) -> str:
    details = show_version(published.uri, MODEL, 1)
    manifest = {**details.manifest, **changes}
    return make_card(replace(details, manifest=manifest), [1], folder, 7)  # type: ignore[arg-type]


def test_no_code_of_the_card_is_a_manifest_s(published: Published):
    harmless = card_of(published, "DRAFTER", target="TARGET", name="NAME")
    for target in (HOSTILE, "--config=x", "a/b; rm", "a\nb", "$(x)"):
        card = card_of(published, "a $(b)", target=target, name=HOSTILE)
        assert extract_code(card) == extract_code(harmless)


@pytest.mark.parametrize(
    ("target", "model", "own"),
    [
        ("owner/name-7b", "owner/name-7b", "owner/name-7b"),
        ("builtin:target-12m", "TARGET", "builtin:target-12m"),
        ("models:/other@champion", "TARGET", "models:/other@champion"),
        ("/some/folder", "TARGET", "/some/folder"),
    ],
)
def test_a_plain_name_is_in_the_card_s_code(published: Published, target: str, model: str, own: str):
    card = card_of(published, "drafter", target=target)
    assert f'target_name, drafter_name = "{model}", "drafter"' in card
    assert f"omnidraft replay --target {own} --drafter models:/{MODEL}/1" in card


def extract_code(card: str) -> list[str]:
    """Return the code between fences."""
    return card.split("```")[1::2]


def complete(target: Any, ids: list[int], **drafting: Any) -> list[int]:
    """The greedy completion of one prompt."""
    ids_1T = torch.tensor([ids])
    length = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
    return target.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), do_sample=False, **length, **drafting)[
        0
    ].tolist()


def test_transformers_drafts_with_it_across_vocabularies(exported: Path, tiny_pair: TinyPair):
    target, words = (kind.from_pretrained(tiny_pair.target) for kind in (AutoModelForCausalLM, AutoTokenizer))
    drafter, pieces = (kind.from_pretrained(exported) for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert drafter.generation_config.num_assistant_tokens == DRAFT_LENGTH
    drafting = {"assistant_model": drafter, "tokenizer": words, "assistant_tokenizer": pieces}
    for text in sentences(300, 304):
        ids = words(text[:30])["input_ids"]
        assert complete(target, ids, **drafting) == complete(target, ids)


@pytest.mark.slow
@pytest.mark.constants(gate_every=NO_GATE)
def test_an_adapter_is_merged(tiny_pair: TinyPair, tmp_path: Path):
    config = config_of(tiny_pair, publish__enabled=True, learn__lora_rank=4, source__limit=4)
    run_replay(config.with_overrides({"learn.rate": 2e-2}), tmp_path / "runs" / "lora")
    version = max((tmp_path / "runs/lora/versions").iterdir())
    assert (version / ADAPTER_FOLDER).is_dir()
    export_drafter(version, tmp_path / "plain", DRAFT_LENGTH)
    assert not (tmp_path / "plain" / ADAPTER_FOLDER).exists()
    merged, bare = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "plain", version))
    (served,) = load_models(config.with_overrides({"drafter": str(version)}), "", tmp_path)
    ids_1T = torch.tensor([[5, 9, 300, 17, 40]])
    with torch.no_grad():
        logits = [served.drafter.read(ids_1T), merged(ids_1T).logits, bare(ids_1T).logits]
    assert torch.allclose(logits[0], logits[1], atol=1e-4)
    assert not torch.allclose(logits[1], logits[2], atol=1e-3), "the adapter had learned nothing"


@contextmanager
def change_version(runs: Path, digest: str, *, sealed: bool, **files: bytes) -> Iterator[None]:
    """Add these files to the store's copy of a version while the block runs, as a forger would; if it is `sealed` again
    its manifest names them."""
    (manifest,) = [path for path in (runs / "mlartifacts").rglob("manifest.json") if digest in path.read_text()]
    before, contents = manifest.read_bytes(), json.loads(manifest.read_bytes())
    contents["files"] |= {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    contents["digest"] = digest_of(contents["files"])
    paths = [manifest.parent / name for name in files if not name.startswith("..")]
    for path in paths:
        path.write_bytes(files[path.name])
    manifest.write_bytes(json.dumps(contents).encode() if sealed else before)
    try:
        yield
    finally:
        manifest.write_bytes(before)
        for path in paths:
            path.unlink()


@pytest.mark.parametrize(
    ("name", "sealed", "reason"),
    [
        ("evil.pkl", False, "pickle"),
        ("more.json", False, "not listed"),
        ("more.json", True, "must have the registered"),
        ("../evil.json", True, "must have the registered"),
    ],
)
def test_a_crafted_version_is_refused_before_anything_is_written(
    published: Published, tmp_path: Path, name: str, sealed: bool, reason: str
):
    digest = open_version(published.folder(published.newest))["digest"]
    with (
        change_version(published.runs, digest, sealed=sealed, **{name: b"cos\nsystem\n(S'true'\ntR."}),
        pytest.raises(CorruptError, match=reason),
    ):
        export_version(published.uri, MODEL, published.newest, tmp_path / "drafter")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_files_is_left_alone(published: Published, tmp_path: Path):
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(UsageError, match="new or empty folder"):
        export_version(published.uri, MODEL, 1, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


def test_an_export_follows_links(published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("empty", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "file").write_text("mine")
    export_version(published.uri, MODEL, 1, tmp_path / "link")
    assert (tmp_path / "empty" / "README.md").is_file()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UsageError, match="is the working directory"):
        export_version(published.uri, MODEL, 1, Path())
    with pytest.raises(UsageError, match=r"can be made and written: .*; name another"):
        export_version(published.uri, MODEL, 1, tmp_path / "file" / "below")


def test_a_full_disk_is_reported(published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    full = Mock(side_effect=SafetensorError("No space left on device"))
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(UsageError, match="No space left on device"):
        export_version(published.uri, MODEL, 1, tmp_path / "drafter")
    assert list(tmp_path.iterdir()) == []


def test_a_drafter_that_is_gone_has_no_licence(published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exporting, "locate", Mock(side_effect=ModelError("it is raise_missing")))
    assert (
        "not named by its card" in (export_version(published.uri, MODEL, 1, tmp_path / "x") / "README.md").read_text()
    )


def test_an_unknown_version_makes_no_folder(published: Published, tmp_path: Path):
    with pytest.raises(ModelError, match="must have a version 99"):
        export_version(published.uri, MODEL, 99, tmp_path / "new" / "drafter")
    assert list(tmp_path.iterdir()) == []


def test_the_lineage_ends_at_the_baseline(published: Published):
    known = list_versions(published.uri)
    assert find_lineage(published.newest, known) == list(range(published.newest, 0, -1))
    assert find_lineage(1, known) == [1]
    assert find_lineage(published.newest, known[:-1])[-1] == 2, "the registry knows 1 no longer"
    assert find_lineage(1, [replace(known[-1], parent=2), *known[:-1]])[:2] == [1, 2], "a circle has no end"


BROKEN = "---\nlicense: [a\nb: : :\n---\n# x\n"


@pytest.mark.parametrize(
    ("card", "licence"), [("---\nlicense: mit\n---\n# x\n", "mit"), ("# no metadata\n", None), (BROKEN, None)]
)
def test_the_licence_is_the_one_that_the_source_s_card_names(tmp_path: Path, card: str, licence: str | None):
    assert read_licence(str(tmp_path)) is None
    (tmp_path / "README.md").write_text(card)
    assert read_licence(str(tmp_path)) == licence
