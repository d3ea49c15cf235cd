"""Heads that predict the piece at an offset, fitted by least squares.

A head's logits are those of its prior plus a multiple of a regression from features to what the prior's probabilities
lack. Ridge and multiple are those that are right most often on texts that the first fit leaves out.

Shapes: N places, X features, D drafter ids, R rank.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.study.parallel_heads.places import Places
from stages.models.language_model import LanguageModel
from stages.training.closed_form.sums import LeastSquaresSums

RIDGES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
STRENGTHS = (0.0, 2.0, 4.0, 8.0, 16.0, 32.0)
AT_ONCE = 1024  # places whose distributions are in memory
VALIDATION = 5  # one text in so many chooses ridge and strength
RANK = 64  # R

Features = Callable[[Places, int], Tensor]
Prior = Callable[[Places, int], Tensor]


@dataclass(frozen=True)
class FittedHead:
    """The head of one offset.

    Attributes:
        offset: of the predicted piece, 0 for the next one.
        features, prior: of places; both may depend on the piece before the predicted one.
        weight_DX: the regression's result times the strength.
        ridge, strength: as chosen.
    """

    offset: int
    features: Features
    prior: Prior
    weight_DX: Tensor
    ridge: float
    strength: float

    def logits(self, places: Places) -> Tensor:
        """Return the logits (N, D)."""
        return self.prior(places, self.offset) + self.features(places, self.offset) @ self.weight_DX.T

    def right(self, places: Places) -> Tensor:
        """Return whether the likeliest piece is the text's (N,)."""
        found = [self.logits(part).argmax(-1) == part.next_PK[:, self.offset] for part in split(places)]
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.bool)


def split(places: Places) -> Iterator[Places]:
    """Yield the places in parts, in order."""
    for start in range(0, len(places.before_P), AT_ONCE):
        yield places.take(torch.arange(start, min(start + AT_ONCE, len(places.before_P))))


def fit_head(places: Places, offset: int, features: Features, prior: Prior) -> FittedHead:
    """Fit a head to the pieces at an offset."""
    known = places.take(places.next_PK[:, offset] >= 0)
    left_out_N = known.text_P % VALIDATION == VALIDATION - 1
    sums = _sum_places(known.take(~left_out_N), offset, features, prior)
    rest = _sum_places(known.take(left_out_N), offset, features, prior)
    ridge, strength = _choose(sums, known.take(left_out_N), offset, features, prior)
    sums.merge(rest)
    return FittedHead(offset, features, prior, strength * sums.solve(ridge), ridge, strength)


def _sum_places(places: Places, offset: int, features: Features, prior: Prior) -> LeastSquaresSums:
    one = places.take(torch.arange(1))
    sums = LeastSquaresSums(features(one, offset).shape[1], prior(one, offset).shape[1], places.hidden_PW.device)
    for part in split(places):
        missing_ND = -prior(part, offset).softmax(-1)
        missing_ND[torch.arange(len(missing_ND)), part.next_PK[:, offset]] += 1
        sums.add(features(part, offset), missing_ND)
    return sums


def _choose(
    sums: LeastSquaresSums, places: Places, offset: int, features: Features, prior: Prior
) -> tuple[float, float]:
    """Return the ridge and the strength that are right at most places; of equal ones the weakest."""
    weights = [sums.solve(ridge) for ridge in RIDGES]
    right_RS = torch.zeros(len(RIDGES), len(STRENGTHS), dtype=torch.long)
    for part in split(places):
        prior_ND, wanted_N = prior(part, offset), part.next_PK[:, offset]
        for line, weight_DX in enumerate(weights):
            change_ND = features(part, offset) @ weight_DX.T
            for column, strength in enumerate(STRENGTHS):
                likeliest_N = torch.add(prior_ND, change_ND, alpha=strength).argmax(-1)
                right_RS[line, column] += (likeliest_N == wanted_N).sum()
    best = int(right_RS.flatten().argmax())
    return RIDGES[best // len(STRENGTHS)], STRENGTHS[best % len(STRENGTHS)]


class DrafterKnowledge:
    """What the drafter's weights know about single pieces, as priors and features of heads.

    Args:
        drafter: as loaded.
        forbidden_D: True for ids that may not be drafted.
    """

    def __init__(self, drafter: LanguageModel, forbidden_D: Tensor) -> None:
        self._output_DW = drafter.model.get_output_embeddings().weight.detach().float().cpu()
        self._penalty_D = torch.zeros(len(forbidden_D)).masked_fill(forbidden_D.cpu(), -1e4)
        embedding_DW = drafter.model.get_input_embeddings().weight.detach().float().cpu()
        self._embedding_DR = _reduce(embedding_DW)
        self._bigram_DR, self._bigram_RD, self._mean_D = _factor(_read_single_pieces(drafter))

    def own(self, places: Places, offset: int) -> Tensor:
        """Return the logits of the drafter's output layer, which predicts the next piece (N, D)."""
        logits_ND: Tensor = places.hidden_PW @ self._output_DW.T + self._penalty_D
        return logits_ND

    def nothing(self, places: Places, offset: int) -> Tensor:
        """Return equal logits for all pieces (N, D)."""
        return self._penalty_D.expand(len(places.before_P), -1).clone()

    def bigram(self, places: Places, offset: int) -> Tensor:
        """Return logits that depend on the previous piece alone, of rank R (N, D)."""
        return self._bigram_DR[places.previous(offset)] @ self._bigram_RD + self._mean_D + self._penalty_D

    def embedding(self, places: Places, offset: int) -> Tensor:
        """Return the reduced embedding of the previous piece (N, R)."""
        return self._embedding_DR[places.previous(offset)]


def _reduce(table_DW: Tensor) -> Tensor:
    """Return the R main directions of an embedding, with numbers of variance 1."""
    centred_DW = table_DW - table_DW.mean(0)
    left_DR, size_R, _ = torch.linalg.svd(centred_DW, full_matrices=False)
    rank = min(RANK, len(size_R))
    reduced_DR = left_DR[:, :rank] * size_R[:rank]
    scaled_DR: Tensor = reduced_DR / reduced_DR.square().mean().sqrt().clamp(min=1e-9)
    return scaled_DR


def _factor(table_DD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a table's factors of rank R and its mean line, which is left out of them."""
    mean_D = table_DD.mean(0)
    torch.manual_seed(0)
    left_DR, size_R, right_DR = torch.svd_lowrank(table_DD - mean_D, q=min(RANK, len(table_DD)))
    return left_DR * size_R, right_DR.T, mean_D


@torch.inference_mode()
def _read_single_pieces(drafter: LanguageModel) -> Tensor:
    """Return the log-probabilities of the piece after each piece, without any other text (D, D)."""
    ids_D1 = torch.arange(drafter.vocabulary_size, device=drafter.device)[:, None]
    parts = [drafter.read(ids_B1, torch.zeros_like(ids_B1), None)[:, -1] for ids_B1 in ids_D1.split(AT_ONCE)]
    return torch.cat([part.float().log_softmax(-1).cpu() for part in parts])
