"""Every prompt is settled once, in whatever order workers take, commit and die."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.scale_deal import Deal
from store.events import PromptReceived


def prompt(offset: int) -> PromptReceived:
    return PromptReceived(offset, f"p{offset}", "docs", offset + 1, "text")


def dealt(count: int) -> Deal:
    deal = Deal()
    for offset in range(count):
        deal.put(prompt(offset))
    return deal


def given_to(deal: Deal, worker: str, most: int) -> list[int]:
    return [one.offset for one in deal.give(worker, most)]


def test_prompts_are_given_in_stream_order_and_counted():
    deal = dealt(5)
    assert (given_to(deal, "a", 2), given_to(deal, "b", 9), given_to(deal, "a", 1)) == ([0, 1], [2, 3, 4], [])
    assert (deal.waiting, deal.to_decode, deal.open_at("a"), deal.offsets) == (0, 5, 2, [0, 1, 2, 3, 4])
    deal.completed("a", [0])
    assert (deal.to_decode, deal.open_at("a"), deal.holds("a"), deal.offsets) == (4, 1, True, [0, 1, 2, 3, 4])
    deal.settled("a", [0])
    assert (deal.open_at("a"), deal.offsets) == (1, [1, 2, 3, 4])


def test_what_a_lost_worker_had_not_committed_comes_first():
    deal = dealt(6)
    given_to(deal, "a", 3)
    given_to(deal, "b", 2)
    deal.completed("a", [1, 2])
    deal.settled("a", [2])
    assert deal.lost("a", {1, 2}) == 1  # it had committed one more than it said
    assert deal.lost("a", set()) == 0
    assert given_to(deal, "b", 9) == [0, 5]
    assert (deal.to_decode, deal.offsets) == (4, [0, 3, 4, 5])


@given(st.data())
def test_nothing_is_ever_lost_or_settled_twice(data: st.DataObject):
    count = data.draw(st.integers(0, 12))
    deal, logs = dealt(count), list[int]()
    unsaid: dict[str, list[int]] = {"a": [], "b": [], "c": []}  # committed, and not reported yet
    decoding: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for _ in range(data.draw(st.integers(0, 40))):
        worker = data.draw(st.sampled_from("abc"))
        match data.draw(st.sampled_from(["give", "commit", "say", "die"])):
            case "give":
                decoding[worker] += given_to(deal, worker, data.draw(st.integers(0, 3)))
            case "commit" if decoding[worker]:
                offset = decoding[worker].pop(data.draw(st.integers(0, len(decoding[worker]) - 1)))
                logs.append(offset)
                unsaid[worker].append(offset)
            case "say":
                deal.completed(worker, unsaid[worker])
                deal.settled(worker, unsaid[worker])
                unsaid[worker] = []
            case "die":
                deal.lost(worker, set(logs))
                decoding[worker], unsaid[worker] = [], []
        assert len(set(logs)) == len(logs)
        assert set(deal.offsets) | set(logs) == set(range(count))
    for worker in "abc":
        deal.lost(worker, set(logs))
    assert given_to(deal, "d", count) == sorted(set(range(count)) - set(logs))
