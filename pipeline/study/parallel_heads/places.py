"""The places of recorded texts: what is known before each piece of a completion, and the pieces that follow.

Shapes: P places, K offsets, W hidden width, F features of a target's state.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from pipeline.study.parallel_heads.recording import RecordedText, read_hidden
from stages.drafting.target_states import AGE_DECAY, state_features
from stages.models.language_model import LanguageModel

OFFSETS = 4  # K


@dataclass(frozen=True)
class Places:
    """Every piece of some completions, text after text, in order.

    Attributes:
        hidden_PW: the drafter's hidden state after the piece before the place.
        states_PF: features of the target's state that a draft from the beginning of the place's token reads.
        before_P: the piece before the place.
        next_PK: the pieces of the text from the place on; -1 after its end.
        ends_PK: whether each of them is the last piece of a token.
        first_P: whether a token begins at the place.
        text_P: number of the text.
    """

    hidden_PW: Tensor
    states_PF: Tensor
    before_P: Tensor
    next_PK: Tensor
    ends_PK: Tensor
    first_P: Tensor
    text_P: Tensor

    def take(self, chosen_P: Tensor) -> "Places":
        """Return some of the places, by mask or index."""
        return Places(*(getattr(self, field.name)[chosen_P] for field in fields(self)))

    def previous(self, offset: int) -> Tensor:
        """Return the piece before the one at an offset (P,), 0 after the end of the text."""
        return self.before_P if offset == 0 else self.next_PK[:, offset - 1].clamp(min=0)

    @classmethod
    def from_texts(cls, drafter: LanguageModel, texts: Sequence[RecordedText]) -> "Places":
        """Read texts with the drafter."""
        return cls._join([cls._read_text(drafter, text, number) for number, text in enumerate(texts)])

    @classmethod
    def _join(cls, parts: Iterable["Places"]) -> "Places":
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    @classmethod
    def _read_text(cls, drafter: LanguageModel, text: RecordedText, number: int) -> "Places":
        pieces, starts = torch.tensor(text.pieces), torch.tensor(text.starts)
        hidden_TW = read_hidden(drafter, text.pieces).cpu()
        places_P = torch.arange(int(starts[0]), len(pieces))
        token_P = torch.searchsorted(starts, places_P, right=True) - 1
        first_P = places_P == starts[token_P]
        ahead_PK = places_P[:, None] + torch.arange(OFFSETS)
        inside_PK = ahead_PK < len(pieces)
        next_PK = torch.where(inside_PK, pieces[ahead_PK.clamp(max=len(pieces) - 1)], -1)
        ends_PK = torch.isin(ahead_PK + 1, torch.cat([starts, torch.tensor([len(pieces)])]))
        ages_P1 = (places_P - starts[token_P])[:, None]
        features_PF = state_features(torch.from_numpy(text.states)[(token_P - 1).clamp(min=0)])
        states_PF = torch.where(token_P[:, None] > 0, AGE_DECAY**ages_P1 * features_PF, 0.0)
        numbers_P = torch.full_like(places_P, number)
        return cls(
            hidden_TW[places_P - 1], states_PF, pieces[places_P - 1], next_PK, ends_PK & inside_PK, first_P, numbers_P
        )
