"""The studies' arms, and the paper's numbers next to them."""

import re

import pytest
from places import ROOT

from benchmarks.studies.definitions import STUDIES, PaperColumn, Study, StudyName
from pipeline.config.settings import Config
from store.errors import ConfigError

PAPER = ROOT.parent / "shared" / "PAPER.md"
LOSSES, HEAD, DRIFT, CACHE, SOURCES, LEARNING = (STUDIES[name] for name in StudyName)


def column(study: Study, title: str) -> PaperColumn:
    return next(column for column in study.paper if column.title == title)


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.name)
def test_every_arm_is_a_configuration_of_its_own(study: Study):
    made = [Config().with_overrides({**study.settings, **arm.settings}) for arm in study.arms]
    seen = [(config.to_json(), arm.share) for config, arm in zip(made, study.arms, strict=True)]
    assert len(set(seen)) == len(seen)
    assert len({arm.name for arm in study.arms}) == len(study.arms)
    assert {*study.references, *(name for one in study.paper for name in one.values)} <= {
        arm.name for arm in study.arms
    }


def test_losses_differ_in_nothing_but_loss_cache_and_positions():
    assert LOSSES.settings == {"draft.stop": "never", "draft.max_draft": 5, "draft.width": 1}
    keys = {key for arm in LOSSES.arms for key in arm.settings}
    assert keys == {"learn.enabled", "learn.loss", "learn.off_policy", "cache.policy"}
    off_policy = {arm.name.split(" + ")[0] for arm in LOSSES.arms if arm.settings.get("learn.off_policy")}
    assert off_policy == {"direct", "hybrid", "trie", "acceptance"}


def test_the_head_is_studied_with_every_length_and_rule():
    fixed = [arm.settings["draft.max_draft"] for arm in HEAD.arms if arm.name.startswith("fixed")]
    assert fixed == [2, 3, 4, 5, 6, 7, 8]
    assert {arm.settings["draft.stop"] for arm in HEAD.arms[7:]} == {0.3, 0.7, "cost"}
    assert len(HEAD.arms[7:]) == 3


def test_every_response_to_drift_is_studied_with_and_without_the_cache():
    with_cache = [arm for arm in DRIFT.arms if "cache.policy" not in arm.settings]
    assert len(with_cache) * 2 == len(DRIFT.arms) == 26
    assert {arm.settings["drift.response"] for arm in with_cache} == {"reset", "recall", "none"}


def test_every_source_is_studied_alone_and_all_together():
    sources = [arm.settings.get("draft.sources") for arm in SOURCES.arms]
    assert sources == [None, ("own",), *2 * [("own", "memory")], *2 * [("model",)], ("own", "memory", "model")]
    assert [arm.name for arm in SOURCES.arms if arm.settings["learn.enabled"]] == ["model learning", "all"]


def test_ways_to_learn_differ_in_method_interval_and_features_alone():
    keys = {key for arm in LEARNING.arms for key in arm.settings}
    assert keys == {"learn.method", "learn.spacing", "learn.interval"}
    assert LEARNING.settings == {"learn.enabled": True, "draft.stop": "never", "draft.max_draft": 5, "draft.width": 1}
    assert LEARNING.references == ("baseline",)


def test_settings_of_the_arms_cannot_be_overridden():
    with pytest.raises(ConfigError, match=r"'learn\.loss' is decided by the arms of the study 'losses'"):
        LOSSES.check({"learn.rate": 0.1, "learn.loss": "trie"})
    with pytest.raises(ConfigError, match=r"cache\.budget_bytes"):
        CACHE.check({"cache.budget_bytes": 1000})
    LOSSES.check({"learn.rate": 0.1, "cache.budget_bytes": 1000})


