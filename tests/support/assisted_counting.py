"""Counts of tokens that assisted generation of `transformers` proposes and accepts, by the project's definitions."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    AssistedCandidateGeneratorDifferentTokenizers,
)


@dataclass
class Counts:
    """Target tokens over all blocks; `judged` are those up to and including the first rejected one of a block."""

    proposed: int = 0
    judged: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        return self.accepted / self.judged


@contextmanager
def counting() -> Iterator[Counts]:
    """Count all assisted generation in this context."""
    counts, proposed = Counts(), [0]

    def patch_candidates(kind: type) -> Any:
        draft = kind.get_candidates

        def get_candidates(self: Any, input_ids: Any, *rest: Any, **named: Any) -> Any:
            found = draft(self, input_ids, *rest, **named)
            proposed[0] = found[0].shape[1] - input_ids.shape[1]
            return found

        return patch.object(kind, "get_candidates", get_candidates)

    decide = AssistedCandidateGenerator.update_candidate_strategy

    def update(self: Any, input_ids: Any, scores: Any, num_matches: Any) -> None:
        accepted = min(int(num_matches), proposed[0])
        counts.proposed += proposed[0]
        counts.accepted += accepted
        counts.judged += min(proposed[0], accepted + 1)
        decide(self, input_ids, scores, num_matches)

    with (
        patch_candidates(AssistedCandidateGenerator),
        patch_candidates(AssistedCandidateGeneratorDifferentTokenizers),
        patch.object(AssistedCandidateGenerator, "update_candidate_strategy", update),
    ):
        yield counts


def simulate(agrees: Sequence[bool], length: int) -> Counts:
    """Expected counts of greedy drafts of that length on a text, given which of its tokens the drafter predicts."""
    counts, place = Counts(), 0
    while place < len(agrees):
        drafted = agrees[place : place + length][: max(0, len(agrees) - place - 1)]
        matches = next((n for n, agree in enumerate(drafted) if not agree), len(drafted))
        counts.proposed += len(drafted)
        counts.accepted += matches
        counts.judged += min(len(drafted), matches + 1)
        place += matches + 1
    return counts


def greedy(target: Any, ids: Sequence[int], new_tokens: int, **drafting: Any) -> list[int]:
    """The completion of one prompt."""
    ids_1T = torch.tensor([list(ids)])
    with torch.inference_mode():
        out_1T = target.generate(
            ids_1T,
            attention_mask=torch.ones_like(ids_1T),
            do_sample=False,
            max_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            **drafting,
        )
    return out_1T[0, len(ids) :].tolist()
