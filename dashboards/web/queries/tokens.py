"""Reads one completion token by token: proposals and trees, their outcomes, and the values that decided them."""

import codecs
import math
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from store.errors import UsageError
from store.query.log_reader import LogReader
from store.query.rates import Acceptance

MOST = 20_000  # maximum decisions of one completion
PROMPT_CHARACTERS = 20_000
DROPPED = ("unjudged", "untranslatable")
LINE_END = "↵"
BREAK = LINE_END + "\n"
SOURCES = {"model": "model", "lookup": "own text", "memory": "memory"}
MOST_LINES = 40  # of one tree; of larger ones only the judged candidates are listed
_MARKS = {"accepted": "✓", "rejected": "✗", "alternative": "–", "unjudged": "·"}
_LEGEND = "✓ accepted  ✗ rejected  – alternative  · not judged"
Row = Mapping[str, Any]

_PROMPT = """
    SELECT *, emitted / nullif(blocks, 0) AS efficiency,
        emitted / nullif(finished - started, 0) AS speed
    FROM prompts WHERE "offset" = {offset}
"""
_DECISIONS = 'SELECT * FROM decisions WHERE "offset" = {offset} ORDER BY block, "index" LIMIT {most}'


@dataclass(frozen=True)
class Token:
    """A token with its style, text and details."""

    # CSS classes: `accepted`, `residual`, `bonus`, `rejected` (proposed, not emitted), `dropped` (proposed, never
    # judged) or `tree` (the other candidates of a block's tree); also `ngram`, `lookup` and `memory` for its
    # source, and `opens` for the first token of a block
    kinds: tuple[str, ...]
    # text that the token adds, with control characters made visible. A character that spans several tokens is in
    # the text of the last one. Of a tree, the number of its candidates that are not shown as tokens.
    text: str
    detail: str  # details of the decision, one per line


@dataclass(frozen=True)
class Completion:
    """One completion with its prompt."""

    prompt: Row  # in the log, with its `acceptance`
    prompt_text: str  # shortened
    tokens: list[Token]
    cut: bool  # whether there are more tokens


def read_completion(log: LogReader, offset: int) -> Completion:
    """Read the completion of a prompt from the log of one run."""
    found = log.select(_PROMPT.format(offset=offset)).to_pylist()
    if not found:
        raise UsageError(f"the offset must be that of a completed prompt, got {offset}; choose one from the list")
    decisions = log.select(_DECISIONS.format(offset=offset, most=MOST)).to_pylist()
    cut = len(decisions) == MOST
    if cut:  # only whole blocks, which a tree needs
        decisions = [row for row in decisions if row["block"] < decisions[-1]["block"]] or decisions
    text = found[0]["prompt_text"] or ""
    shown = visible(text[:PROMPT_CHARACTERS]) + ("…" if len(text) > PROMPT_CHARACTERS else "")
    prompt = found[0] | {"acceptance": Acceptance(found[0]["accepted"], found[0]["judged"])}
    return Completion(prompt, shown, list(_tokens(decisions)), cut)


def visible(text: str) -> str:
    """`text` with line ends marked and control characters replaced by their code points."""
    hidden = ("Cc", "Cf", "Cs", "Co")
    shown = (
        char if char in "\t\n\u200c\u200d" or unicodedata.category(char) not in hidden else f"⟨U+{ord(char):04X}⟩"
        for char in text
    )
    return "".join(shown).replace("\n", BREAK)


def spell_tokens(ids: list[int], parts: list[bytes | None]) -> str:
    """Return tokens as one line of text, with visible control characters; as ids if the text of one is not known."""
    known = [part for part in parts if part is not None]
    if len(known) < len(ids):
        return " ".join(f"#{token}" for token in ids)
    return visible(b"".join(known).decode(errors="replace")).replace("\n", "")


