"""Replay the texts of a benchmark through drafters, without the target: `python -m pipeline.bench.vllm.chains FILE`.

FILE is the output of `python -m pipeline.bench.vllm --output FILE`. Greedy verification accepts the tokens of a draft
that the text has, so the tokens per pass are those of an engine in which every pass costs the same. All drafters meet
the same texts in the same order.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import thread_time
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from pipeline.bench.vllm.__main__ import parse_batches
from pipeline.bench.vllm.arms import PLAIN
from pipeline.reports.tables import Table
from pipeline.vllm_plugin.engine import EngineFacts, build_engine
from pipeline.vllm_plugin.sequences import EngineRow, RowRequest
from pipeline.vllm_plugin.settings import PluginSettings
from store.errors import OmnidraftError, UsageError

HEADS = ("drafter", "batch", "tokens per pass", "in the last half", "drafted per request and pass", "ms per pass")
FLAT, PER_TOKEN = 1.0, 1000  # the cost of a pass, and of how many tokens more
SUFFIX_DEPTH, SUFFIX_FACTOR, SUFFIX_PROBABILITY = 24, 1.0, 0.1  # vLLM's defaults


class ReplayedRow(NamedTuple):
    """A request after a pass: its number, its text, the length of its prompt, and how many tokens were emitted."""

    number: int
    text: Sequence[int]
    prompt: int
    emitted: int


Draft = Callable[[Sequence[ReplayedRow]], list[list[int]]]


@dataclass
class ChainCounts:
    """What became of the drafts.

    Attributes:
        emitted: tokens, per request.
        passes: in which a request emitted tokens, per request.
        steps: passes of the engine.
        drafted: drafted tokens.
        seconds: processor time of drafting.
    """

    emitted: list[int]
    passes: list[int]
    steps: int = 0
    drafted: int = 0
    seconds: float = 0.0

    def tokens_per_pass(self, begin: int = 0) -> float:
        """Return the tokens per pass of the requests from a number on."""
        return sum(self.emitted[begin:]) / sum(self.passes[begin:])


def replay_texts(
    prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], batch: int, draft: Draft
) -> ChainCounts:
    """Replay texts in their order; a request enters when another one has ended.

    >>> def draft(rows):
    ...     return [[2, 9] for row in rows]
    >>> counts = replay_texts([[7], [7]], [[1, 2, 3], [1, 2]], 1, draft)
    >>> counts.emitted, counts.passes, counts.drafted, counts.steps
    ([3, 2], [2, 2], 4, 4)

    Args:
        prompts, texts: token ids.
        batch: requests at a time.
        draft: returns a draft for each row after a pass.
    """
    counts = ChainCounts([0] * len(texts), [0] * len(texts))
    waiting, drafts = list(range(len(texts))), dict[int, list[int]]()
    while waiting or drafts:
        while waiting and len(drafts) < batch:
            drafts[waiting.pop(0)] = []
        rows = []
        for number, drafted in drafts.items():
            left = texts[number][counts.emitted[number] :]
            emitted = min(1 + _count_equal(drafted, left), len(left))
            counts.emitted[number] += emitted
            counts.passes[number] += 1
            counts.drafted += len(drafted)
            text = [*prompts[number], *texts[number][: counts.emitted[number]]]
            rows.append(ReplayedRow(number, text, len(prompts[number]), emitted))
        counts.steps += 1
        began = thread_time()
        found = draft(rows)
        counts.seconds += thread_time() - began
        drafts = {
            row.number: drafted
            for row, drafted in zip(rows, found, strict=True)
            if counts.emitted[row.number] < len(texts[row.number])
        }
    return counts


def _count_equal(drafted: Sequence[int], text: Sequence[int]) -> int:
    for place, (token, wanted) in enumerate(zip(drafted, text, strict=False)):
        if token != wanted:
            return place
    return min(len(drafted), len(text))


def make_memory(most: int, batch: int, longest: int, cost: float = 0.0) -> Draft:
    """Return the drafts of the plugin's own text and memory.

    Args:
        most: maximum number of drafted tokens.
        batch: requests at a time.
        longest: number of tokens of the longest text.
        cost: of one more token of a pass, relative to a pass without drafts.
    """
    costs = ((batch, FLAT), (batch + PER_TOKEN, FLAT + PER_TOKEN * cost))
    facts = EngineFacts("replay", "replay", 1 << 31, longest + most + 1, most, batch, frozenset())
    engine = build_engine(PluginSettings.model_validate({"pass_costs": costs}), facts)

    def draft(rows: Sequence[ReplayedRow]) -> list[list[int]]:
        names = [str(row.number) for row in rows]
        given = [
            EngineRow(np.array(row.text, np.int32), row.emitted, RowRequest(name, longest + 1))
            for name, row in zip(names, rows, strict=True)
        ]
        return engine.step(given, names)

    return draft


def make_suffix(factor: float = SUFFIX_FACTOR) -> Draft:
    """Return the drafts of suffix decoding, as vLLM calls it.

    Args:
        factor: drafted tokens per token of the match.
    """
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    cache: Any = SuffixDecodingCache(max_tree_depth=SUFFIX_DEPTH, max_cached_requests=10_000)

    def draft(rows: Sequence[ReplayedRow]) -> list[list[int]]:
        drafts = []
        for row in rows:
            text = np.array(row.text, np.int32)
            if row.number not in cache.active_requests:
                cache.start_request(row.number, text[: row.prompt])
            cache.add_active_response(row.number, text[-row.emitted :])
            found = cache.speculate(
                row.number,
                text[-SUFFIX_DEPTH:],
                max_spec_tokens=SUFFIX_DEPTH,
                max_spec_factor=factor,
                min_token_prob=SUFFIX_PROBABILITY,
            )
            drafts.append(list(found.token_ids))
        for number in cache.active_requests - {row.number for row in rows}:
            cache.stop_request(number)
        return drafts

    return draft


def read_texts(file: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Return the prompts and the texts of the arm without drafts."""
    sizes = json.loads(file.read_text(encoding="utf-8"))
    rounds = next(size["arms"][PLAIN] for size in sizes if PLAIN in size["arms"])
    return [prompt for one in rounds for prompt in one["prompts"]], [text for one in rounds for text in one["texts"]]


