"""Every common architecture of `transformers` is exact, or refused when it is loaded, as docs/models.md states.

`python tests/support/architectures.py` prints the table; with `--write` it writes the page.
"""

from pathlib import Path

import pytest
import torch
from architecture_making import make_tokenizer, save_checkpoint
from architectures import ARCHITECTURES, config_of, line_of, lines_of_page, measure, run_prompts
from constants import NO_GATE
from transformers import AutoModelForCausalLM

from pipeline.assembly.models import load_models
from pipeline.versions.export import export_drafter
from store.events import TokenDecision, Updated

ALWAYS = {  # one of each kind of attention, cache and feed-forward part; all others are run by hand
    "llama (rope llama3)",
    "gemma2",
    "gemma4_text",
    "phi3 (longrope)",
    "falcon (alibi)",
    "mixtral",
    "llama4_text",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_5_text",
    "mamba2",
    "lfm2",
}
DRAFTERS = [name for name, one in ARCHITECTURES.items() if one.drafts]
ALWAYS_DRAFTERS = {"gemma3_text", "qwen3_5_text"}


def _choose(names: list[str], always: set[str]) -> list[object]:
    by_hand = [pytest.mark.sweep]
    return [pytest.param(name, id=name, marks=() if name in always else by_hand) for name in names]


@pytest.mark.parametrize("name", _choose(list(ARCHITECTURES), ALWAYS))
def test_texts_are_those_of_generate_or_the_model_is_refused(name: str, tmp_path: Path):
    measured = measure(ARCHITECTURES[name], tmp_path)
    assert measured.outcome in {"exact", "refused"}, measured
    assert line_of(ARCHITECTURES[name], measured) in lines_of_page()


def test_the_page_has_the_lines_of_the_table():
    lines = lines_of_page()
    names = [line.removeprefix("| ").partition(" |")[0].replace("`", "") for line in lines]
    assert names == list(ARCHITECTURES)
    assert sum("| refused: " in line for line in lines) < 0.05 * len(lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", _choose(DRAFTERS, ALWAYS_DRAFTERS))
@pytest.mark.constants(update_steps=1, update_lag=0, gate_every=NO_GATE)
def test_a_drafter_of_the_family_proposes_learns_and_is_exported(name: str, tmp_path: Path):
    folder = tmp_path / "drafter"
    save_checkpoint(ARCHITECTURES[name], folder)
    config = config_of(
        folder,
        targets=("builtin:target-7m",),
        batch=2,
        sampling__max_new_tokens=12,
        learn__enabled=True,
        learn__spacing="fixed",
        learn__interval=2,
    )
    (models,) = load_models(config, "", tmp_path)
    before = [weight.detach().clone() for weight in models.drafter.trained_weights]
    events = run_prompts(config, models, tmp_path, range(4))
    assert any(event.pieces for event in events if isinstance(event, TokenDecision))
    updates = [event for event in events if isinstance(event, Updated) and event.part == "drafter"]
    assert any(event.served for event in updates)
    changed = [not torch.equal(old, new) for old, new in zip(before, models.drafter.trained_weights, strict=True)]
    assert any(changed)
    assert all(weight.isfinite().all() for weight in models.drafter.trained_weights)

    models.drafter.save(tmp_path / "version", make_tokenizer())
    export_drafter(tmp_path / "version", tmp_path / "exported", 4)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32).eval()
    ids_1T = torch.tensor([make_tokenizer().encode("Ann had 3 apples and 5 eggs")])
    with torch.no_grad():
        own, other = models.drafter.model(ids_1T).logits, exported(ids_1T).logits
    torch.testing.assert_close(own, other, atol=1e-3, rtol=1e-3)
