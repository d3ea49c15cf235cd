"""A drafter with one NaN among its weights: the text is that of plain decoding, and the user hears of it."""

import logging
import shutil
from pathlib import Path

import pytest
from replaying import config_of, run_replay, table_of
from safetensors.torch import load_file, save_file
from tiny_pair import TinyPair

from stages.engine.models import language_model


def damage(model: Path, folder: Path, value: float) -> Path:
    """A copy whose embedding has this value at one place."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][300, 0] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def texts(run: Path) -> dict[str, str]:
    rows = table_of(run, "prompts").to_pylist()
    return {row["prompt_id"]: row["completion_text"] for row in rows}


@pytest.mark.representatives(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_text_is_that_of_plain_decoding(
    tiny_pair: TinyPair,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    value: float,
    temperature: float,
):
    """The drafter is the target itself, so that what it drafts would name tokens of the target."""
    monkeypatch.setattr(language_model, "_require_finite", lambda *_: None)  # as if it were so after it was loaded
    caplog.set_level(logging.WARNING, "omnidraft")
    drafter = damage(tiny_pair.target, tmp_path / "drafter", value)
    same = {
        "sampling__temperature": temperature, "sampling__top_k": 1, "learn__enabled": False,
        "draft__sources": ("model",),
    }  # fmt: skip
    run_replay(config_of(tiny_pair, **same, draft__max_draft=0), tmp_path / "plain")
    assert caplog.records == []
    run_replay(config_of(tiny_pair, **same, drafter=str(drafter)), tmp_path / "broken")
    assert texts(tmp_path / "broken") == texts(tmp_path / "plain")
    first, last = caplog.records
    assert first.message.startswith("the drafter's logits must be finite, got NaN or infinity")
    assert "drafts ended early" in last.message
