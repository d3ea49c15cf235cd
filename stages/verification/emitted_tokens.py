"""The tokens that a row's decisions emit: where each was drawn, which were accepted, where the sequence ends."""

from collections.abc import Collection, Iterable, Sequence

from stages.contract.blocks import Decision
from stages.vocabulary.text_stream import StopStrings
from store.events import DraftSource, Outcome


def emitting_lines(decisions: Sequence[Decision]) -> list[int]:
    """Return, per emitted token, the line among its row's distributions that it was drawn from.

    A token of a chain has its own index; one of a tree has that of its parent, counted from the text.
    """
    lines, parent = [], -1
    for decision in decisions:
        if decision.emitted is None:
            continue
        if decision.candidate is None:
            lines.append(decision.index if parent < 0 else parent + 1)
            continue
        lines.append(decision.candidate.parent + 1)
        parent = decision.index
    return lines


def accepted_path(decisions: Sequence[Decision]) -> list[int]:
    """Return the indices of the accepted tokens or candidates."""
    return [decision.index for decision in decisions if decision.outcome is Outcome.ACCEPTED]


def truncate(
    decisions: Sequence[Decision],
    remaining_tokens: int,
    eos_ids: Collection[int],
    stop_strings: StopStrings | None = None,
) -> tuple[Decision, ...]:
    """Return the decisions up to the one that emits an end of sequence, completes a stop string or emits the last
    remaining token; later ones are dropped.
    """
    emitted = 0
    for number, decision in enumerate(decisions, start=1):
        emitted += decision.emitted is not None
        if emitted == remaining_tokens or decision.emitted in eos_ids:
            decisions = decisions[:number]
            break
    stop = stop_strings.find_end(emitted_tokens(decisions)) if stop_strings else None
    if stop is not None:
        emitting = [number for number, decision in enumerate(decisions, start=1) if decision.emitted is not None]
        decisions = decisions[: emitting[stop - 1] if stop else 0]
    return tuple(decisions)


def emitted_sources(decisions: Iterable[Decision], source: DraftSource) -> list[DraftSource | None]:
    """Return per emitted token what proposed it, None if the target chose another one. `source` is that of the draft,
    for tokens of chains.
    """
    return [
        (decision.candidate.source if decision.candidate else source) if decision.outcome is Outcome.ACCEPTED else None
        for decision in decisions
        if decision.emitted is not None
    ]


def emitted_tokens(decisions: Iterable[Decision]) -> tuple[int, ...]:
    """Return the emitted tokens, in order."""
    return tuple(decision.emitted for decision in decisions if decision.emitted is not None)
