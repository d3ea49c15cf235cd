"""Blocks whose drafts are trees of target tokens, as verification would log them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from synthetic_runs import bonus, decision

from store.events import DraftSource, Origin, Outcome, TokenDecision, Translation

OTHER = 999  # the token that is drawn if no candidate of a place is accepted


def make_candidate(index: int, token: int, parent: int, probability: float, **changes: Any) -> TokenDecision:
    """A candidate of the memory that was not judged."""
    fields: dict[str, Any] = {
        "index": index, "pieces": (), "translation": Translation.NONE, "proposed_id": token,
        "proposed_bytes": b" %d" % token, "outcome": Outcome.UNJUDGED, "emitted_id": None, "emitted_bytes": None,
        "origin": None, "drafter_levels": (1.0,), "target_levels": (probability,), "uniform": None,
        "head_estimate": None, "entropy": None, "drafter": DraftSource.MEMORY, "parent": parent, "context": 3,
        "count": 2, "chance": 0.5,
    }  # fmt: skip
    return decision(**fields | changes)


def make_tree(
    nodes: Sequence[tuple[int, int, float]], uniforms: Sequence[float], begin: int = 0, **place: Any
) -> list[TokenDecision]:
    """The decisions of a block: what each place's uniform chooses, and the bonus after a candidate without children.

    Args:
        nodes: token, parent and target probability of each candidate.
        uniforms: one per judged place, from the text on.
        begin: position of the first emitted token.
        place: other fields of every decision.
    """
    depths = {-1: -1}
    for index, (_, parent, _) in enumerate(nodes):
        depths[index] = depths[parent] + 1
    made = [
        make_candidate(index, *node, **{"position": begin + depths[index]} | place) for index, node in enumerate(nodes)
    ]
    parent, draws = -1, iter(uniforms)
    while children := [index for index, node in enumerate(nodes) if node[1] == parent]:
        uniform, edge, chosen = next(draws), 0.0, None
        for child in children:
            edge += nodes[child][2]
            chosen = child if chosen is None and uniform < edge else chosen
            made[child] = replace(made[child], outcome=Outcome.ALTERNATIVE, uniform=uniform)
        if chosen is None:
            made[children[0]] = emit(made[children[0]], Outcome.REJECTED, OTHER, Origin.RESIDUAL)
            return made
        made[chosen] = emit(made[chosen], Outcome.ACCEPTED, nodes[chosen][0], Origin.ACCEPTED)
        parent = chosen
    last = {"index": len(nodes), "position": begin + depths[parent] + 1, "drafter": made[0].drafter}
    return [*made, bonus(**last | place)]


def emit(event: TokenDecision, outcome: Outcome, token: int, origin: Origin) -> TokenDecision:
    return replace(event, outcome=outcome, emitted_id=token, emitted_bytes=b" %d" % token, origin=origin)


# Four candidates after the text or each other: 5 and then 6 or 7; or 8.
NODES = ((5, -1, 0.5), (6, 0, 0.25), (7, 0, 0.5), (8, -1, 0.25))
