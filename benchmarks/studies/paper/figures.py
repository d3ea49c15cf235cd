"""The OmniDraft paper's figures as studies: their blocks, and the curve that each of them shows.

The paper's figures are images without numbers, so only their statements can be compared. Figures 7 and 9 show the runs
of table 4, and figure 8 those of table 5.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.studies.paper.blocks import (
    CODE,
    DIRECT_ONLY,
    GSM8K,
    HYBRID_ARM,
    MBPP,
    SWITCH,
    TRIE,
    PaperBlock,
    make_block,
)
from benchmarks.studies.paper.tables import PAPER_TABLES


class CurveKind(StrEnum):
    """What one of the paper's figures shows over the stream, or over the ranks of n-grams."""

    ACCEPTANCE = "acceptance"
    HITS = "hits"
    GROWTH = "growth"
    FREQUENCY = "frequency"


@dataclass(frozen=True)
class PaperFigure:
    """One of the paper's figures."""

    number: int  # in the paper
    title: str  # what it shows
    blocks: tuple[PaperBlock, ...]  # its parts
    remark: str  # what the paper states
    curve: CurveKind  # what is drawn for each arm
    folder: str  # of the runs, below `runs/`; that of a table whose runs it shows
    is_split: bool = False  # whether each block has a plot of its own
    late: frozenset[str] = frozenset()  # names of the blocks that are drawn as the second half of a stream
    # which of two targets decodes each part of the stream, in parts of equal length; empty for one target
    swaps: tuple[int, ...] = ()


_ARMS = (DIRECT_ONLY, HYBRID_ARM, TRIE)
_ALONE = (HYBRID_ARM, TRIE)


def _paper_figure_5() -> PaperFigure:
    blocks = (
        make_block("figure-5", "GSM8K, then MBPP", SWITCH, _ARMS, {}, reference=HYBRID_ARM.name),
        make_block("figure-5", "MBPP alone", MBPP, _ALONE, {}, reference=HYBRID_ARM.name),
    )
    return PaperFigure(
        5,
        "a switch of the data",
        blocks,
        "Paper: GSM8K, then MBPP + HumanEval, Qwen2.5-7B. The rate falls sharply at the switch, then climbs back "
        "toward that of a drafter trained on the new data alone; it recovers further with the cache than without.",
        CurveKind.ACCEPTANCE,
        "paper-figure-5",
        late=frozenset({MBPP.name}),
    )


def _paper_figure_6() -> PaperFigure:
    block = make_block("figure-6", GSM8K.title, GSM8K, _ARMS, {}, reference=HYBRID_ARM.name)
    return PaperFigure(
        6,
        "swaps of the target",
        (block,),
        "Paper: Qwen2.5-14B, at prompt 300 Qwen2.5-7B, at prompt 600 14B again, which share one vocabulary. The "
        "drafter aligns again after each swap, faster with the cache than without. Ours: each third has its target.",
        CurveKind.ACCEPTANCE,
        "paper-figure-6",
        swaps=(0, 1, 0),
    )


def _paper_figure_7() -> PaperFigure:
    return PaperFigure(
        7,
        "how often each n-gram occurs",
        PAPER_TABLES["4"].blocks,
        f"Paper: the frequencies have a long tail, and {CODE.title} has more frequent n-grams in proportion. Ours: "
        "target tokens of several pieces in the completions, by rank.",
        CurveKind.FREQUENCY,
        "paper-table-4",
    )


def _paper_figure_8() -> PaperFigure:
    return PaperFigure(
        8,
        "accepted n-grams along the stream",
        PAPER_TABLES["5"].blocks,
        "Paper: with the loss of n-grams the number of accepted n-grams per response rises while the drafter learns; "
        "trained on direct maps alone it stays low.",
        CurveKind.HITS,
        "paper-table-5",
        is_split=True,
    )


def _paper_figure_9() -> PaperFigure:
    return PaperFigure(
        9,
        "growth of the n-gram cache",
        PAPER_TABLES["4"].blocks,
        "Paper: the cache grows more slowly than the number of tokens.",
        CurveKind.GROWTH,
        "paper-table-4",
    )


PAPER_FIGURES: Mapping[str, PaperFigure] = {
    str(one.number): one
    for one in (_paper_figure_5(), _paper_figure_6(), _paper_figure_7(), _paper_figure_8(), _paper_figure_9())
}
