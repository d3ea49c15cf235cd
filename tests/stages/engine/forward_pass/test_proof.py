"""The proof at load: every pattern of attention and state runs exactly, and what is wrong is found."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tiny_models import LLAMA3, make_module

from stages.contract.blocks import SequenceState
from stages.engine.forward_pass import proof
from stages.engine.forward_pass.forward import ForwardBatch
from stages.engine.forward_pass.module_forward import ModuleForward
from stages.engine.forward_pass.packed_llama import PackedLlamaForward
from stages.engine.forward_pass.row_forward import Reading, RowForward
from stages.engine.models.forward_choice import ForwardSearch
from stages.engine.models.language_model import LanguageModel
from stages.sampling.random_source import SeededRandomSource
from store.errors import ModelError

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 32,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Per case the model type, its settings, and the forward pass that must be chosen.
CASES: dict[str, tuple[str, dict[str, Any], type, str]] = {
    "window": ("mistral", {"sliding_window": 16}, PackedLlamaForward, "packed"),
    "some layers slide": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
        PackedLlamaForward,
        "packed",
    ),
    "alternating windows": ("gemma3_text", {"sliding_window": 16, "head_dim": 8}, ModuleForward, "modules"),
    "soft caps": ("gemma2", {"sliding_window": 16, "head_dim": 8}, ModuleForward, "modules"),
    "sinks": ("gpt_oss", {"sliding_window": 16, "head_dim": 8, **EXPERTS}, ModuleForward, "modules"),
    "chunks": (
        "llama4_text",
        {"attention_chunk_size": 16, "head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 48},
        ModuleForward,
        "modules",
    ),
    "alibi": ("bloom", {}, ModuleForward, "modules"),
    "long rope": (
        "phi3",
        {"original_max_position_embeddings": 32, "rope_parameters": LONG_ROPE},
        RowForward,
        "row by row",
    ),
    "own local mask": (
        "gpt_neo",
        {"window_size": 16, "attention_types": [[["global", "local"], 2]]},
        RowForward,
        "row by row",
    ),
    "convolutions": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, RowForward, "row by row"),
    "recurrence": ("mamba", {"state_size": 8}, RowForward, "token by token"),
    "state in the modules": (
        "recurrent_gemma",
        {"lru_width": 32, "attention_window_size": 16, "block_types": ["recurrent", "attention"]},
        RowForward,
        "from the beginning",
    ),
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A proof is made in every test."""
    monkeypatch.setenv("OMNIDRAFT_CACHE", str(tmp_path / "cache"))


def make_model(case: str) -> LanguageModel:
    kind, settings, _, _ = CASES[case]
    return LanguageModel(make_module(kind, settings), case)


def row_of(number: int, tokens: list[int]) -> SequenceState:
    return SequenceState(number, "", "", "", tokens, len(tokens), [], SeededRandomSource(0, 0), 64)


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_state_runs_as_the_model_computes(case: str):
    model = make_model(case)
    model.prove_forward()
    _, _, forward, name = CASES[case]
    assert isinstance(model.forward_pass, forward)
    assert name in model.forward_pass.name
    # Beyond every window and switch, in real lengths, with rollbacks and ragged rows.
    texts = [[(3 + 31 * place) % 97 for place in range(60)], [(5 + 29 * place) % 97 for place in range(40)]]
    rows = [row_of(number, text[: 30 - 20 * number]) for number, text in enumerate(texts)]
    for row in rows:
        model.admit(row, row.tokens)
    lengths = [len(row.tokens) - 1 for row in rows]
    found: list[list[torch.Tensor]] = [[], []]
    for right, wrong in (((3, 1), (2, 4)), ((1, 5), (0, 1)), ((6, 1), (1, 0)), ((20, 20), (0, 3)), ((1, 4), (4, 0))):
        tokens = [
            [*text[length : length + good], *[7] * bad]
            for text, length, good, bad in zip(texts, lengths, right, wrong, strict=True)
        ]
        logits_NV, _ = model.forward(rows, tokens, [len(new) for new in tokens])
        for number, own_QV in enumerate(logits_NV.split([len(new) for new in tokens])):
            found[number].extend(own_QV[: right[number]])
            lengths[number] += right[number]
            model.roll_back(rows[number], lengths[number])
    reference = make_model(case).model  # one that no proof has touched
    for number, text in enumerate(texts):
        want_TV = proof.read_at_once(reference, text[: lengths[number]])
        first = lengths[number] - len(found[number])
        error = (torch.stack(found[number]) - want_TV[first:]).abs().max() / want_TV.std()
        assert float(error) < proof.EXACT


def test_a_wrong_forward_is_found_and_the_next_slower_one_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("stages.engine.forward_pass.packed_llama._split_rows", lambda *_: ())
    monkeypatch.setattr(
        "stages.engine.forward_pass.packed_weights.PackedLlamaWeights.window", property(lambda self: None)
    )  # as if it knew nothing of windows
    model = make_model("window")
    model.prove_forward()
    assert isinstance(model.forward_pass, ModuleForward)


