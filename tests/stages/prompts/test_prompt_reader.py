"""Prompts that are read in parts, or whose beginning is copied, give the logits of prompts that are read at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from doubles import row_of
from torch import Tensor

from stages.contract.blocks import SequenceState
from stages.engine.forward_pass.module_forward import ModuleForward
from stages.engine.models.huggingface import new_llama
from stages.engine.models.language_model import LanguageModel
from stages.prompts.prefix_cache import PrefixCache
from stages.prompts.prompt_reader import UNREAD, PromptReader

SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
TEXT = [(7 * place * place + 3) % 89 for place in range(75)]
CHUNK, CLOSE = 16, 1e-4  # tokens; standard deviations of the logits


def make_model(dtype: torch.dtype = torch.float32, *, modules: bool = False, **options: Any) -> LanguageModel:
    llama = new_llama(0, vocab_size=97, hidden_size=64, intermediate_size=64, initializer_range=0.3, **SHAPE)
    model = LanguageModel(llama.to(dtype), "tiny", **options)
    if modules:
        model.forward_pass = ModuleForward(llama)
    return model


MODELS: dict[str, Callable[[], LanguageModel]] = {
    "packed": make_model,
    "modules": lambda: make_model(modules=True),
    "bfloat16": lambda: make_model(torch.bfloat16),
}


def live_reader(model: LanguageModel, chunk: int = CHUNK, budget: int = 1 << 20) -> PromptReader:
    return PromptReader(model, chunk, PrefixCache(budget, 4), live=True)


def read_prompts(reader: PromptReader, rows: list[SequenceState]) -> list[list[int]]:
    """Read the prompts of all admitted rows as far as blocks do. Returns how many tokens each pass read of each row."""
    passes = []
    while any(row.reading for row in rows):
        new = reader.next_tokens()
        passes.append([len(new.get(row, ())) for row in rows])
        reader.model.forward(rows, [new.get(row, ()) for row in rows], [0] * len(rows))
        reader.after_pass()
    return passes


def finish(reader: PromptReader, row: SequenceState) -> Tensor:
    """Return the logits after a row's prompt, and release the row."""
    read_prompts(reader, [row])
    unread = row.tokens[reader.model.length(row) :]
    logits_1V, _ = reader.model.forward([row], [unread], [1])
    reader.release(row)
    return logits_1V


def complete(reader: PromptReader, tokens: list[int], **changes: Any) -> Tensor:
    """Return the logits after a prompt."""
    row = row_of(tokens)
    for name, value in changes.items():
        setattr(row, name, value)
    reader.admit(row)
    return finish(reader, row)


def at_once(model: LanguageModel, tokens: list[int]) -> Tensor:
    """Return the logits after a prompt that is read in one pass."""
    row = row_of(tokens)
    model.admit(row, tokens)
    logits_1V, _ = model.forward([row], [tokens[-1:]], [1])
    model.release(row)
    return logits_1V


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.std())


@pytest.mark.parametrize("name", MODELS)
def test_a_replay_computes_the_same_bits_with_and_without_its_cache(name: str):
    plain, cached = PromptReader(MODELS[name](), CHUNK, None), None
    cached = PromptReader(MODELS[name](), CHUNK, PrefixCache(1 << 20, CHUNK))
    texts = [TEXT, TEXT[:50] + TEXT[:20], TEXT[:33], TEXT[:32], TEXT[:1], TEXT]
    assert [torch.equal(complete(cached, text), complete(plain, text)) for text in texts] == [True] * len(texts)
    assert cached.counts.copied_tokens == 48 + 32 + 16 + 64
    assert cached.counts.copied_prompts == 4


def test_nothing_is_copied_of_weights_that_were_replaced_nor_by_an_instance_that_shares_them():
    def reader_of(model: LanguageModel) -> PromptReader:
        return PromptReader(model, CHUNK, PrefixCache(1 << 20, CHUNK))

    drafter, changed = make_model(), make_model()
    weights = [weight * 1.1 for weight in drafter.trained_weights]
    changed.load_weights(weights)
    readers = [reader_of(drafter), reader_of(drafter.share_weights())]
    before = [complete(reader, TEXT) for reader in readers * 2]
    drafter.load_weights(weights)
    after = [complete(reader, TEXT) for reader in readers]
    want = complete(reader_of(changed), TEXT)
    assert [torch.equal(logits, before[0]) for logits in before] == [True] * 4
    assert [torch.equal(logits, want) for logits in after] == [True, True]
    assert [reader.counts.copied_tokens for reader in readers] == [64, 64], "before the weights were replaced"


