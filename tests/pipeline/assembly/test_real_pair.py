"""Vocabularies that people use: a Llama-2 drafter for Qwen2 and Llama-3 targets, through the whole pipeline.

The weights are small and trained for seconds, on sentences in which most target tokens are n-grams of the drafter.
"""

import json
from pathlib import Path

import pytest
import torch
from places import ROOT
from replaying import run_replay, table_of
from torch import Tensor

from pipeline.config.settings import Config
from stages.engine.models.huggingface import load_tokenizer, new_llama
from store.query.log_reader import LogReader, statement

TOKENIZERS = ROOT.parent / "shared" / "tokenizers"
pytestmark = pytest.mark.skipif(not TOKENIZERS.is_dir(), reason=f"the real tokenizers are not at {TOKENIZERS}")

NEW_TOKENS = 20
SENTENCES = [
    f"Ticket {1000 + 7 * n}: naïve café owner No. {n} ordered {250 + n} Brötchen;\n\n"
    f"    total = {3 * n} € 🙂 unbelievably quickly.\n"
    for n in range(12)
]
# The target's output layer is wider than its tokenizer, as Qwen2's is.
WIDTHS = {"qwen2": 151_936, "llama-3": 128_320, "llama-2": 32_000}


def train_pair(kind: str, folder: Path, steps: int) -> Path:
    """A small model with a real tokenizer that knows the sentences by heart."""
    tokenizer = load_tokenizer(str(TOKENIZERS / kind))
    model = new_llama(
        5, vocab_size=WIDTHS[kind], hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    texts = [tokenizer(text, split_special_tokens=True)["input_ids"] for text in SENTENCES]
    length = min(map(len, texts))
    ids_BT: Tensor = torch.tensor([text[:length] for text in texts])
    for step in range(steps):
        rows_BT = ids_BT[step % 3 :: 3]
        optimizer.zero_grad()
        model(input_ids=rows_BT, labels=rows_BT).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_pair("llama-2", tmp_path_factory.mktemp("real") / "drafter", 90)


def plain(folder: Path, texts: list[str]) -> list[str]:
    """Return the output of `generate` for each prompt."""
    from transformers import AutoModelForCausalLM

    tokenizer, model = load_tokenizer(str(folder)), AutoModelForCausalLM.from_pretrained(folder)
    known = len(tokenizer)
    completions = []
    for text in texts:
        ids_1T = torch.tensor([tokenizer(text, split_special_tokens=True)["input_ids"]])
        found = model.generate(
            ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=NEW_TOKENS, do_sample=False,
            suppress_tokens=list(range(known, model.config.vocab_size)), pad_token_id=0,
        )  # fmt: skip
        completions.append(tokenizer.decode(found[0, ids_1T.shape[1] :], skip_special_tokens=True))
    return completions


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "steps"), [("qwen2", 24), ("llama-3", 24)])
def test_a_real_pair_runs_the_whole_pipeline_and_greedy_is_plain_decoding(
    kind: str, steps: int, drafter: Path, tmp_path: Path
):
    target = train_pair(kind, tmp_path / "target", steps)
    texts = [text[: 14 + n] for n, text in enumerate(SENTENCES)] + ["A literal <unk> or <|im_end|> is"]
    source = tmp_path / "tickets.jsonl"
    source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    config = Config().with_overrides(
        {
            "targets": (str(target),), "drafter": str(drafter), "sources": (str(source),), "batch": 4,
            "sampling.max_new_tokens": NEW_TOKENS, "learn.interval": 2, "learn.rate": 5e-3, "device": "cpu",
            "publish.enabled": False, "draft.stop": "never", "draft.pause": False, "draft.width": 1,
            "draft.sources": ("model",),
        }
    )  # fmt: skip
    run = tmp_path / "run"
    run_replay(config, run)
    prompts = table_of(run, "prompts").sort_by("offset").to_pylist()
    assert [row["completion_text"] for row in prompts] == plain(target, texts)
    accepted = [row for row in table_of(run, "decisions").to_pylist() if row["outcome"] == "accepted"]
    assert {row["translation"] for row in accepted} == {"direct", "ngram"}, "both kinds must have been accepted"
    assert len(accepted) > 50
    with LogReader([run]) as log:
        assert log.select(statement("check")).to_pylist() == [], "every decision is the one that its row gives"