def test_a_window_that_the_masks_do_not_know_is_found(monkeypatch: pytest.MonkeyPatch):
    real = proof.check_forward
    model = make_model("alternating windows")

    def without_windows(module: Any, make: Callable[[], Any], *limits: Any, **rest: Any) -> tuple[float, bool]:
        with monkeypatch.context() as patch:
            if isinstance(make(), ModuleForward):  # a mask that is causal and nothing else
                patch.setattr(
                    "stages.engine.forward_pass.attention_masks.make_mask",
                    lambda positions, _: positions.keys_BK[:, None, None, :] <= positions.queries_BQ[:, None, :, None],
                )
            return real(module, make, *limits, **rest)

    monkeypatch.setattr(proof, "check_forward", without_windows)
    model.prove_forward()
    assert isinstance(model.forward_pass, RowForward)


def test_a_model_that_is_not_causal_is_refused_with_its_layers(monkeypatch: pytest.MonkeyPatch):
    model = make_model("window")
    forward = type(model.model).forward

    def looking_ahead(self: Any, input_ids: torch.Tensor, **rest: Any) -> Any:
        output = forward(self, input_ids=input_ids, **rest)
        output.logits = output.logits + input_ids[:, -1:, None] % 5  # every position sees the last token
        return output

    monkeypatch.setattr(type(model.model), "forward", looking_ahead)
    monkeypatch.setattr(LanguageModel, "_can_pack", lambda _: False)
    with pytest.raises(ModelError, match=r"no forward pass does \(model type mistral, .*modules: its logits deviate"):
        model.prove_forward()


def test_the_outcome_is_kept_for_these_weights(monkeypatch: pytest.MonkeyPatch):
    make_model("window").prove_forward()
    monkeypatch.setattr(ForwardSearch, "prove", lambda *_: pytest.fail("proved again"))
    make_model("window").prove_forward()
    other = make_model("window")
    with torch.no_grad():
        other.model.lm_head.weight[0, 0] += 1
    with pytest.raises(pytest.fail.Exception, match="proved again"):
        other.prove_forward()


def test_a_window_that_cannot_be_shortened_makes_the_text_longer_or_ends_it():
    model = make_model("window").model
    assert proof.check_spans(model) == (proof.TEXT, None)
    model.config.sliding_window = None
    model.config.local_attention_window = 100  # nobody reads it
    assert proof.check_spans(model) == (100 + proof.SPAN, None)
    model.config.max_position_embeddings = 1 << 20
    model.config.local_attention_window = proof.LONGEST_TEXT + 1
    assert proof.check_spans(model) == (proof.TEXT, proof.LONGEST_TEXT + 1)


def test_rotary_frequencies_that_are_fixed_limit_no_text():
    rope = {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 8192}
    model = LanguageModel(make_module("llama", {"max_position_embeddings": 131072, "rope_parameters": rope}), "tiny")
    model.prove_forward()
    assert model.max_length == 131072


def test_a_lack_of_memory_proves_nothing(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(proof, "check_forward", Mock(side_effect=torch.OutOfMemoryError("no memory left")))
        with pytest.raises(torch.OutOfMemoryError):
            make_model("window").prove_forward()
    model = make_model("window")
    model.prove_forward()
    assert isinstance(model.forward_pass, PackedLlamaForward)


def test_a_column_that_the_model_blocks_hides_no_difference():
    expected_V = torch.tensor([1.0, 2.0, 3.0, torch.finfo(torch.float32).min])
    assert proof._compare(expected_V, expected_V, rounds_inputs=False) == 0
    assert proof._compare(expected_V + torch.tensor([0.5, 0, 0, 0]), expected_V, rounds_inputs=False) > proof.EXACT
    assert proof._compare(expected_V[[3, 1, 2, 0]], expected_V, rounds_inputs=False) == float("inf")


def test_a_copy_to_train_has_rotary_frequencies_of_its_own():
    model = make_model("long rope")
    served = model.model.model.rotary_emb.inv_freq
    before = served.clone()
    copied = model.copy_to_train()
    with torch.inference_mode():
        copied.read(torch.arange(50)[None])
    assert torch.equal(served, before)
    assert not torch.equal(copied.model.model.rotary_emb.inv_freq, before)


READINGS = {
    "long rope": Reading.CHUNKED,
    "convolutions": Reading.CHUNKED,
    "recurrence": Reading.STEPWISE,
    "state in the modules": Reading.UNCACHED,
}


@pytest.mark.parametrize(("case", "reading"), READINGS.items())
def test_rows_are_saved_and_restored_bit_for_bit(case: str, reading: Reading):
    forward = RowForward(make_model(case).model, reading)
    forward.reserve(2, 64)
    with torch.inference_mode():
        forward(ForwardBatch(0, [[5, 6, 7] * 7, [9, 8]], [0, 0], [1, 1]))
        kept = [forward.read_cache(place, 0) for place in range(2)]
        restored = forward.share()
        restored.reserve(2, 64)
        for place, tensors in enumerate(kept):
            restored.write_cache(place, tensors)
        first, _ = forward(ForwardBatch(0, [[11, 3], [12]], [21, 2], [1, 1]))
        second, _ = restored(ForwardBatch(0, [[11, 3], [12]], [21, 2], [1, 1]))
        again, _ = restored(ForwardBatch(0, [[4], [12]], [20, 2], [1, 1]))  # after a rollback
    assert torch.equal(first, second)
    assert torch.isfinite(again).all()