@pytest.mark.parametrize("name", ["packed", "modules"])
@pytest.mark.parametrize("chunk", [1, 2, 7, 40, 100])
def test_any_chunk_and_any_prefix_give_the_logits_of_a_prompt_that_is_read_at_once(name: str, chunk: int):
    reader = live_reader(MODELS[name](), chunk)
    for text in (TEXT, TEXT, TEXT[:50] + TEXT[:20], TEXT[:8]):
        assert distance(complete(reader, text), at_once(reader.model, text)) < CLOSE
    assert reader.counts.copied_tokens == 72 + 48 + 4


def test_batch_invariant_gives_the_same_bits_whatever_is_copied():
    options = {"weights": "int4", "batch_invariant": True}
    reader = live_reader(make_model(**options), 7)
    want = complete(PromptReader(make_model(**options), 30, None), TEXT)
    assert [torch.equal(complete(reader, TEXT), want) for _ in range(2)] == [True, True]
    assert reader.counts.copied_tokens == 72


def test_rows_next_to_a_copied_one_keep_their_keys():
    reader = live_reader(make_model())
    complete(reader, TEXT)
    rows = [row_of(TEXT[:40]), row_of(TEXT[5:60]), row_of(TEXT)]
    for row in rows:
        reader.admit(row)
    read_prompts(reader, rows)
    unread = [row.tokens[reader.model.length(row) :] for row in rows]
    logits_3V, _ = reader.model.forward(rows, unread, [1, 1, 1])
    for row in rows:
        reader.release(row)
    for row, own_V in zip(rows, logits_3V, strict=True):
        assert distance(own_V, at_once(reader.model, row.tokens)[0]) < CLOSE


def test_a_completed_text_is_known_to_the_next_turn_and_few_tokens_are_left_to_its_first_block():
    reader = live_reader(make_model())
    row = row_of(TEXT[:20])
    reader.admit(row)
    row.tokens += TEXT[20:60]
    reader.model.forward([row], [row.tokens[reader.model.length(row) :]], [1])
    reader.model.roll_back(row, 59)
    reader.release(row)
    reader.admit(later := row_of(TEXT))
    assert reader.model.length(later) == reader.counts.copied_tokens == 56
    assert 1 <= len(TEXT) - 56 <= UNREAD


def test_a_short_prompt_does_not_wait_for_a_long_one_nor_the_long_one_for_ever():
    reader = PromptReader(make_model(), 10, None, live=True)
    rows = [row_of(TEXT + TEXT), row_of(TEXT[:50]), row_of(TEXT[:60])]
    for row in rows:
        reader.admit(row)
    passes = read_prompts(reader, rows)
    assert all(0 < sum(counts) <= 10 for counts in passes)
    assert all(counts[0] for counts in passes), "the oldest prompt is read in every pass"
    assert [sum(column) for column in zip(*passes, strict=True)] == [118 + 2, 20, 30]
    assert not any(counts[1] for counts in passes[4:]), "the shortest is read first"


def test_equal_prompts_are_read_once_unless_they_are_private():
    for private, want in ((False, 45), (True, 90)):
        reader, rows = live_reader(make_model()), [row_of(TEXT, offset=offset) for offset in range(2)]
        for row in rows:
            row.private = private
            reader.admit(row)
        assert sum(map(sum, read_prompts(reader, rows))) >= want
        assert reader.counts.copied_prompts == (not private)
        assert [reader.model.length(row) >= len(TEXT) - UNREAD for row in rows] == [True, True]


def test_a_private_row_leaves_nothing():
    reader = live_reader(make_model())
    complete(reader, TEXT, private=True)
    assert reader.cache is not None
    assert reader.cache.bytes == 0
    complete(reader, TEXT)
    assert reader.counts.copied_tokens == 0
    complete(reader, TEXT, private=True)
    assert reader.counts.copied_tokens == 72, "it may use what its tenant keeps"


def test_tenants_copy_nothing_of_each_other():
    reader = live_reader(make_model())
    for scope in (1, 2, 0, 1):
        complete(reader, TEXT, scope=scope)
    assert reader.counts.copied_tokens == 72, "the second text of the first tenant"


@pytest.mark.parametrize("name", MODELS)
def test_a_preamble_is_computed_once_and_gives_the_same_bits(name: str):
    def new_reader() -> PromptReader:
        return PromptReader(MODELS[name](), CHUNK, PrefixCache(1 << 20, CHUNK), preamble=TEXT[:6])

    reader, texts = new_reader(), [TEXT[:6] + TEXT[40:52], TEXT[:6] + TEXT[20:60], TEXT[:7], TEXT[:6], TEXT[1:20]]
    assert [torch.equal(complete(reader, text), complete(new_reader(), text)) for text in texts] == [True] * 5
    assert (reader.counts.copied_tokens, reader.counts.copied_prompts) == (12, 2), "of the second text and the third"
    for text in texts:
        assert distance(complete(reader, text), at_once(reader.model, text)) < (0.1 if name == "bfloat16" else CLOSE)
