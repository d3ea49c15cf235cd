"""Routing of prompts to targets: in turn, and by swaps."""

import pytest

from pipeline.config.settings import TargetRouter
from store.errors import ConfigError


def route_all(router: TargetRouter, count: int) -> str:
    return "".join(router(offset) for offset in range(count))


def make_router(targets: tuple[str, ...], *swaps: str) -> TargetRouter:
    return TargetRouter.parse(targets, swaps)


def test_several_targets_get_prompts_in_turn_by_offset():
    assert route_all(make_router(("a", "b", "c")), 8) == "abcabcab"


def test_from_a_swap_on_its_target_gets_everything_until_the_next():
    router = make_router(("a", "b"), "3=c", "5=a", "7=b")
    assert route_all(router, 9) == "abaccaabb"
    assert router.targets == ("a", "b", "c"), "each once, although two come back"


@pytest.mark.parametrize("swap", ["3", "=b", "3=", "x=b", "-1=b", "0=b", "1.5=b", ""])
def test_what_is_no_swap_is_refused_with_an_example(swap: str):
    with pytest.raises(ConfigError, match=r"OFFSET=TARGET with an offset from 1 on, such as 300=.*, got"):
        make_router(("a",), swap)


def test_a_target_named_twice_is_refused():
    with pytest.raises(ConfigError, match="every target may be named once, got a, b, a"):
        make_router(("a", "b", "a"))