def _tokens(decisions: list[dict[str, Any]]) -> Iterator[Token]:
    """Tokens of each decision: the proposed token if it was not emitted, then the emitted token.

    Candidates of a tree that were neither emitted nor replaced are listed in one token at the end of their block.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for _, block in groupby(decisions, itemgetter("block")):
        rows, opens = list(block), True
        for row in rows:
            if is_listed(row):
                continue
            siblings = [one for one in rows if is_candidate(row) and one["parent"] == row["parent"]]
            if row["outcome"] in ("rejected", *DROPPED):
                kind = "rejected" if row["outcome"] == "rejected" else "dropped"
                text = _token_text(row["proposed_id"], row["proposed_bytes"])
                yield _token(row, (kind,), text, opens, siblings)
                opens = False
            if row["emitted_id"] is not None:
                yield _token(row, (row["origin"],), _emitted_text(decoder, row), opens, siblings)
                opens = False
        if listed := sum(map(is_listed, rows)):
            yield Token(("tree",), f"+{listed}", "\n".join(list_tree(rows, _quote_proposed)))
    if rest := decoder.decode(b"", final=True):
        yield Token((), visible(rest), "the text ends within a character")


def _token(row: Row, kinds: tuple[str, ...], text: str, opens: bool, siblings: Sequence[Row]) -> Token:
    emitted_as_proposed = kinds[0] not in ("residual", "bonus")
    more = {
        "ngram": emitted_as_proposed and row["translation"] == "ngram",
        "lookup": emitted_as_proposed and row["drafter"] == "lookup",
        "memory": emitted_as_proposed and row["drafter"] == "memory",
        "opens": opens,
    }
    detail = "\n".join(_detail(row, kinds[0], siblings))
    return Token((*kinds, *(name for name, so in more.items() if so)), text, detail)


def _token_text(token: int | None, content: bytes | None) -> str:
    """Text of a token that is not part of the completion; its id if the log has no text."""
    if content is None:
        return "·" if token is None else f"#{token} "
    return visible(content.decode("utf-8", errors="replace")).replace(BREAK, LINE_END) or "∅"


def _emitted_text(decoder: codecs.IncrementalDecoder, row: Row) -> str:
    """Text that an emitted token adds to the completion; its id if the log has no text."""
    if row["emitted_bytes"] is None:
        return f"#{row['emitted_id']} "
    return visible(decoder.decode(row["emitted_bytes"])) or ("…" if row["emitted_bytes"] else "∅")


def _detail(row: Row, kind: str, siblings: Sequence[Row]) -> Iterator[str]:
    side = "emitted" if kind in ("accepted", "residual", "bonus") else "proposed"
    token = row[f"{side}_id"]
    yield _TITLES[row["outcome"] if kind == "dropped" else kind]
    yield f"token {'none' if token is None else token}{_bytes(row[f'{side}_bytes'])}"
    if kind == "residual":
        names = [f"{one['proposed_id']}{_bytes(one['proposed_bytes'])}" for one in siblings or [row]]
        yield f"instead of token {', '.join(names)}"
    if row["pieces"]:
        kinds = {"direct": "direct", "ngram": "n-gram", "none": "no translation"}
        yield f"drafted as pieces {', '.join(map(str, row['pieces']))} ({kinds[row['translation']]}, {row['drafter']})"
    if is_candidate(row):
        yield f"candidate: {describe_source(row)}"
    yield from _share(row, siblings) if siblings else _probabilities(row)
    yield from _raw_values(row)
    yield f"position {row['position']}, block {row['block']}, index {row['index']}"
    yield f"in service: drafter {row['drafter_version']}, head {row['head_version']}, cache {row['cache_version']}"


def _quote_proposed(row: Row) -> str:
    """The text of a proposed token in quotes; its id if the log has no text."""
    text = _bytes(row["proposed_bytes"]).strip()
    return text if text.startswith("“") else f"#{row['proposed_id']}{text}"


def _share(row: Row, siblings: Sequence[Row]) -> Iterator[str]:
    """A candidate is accepted by a uniform number within its probability, after those of the candidates before it."""
    probability = row["target_levels"][0]
    begin = float(sum(one["target_levels"][0] for one in siblings if one["index"] < row["index"]))
    yield f"probability {probability:.3g} by the target"
    if row["uniform"] is not None:
        yield f"accepted for a draw from {begin:.3g} to {begin + probability:.3g}; the draw was {row['uniform']:.3g}"


def _probabilities(row: Row) -> Iterator[str]:
    levels = list(zip(row["drafter_levels"] or [], row["target_levels"] or [], strict=False))
    for level, (ours, theirs) in enumerate(levels):
        name = f"level {level}: " if len(levels) > 1 else ""
        yield f"{name}probability {ours:.3g} by the drafter, {theirs:.3g} by the target"
    if row["uniform"] is not None and levels:
        chance = math.prod(_acceptance(ours, theirs) for ours, theirs in levels)
        yield f"accepted with probability {chance:.3g}; the draw was {row['uniform']:.3g}"
        if any(theirs == 0 for _, theirs in levels):
            yield "the target gives it probability 0: at temperature 0, another token is likelier"
    if row["head_estimate"] is not None:
        yield f"head's estimate of survival to here {row['head_estimate']:.3g}"
    if row["entropy"] is not None:
        yield f"drafter's entropy {row['entropy']:.3g} nats"


def _raw_values(row: Row) -> Iterator[str]:
    """How likely the models themselves found the token, at temperature 1; nothing where the run kept no such values."""
    ours, theirs, emitted = (row[f"{name}_raw_probability"] for name in ("drafter", "target", "emitted"))
    if ours is not None:
        yield f"at temperature 1: {ours:.3g} by the drafter, whose entropy was {row['drafter_raw_entropy']:.3g} nats"
    if theirs is not None:
        instead = "" if emitted is None else f", {emitted:.3g} for the token emitted instead"
        yield f"at temperature 1: {theirs:.3g} by the target{instead}"
    if row["target_raw_entropy"] is not None:
        yield f"target's entropy at temperature 1: {row['target_raw_entropy']:.3g} nats"


def _acceptance(ours: float, theirs: float) -> float:
    """min(1, theirs / ours), as in check.sql: 0 if the target gives the token probability 0, or it cannot be drawn."""
    if theirs <= 0 or not 0 < ours < math.inf:
        return 0.0
    return 1.0 if theirs >= ours else theirs / ours


def _bytes(content: bytes | None) -> str:
    """Text of a token in quotes; its bytes in hex if they are not whole characters."""
    if content is None:
        return ""
    try:
        return f" “{visible(content.decode('utf-8')).replace(BREAK, LINE_END)}”"
    except UnicodeDecodeError:
        return f", bytes {content.hex(' ')}"


def is_candidate(row: Row) -> bool:
    """Whether the decision is about a candidate of a tree."""
    return row["parent"] is not None


def is_listed(row: Row) -> bool:
    """Whether a candidate is part of the list of its tree alone, not of the text."""
    return is_candidate(row) and row["outcome"] in ("alternative", "unjudged")


def describe_source(row: Row) -> str:
    """The source of a candidate and what it knew: `memory, 3 tokens matched, seen 2 times, estimated chance 0.4`."""
    if row["drafter"] == "model":
        return f"model, estimated chance {row['chance']:.3g}"
    times = "once" if row["count"] == 1 else f"{row['count']} times"
    length = f"{row['context']} token{'' if row['context'] == 1 else 's'}"
    known = f"{length} matched, seen {times}" if row["context"] is not None else "context not known"
    return f"{SOURCES[row['drafter']]}, {known}, estimated chance {row['chance']:.3g}"


def list_tree(rows: Sequence[Row], text_of: Callable[[Row], str]) -> Iterator[str]:
    """Yield the tree of a block, one candidate per line, indented by its depth; the first line is a title."""
    nodes = [row for row in rows if is_candidate(row)]
    accepted = sum(row["outcome"] == "accepted" for row in nodes)
    sources = ", ".join(SOURCES[name] for name in dict.fromkeys(row["drafter"] for row in nodes))
    yield f"Tree of {len(nodes)} candidates ({sources}), {accepted} accepted"
    begin = min(row["position"] for row in nodes)
    shown = nodes if len(nodes) <= MOST_LINES else [row for row in nodes if row["outcome"] != "unjudged"]
    for row in shown[:MOST_LINES]:
        indent = "\u2003" * (row["position"] - begin)
        match = "" if row["drafter"] == "model" else f" ({row['context']} tokens, {row['count']}×)"
        yield (
            f"{indent}{_MARKS.get(row['outcome'], '?')} {text_of(row)} target {row['target_levels'][0]:.3g}, "
            f"estimated {row['chance']:.3g}, {SOURCES[row['drafter']]}{match}"
        )
    if left := len(nodes) - len(shown[:MOST_LINES]):
        yield f"… and {left} more"
    yield _LEGEND


_TITLES = {
    "accepted": "Accepted",
    "residual": "Drawn after a rejection (residual)",
    "bonus": "Bonus: drawn after the whole proposal was accepted",
    "rejected": "Rejected",
    "unjudged": "Not judged: after a rejection",
    "untranslatable": "Not translatable",
}
