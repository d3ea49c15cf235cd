"""Every prompt is committed once, in any order in which workers take prompts, commit and die."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.cluster.dispatcher import Assignments
from store.events import PromptReceived


def prompt(offset: int) -> PromptReceived:
    return PromptReceived(offset, f"p{offset}", "docs", offset + 1, "text")


def make_assignments(count: int) -> Assignments:
    assignments = Assignments()
    for offset in range(count):
        assignments.add_prompt(prompt(offset))
    return assignments


def assign_offsets(assignments: Assignments, worker: str, limit: int) -> list[int]:
    return [one.offset for one in assignments.assign(worker, limit)]


def test_prompts_are_assigned_in_stream_order_and_counted():
    assignments = make_assignments(5)
    assert (
        assign_offsets(assignments, "a", 2),
        assign_offsets(assignments, "b", 9),
        assign_offsets(assignments, "a", 1),
    ) == ([0, 1], [2, 3, 4], [])
    assert (assignments.waiting, assignments.undecoded, assignments.count_undecoded("a"), assignments.offsets) == (
        0,
        5,
        2,
        [0, 1, 2, 3, 4],
    )
    assignments.mark_completed("a", [0])
    assert (
        assignments.undecoded,
        assignments.count_undecoded("a"),
        assignments.has_uncommitted("a"),
        assignments.offsets,
    ) == (
        4,
        1,
        True,
        [0, 1, 2, 3, 4],
    )
    assignments.mark_committed("a", [0])
    assert (assignments.count_undecoded("a"), assignments.offsets) == (1, [1, 2, 3, 4])


def test_uncommitted_prompts_of_a_lost_worker_come_first():
    assignments = make_assignments(6)
    assign_offsets(assignments, "a", 3)
    assign_offsets(assignments, "b", 2)
    assignments.mark_completed("a", [1, 2])
    assignments.mark_committed("a", [2])
    assert assignments.release_worker("a", {1, 2}) == 1  # it had committed one more than it reported
    assert assignments.release_worker("a", set()) == 0
    assert assign_offsets(assignments, "b", 9) == [0, 5]
    assert (assignments.undecoded, assignments.offsets) == (4, [0, 3, 4, 5])


@given(st.data())
def test_no_prompt_is_lost_or_committed_twice(data: st.DataObject):
    count = data.draw(st.integers(0, 12))
    assignments, logs = make_assignments(count), list[int]()
    unreported: dict[str, list[int]] = {"a": [], "b": [], "c": []}  # committed, and not reported yet
    decoding: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for _ in range(data.draw(st.integers(0, 40))):
        worker = data.draw(st.sampled_from("abc"))
        match data.draw(st.sampled_from(["assign", "commit", "report", "die"])):
            case "assign":
                decoding[worker] += assign_offsets(assignments, worker, data.draw(st.integers(0, 3)))
            case "commit" if decoding[worker]:
                offset = decoding[worker].pop(data.draw(st.integers(0, len(decoding[worker]) - 1)))
                logs.append(offset)
                unreported[worker].append(offset)
            case "report":
                assignments.mark_completed(worker, unreported[worker])
                assignments.mark_committed(worker, unreported[worker])
                unreported[worker] = []
            case "die":
                assignments.release_worker(worker, set(logs))
                decoding[worker], unreported[worker] = [], []
        assert len(set(logs)) == len(logs)
        assert set(assignments.offsets) | set(logs) == set(range(count))
    for worker in "abc":
        assignments.release_worker(worker, set(logs))
    assert assign_offsets(assignments, "d", count) == sorted(set(range(count)) - set(logs))