def make_row(name: str, batch: int, counts: ChainCounts) -> list[str]:
    """Return the cells of a drafter's row."""
    return [
        name,
        str(batch),
        f"{counts.tokens_per_pass():.2f}",
        f"{counts.tokens_per_pass(len(counts.passes) // 2):.2f}",
        f"{counts.drafted / sum(counts.passes):.2f}",
        f"{1000 * counts.seconds / counts.steps:.2f}",
    ]


def parse_numbers(name: str, text: str) -> list[float]:
    """Return the numbers of an option.

    >>> parse_numbers("--drafts", "8,16")
    [8.0, 16.0]

    Raises:
        UsageError: one is not a number of at least 0.
    """
    try:
        found = [float(one) for one in text.split(",")] if text else []
    except ValueError:
        found = [-1.0]
    if any(not one >= 0 for one in found):
        raise UsageError(f"{name} must be numbers of at least 0, comma-separated; got {text!r}")
    return found


def compare_chains(
    file: Annotated[Path, typer.Argument(help="Output of the benchmark with the arm 'plain'.")],
    batch: Annotated[str, typer.Option(help="Requests at a time; comma-separated.")] = "1,8",
    drafts: Annotated[str, typer.Option(help="Maximum drafted tokens per request; comma-separated.")] = "8,16",
    cost: Annotated[str, typer.Option(help="Costs of a drafted token, relative to a pass; comma-separated.")] = "0",
    factor: Annotated[
        str, typer.Option(help="Drafted tokens per matched one of suffix decoding; comma-separated, may be empty.")
    ] = "1",
) -> None:
    """Measure the tokens per pass of drafters on the texts of a benchmark."""
    prompts, texts = read_texts(file)
    longest = max(len(prompt) + len(text) for prompt, text in zip(prompts, texts, strict=True))
    rows = []
    for size in parse_batches(batch):
        drafters = {f"suffix decoding, factor {one:g}": make_suffix(one) for one in parse_numbers("--factor", factor)}
        for most, each in product(parse_batches(drafts), parse_numbers("--cost", cost)):
            drafters[f"memory, {most} drafts, cost {each:g}"] = make_memory(most, size, longest, each)
        rows += [make_row(name, size, replay_texts(prompts, texts, size, one)) for name, one in drafters.items()]
    print(Table(HEADS, rows).markdown())


def main() -> None:
    """Run the command; errors of ours are one line."""
    try:
        typer.run(compare_chains)
    except OmnidraftError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
