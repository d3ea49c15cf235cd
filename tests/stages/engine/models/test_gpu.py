"""The same code on an accelerator: the packed forward, and greedy text over a whole loop."""

from pathlib import Path

import pytest
import torch
from doubles import row_of

from pipeline.assembly.loop import build_loop
from pipeline.assembly.models import load_models
from pipeline.config.settings import Config
from pipeline.models.catalog import MODELS_FOLDER
from stages.engine.forward_pass.module_forward import ModuleForward
from stages.engine.models.huggingface import new_llama
from stages.engine.models.language_model import LanguageModel
from store.events import PromptReceived, TokenDecision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_the_packed_forward_gives_the_logits_of_the_modules():
    llama = new_llama(0, **SHAPE).to("cuda")
    packed, modules = LanguageModel(llama, "tiny"), LanguageModel(llama, "tiny")
    modules.forward_pass = ModuleForward(llama)
    found = []
    for model in (packed, modules):
        rows = [row_of(list(range(1, length)), remaining_tokens=4) for length in (3, 9)]
        for row in rows:
            model.admit(row, row.tokens)
        found.append([model.forward(rows, fed, list(map(len, fed)))[0] for fed in ([[5, 6], [7]], [[8], [9]])])
    for own, want in zip(*found, strict=True):
        torch.testing.assert_close(own, want, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("batch", [1, 4])
def test_greedy_text_is_that_of_the_cpu(batch: int, tmp_path: Path):
    """In float32; trees, learning and n-grams on."""
    prompts = [
        PromptReceived(n, str(n), "x", n + 1, text) for n, text in enumerate(("def mean(values):", "Return the"))
    ]
    texts = []
    for device in ("cpu", "cuda"):
        config = Config().with_overrides(
            {
                "targets": (str(MODELS_FOLDER / "target-7m"),),
                "drafter": str(MODELS_FOLDER / "drafter-1.6m"),
                "device": device,
                "batch": batch,
                "publish.enabled": False,
                "sampling.max_new_tokens": 24,
            }
        )
        loop = build_loop(config, load_models(config, "", tmp_path), tmp_path)
        events = [event for event in loop.run(iter(prompts)) if isinstance(event, TokenDecision)]
        texts.append(sorted((event.offset, event.emitted_id) for event in events if event.emitted_id is not None))
    assert texts[0] == texts[1]