@pytest.mark.parametrize(
    ("study", "title", "arm", "reference", "acceptance", "speed"),
    [
        (LOSSES, "Llama3-8B", "hybrid", "none", 4.2, 1.70 / 0.94),
        (LOSSES, "Llama3-8B", "direct only", "hybrid", 32 / 42, 1.58 / 1.70),
        (LOSSES, "Qwen2-7B", "hybrid", "none", 37 / 14, 1.61 / 1.04),
        (LOSSES, "k=3", "cache only", "none", 20 / 16, 1.16 / 1.04),
        (LOSSES, "k=4", "direct", "hybrid", 35 / 41, 1.54 / 1.61),
        (HEAD, "XSum", "threshold 0.3, interleaved", "fixed 5", 38 / 23, 1.58 / 1.53),
        (CACHE, "MBPP+HE", "1/4 LFU", "full", 0.259 / 0.267, 1.0),
        (CACHE, "MBPP+HE", "none", "full", 0.219 / 0.267, 1.29 / 1.36),
    ],
)
def test_the_paper_s_ratios(study: Study, title: str, arm: str, reference: str, acceptance: float, speed: float):
    found = column(study, title)
    assert found.acceptance(arm, reference) == pytest.approx(acceptance)
    assert found.speed_ratio(arm, reference) == pytest.approx(speed)


def test_the_paper_has_no_ratio_for_arms_that_it_does_not_have():
    assert column(LOSSES, "Llama3-8B").acceptance("trie", "none") is None
    assert column(LOSSES, "Llama3-8B").speed_ratio("cache only", "none") is None
    assert column(HEAD, "GSM8K").speed_ratio("cost, interleaved", "fixed 5") is None
    assert not DRIFT.paper
    assert "not stated" in DRIFT.remark


def pairs_in(line: str) -> list[tuple[float, float]]:
    """Every pair such as `.10/0.94` in a line, with or without a third number after it."""
    return [(float(a), float(b)) for a, b in re.findall(r"(?<![\d.])(\d?\.\d+)/(\d?\.\d+)", line)]


def line_of(text: str, begin: str, after: str) -> str:
    """The first line with this beginning after the passage `after`."""
    return next(line for line in text[text.index(after) :].splitlines() if line.startswith(begin))


@pytest.mark.skipif(not PAPER.is_file(), reason="the notes on the paper are not next to the checkout")
def test_the_paper_s_numbers_are_those_of_its_tables():
    text = PAPER.read_text(encoding="utf-8")
    places = {"none": ("| Llama3-8B | SpD_DM", "| Qwen2-7B | SpD_DM"), "direct only": ("| | L_DM |", "| | L_DM |")}
    places["hybrid"] = ("| | L_DM+λL_N", "| | L_DM+λL_N")
    for title, after, number in (("Llama3-8B", "Table 1", 0), ("Qwen2-7B", "| Qwen2-7B | SpD_DM", 1)):
        for arm, values in column(LOSSES, title).values.items():
            assert pairs_in(line_of(text, places[arm][number], after))[0] == values, (title, arm)
    for k in (3, 4):
        row = pairs_in(line_of(text, f"| k={k}", "Table 5"))
        names = ("none", "cache only", "direct only", "direct", "hybrid")
        assert dict(zip(names, row, strict=True)) == column(LOSSES, f"k={k}").values
    rows = {"fixed 5": "| distil only", "interleaved": "| interleaved"}
    for number, title in enumerate(("GSM8K", "MBPP+HE", "Alpaca", "XSum")):
        for arm, values in column(HEAD, title).values.items():
            line = re.sub(r"\([^)]*\)", "", line_of(text, rows[arm.split(", ")[-1]], "Table 2")).replace("*", "")
            assert pairs_in(line)[number] == values, (title, arm)
    row = pairs_in(line_of(text, "Table 14", "Table 14"))
    assert (
        dict(zip(("none", "1/4 LRU", "1/4 LFU", "1/2 LRU", "1/2 LFU", "full"), row, strict=True))
        == column(CACHE, "MBPP+HE").values
    )
