"""Lists of prompts to choose one from."""

from typing import Any

from dashboards.plain import rows
from store.errors import UsageError
from store.plain import quoted
from store.queries import LogReader

PAGE = 20
START = 90  # characters of a prompt that a list shows
ORDERS = {
    "stream": '"offset"',
    "last": '"offset" DESC',
    "slowest": 'speed NULLS LAST, "offset"',
    "worst": 'acceptance NULLS LAST, "offset"',
    "best": 'acceptance DESC NULLS LAST, "offset"',
    "longest": 'emitted DESC, "offset"',
}

_LIST = """
    SELECT "offset", dataset, target, emitted, blocks, left(prompt_text, {start}) AS start,
        accepted / nullif(judged, 0) AS acceptance, emitted / nullif(finished - started, 0) AS speed
    FROM prompts WHERE {condition} ORDER BY {order} LIMIT {page} OFFSET {skip}
"""
_DATASETS = 'SELECT dataset, count(*) AS prompts FROM prompts GROUP BY dataset ORDER BY min("offset")'


def read_prompts(log: LogReader, order: str = "stream", dataset: str = "", page: int = 0) -> dict[str, Any]:
    """A page of prompts in an order, of all datasets or one, and the datasets there are.

    Rates are of judged prompts only in the orders that go by them. Raises `UsageError` for an unknown order.
    """
    if order not in ORDERS:
        raise UsageError(f"prompts can be ordered by {', '.join(ORDERS)}; got {order!r}")
    conditions = [f"dataset = {quoted(dataset)}"] if dataset else []
    conditions += {"worst": ["judged >= 5"], "best": ["judged >= 5"], "slowest": ["emitted > 0"]}.get(order, [])
    query = _LIST.format(
        start=START,
        condition=" AND ".join(conditions) or "true",
        order=ORDERS[order],
        page=PAGE,
        skip=PAGE * max(0, page),
    )
    return {"prompts": rows(log.select(query)), "datasets": rows(log.select(_DATASETS)), "page_size": PAGE}
