"""The configuration: complete, frozen, read and written without loss, and plain about mistakes."""

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cli.config import format_settings
from pipeline.config.settings import Config, TargetRouter, load, settings
from store.errors import ConfigError


def refusal(overrides: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        Config().with_overrides(overrides)
    return str(caught.value)


def test_defaults_are_those_of_the_main_job():
    config = Config()
    assert config.sources == ("builtin:docs", "builtin:code")
    assert (config.targets, config.drafter, config.run) == (("builtin:target-12m",), "builtin:drafter-1.6m", None)
    assert (config.sampling.temperature, config.draft.mode, config.learn.loss) == (0.0, "trie", "trie")
    assert (config.drift.detector, config.cache.policy, config.learn.interval) == ("page-hinkley", "lfu", 4)


def test_every_setting_has_a_default_and_a_description_of_one_sentence():
    for key, field in settings().items():
        assert not field.is_required(), key
        assert field.description, key
        assert field.description.endswith("."), key


def test_a_named_drafter_stays_with_other_targets_and_an_unnamed_one_does_not():
    other = {"targets": ("smollm2-135m",)}
    named = Config().with_overrides({"drafter": Config().drafter}).with_overrides({"seed": 1}).with_overrides(other)
    assert named.drafter == Config().drafter
    assert Config().with_overrides({"seed": 1}).with_overrides(other).drafter == "builtin:drafter-4m"


def test_an_override_changes_its_setting_and_no_other():
    before = Config()
    after = before.with_overrides({"sampling.temperature": 1.0, "batch": 8, "source.limit": 3})
    assert (after.sampling.temperature, after.batch, after.source.limit) == (1.0, 8, 3)
    back = {"sampling.temperature": 0.0, "batch": 1, "source.limit": None}
    assert after.with_overrides(back) == before == Config()


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("sampling.temprature", 1.0, "sampling.temperature"),
        ("lern.rate", 1e-3, "learn.rate"),
        ("top_p", 0.9, "sampling.top_p"),
        ("where", ["a=b"], "source.where"),
        ("drift.temperature", 1.0, "draft.temperature"),
        ("learn.loss_name", "trie", "learn.loss"),
        ("devise", "cpu", "device"),
    ],
)
def test_an_unknown_setting_names_the_nearest_one(key: str, value: object, meant: str):
    assert refusal({key: value}) == f"Unknown setting '{key}'. Did you mean '{meant}'?"


def test_an_unknown_setting_like_no_other_lists_what_there_is():
    refused = refusal({"drift.qqqqqqqqqq": 1})
    assert refused.startswith("Unknown setting 'drift.qqqqqqqqqq'. There are: drift.detector, ")
    unknown = refusal({"zzzzzz": 1})
    assert unknown.startswith("Unknown setting 'zzzzzz'. There are: sources, targets, swaps, drafter, run, seed")


def test_a_section_is_no_setting():
    refused = refusal({"publish": 3})
    assert refused.startswith("'publish' is a section, not a setting. Name one of its settings: enabled, ")


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("batch", 0, "must be greater than or equal to 1, got 0."),
        ("batch", "2", "must be a whole number, got '2'."),
        ("batch", True, "must be a whole number, got True."),
        ("batch", 1.5, "must be a whole number, got 1.5."),
        ("seed", -1, "must be greater than or equal to 0, got -1."),
        ("sampling.top_p", 0.0, "must be greater than 0, got 0.0."),
        ("sampling.top_p", 1.1, "must be less than or equal to 1, got 1.1."),
        ("sampling.temperature", float("inf"), "must be a finite number, got inf."),
        ("sampling.temperature", float("nan"), "must be a finite number, got nan."),
        ("draft.max_draft", 65, "must be less than or equal to 64, got 65."),
        ("draft.mode", "tree", "must be 'trie', 'coupled', 'match', 'tli' or 'paper', got 'tree'."),
        ("draft.costs", "x", "must be 'tracked' or 'estimated' or a number, got 'x'."),
        ("draft.stop", 2.0, "must be 'cost' or 'never' or less than or equal to 1, got 2.0."),
        ("learn.enabled", "no", "must be true or false, got 'no'."),
        ("draft.exploration", 1.0, "must be less than or equal to 0.5, got 1.0."),
        ("sources", [], "must have at least 1 entry, got []."),
        ("sources", "x.jsonl", "must be a list, got 'x.jsonl'."),
        ("targets", [], "must have at least 1 entry, got []."),
        ("run", 3, "must be a path, got 3."),
    ],
)
def test_a_value_that_does_not_fit_is_refused_in_one_sentence(key: str, value: object, rule: str):
    assert refusal({key: value}) == f"Setting '{key}' {rule}"


def test_all_errors_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping({"batch": 0, "draft": {"mod": "trie"}, "learn": 3, "source": {"where": ["a=b", 1]}})
    assert str(caught.value) == (
        "Setting 'batch' must be greater than or equal to 1, got 0. "
        "Setting 'source.where.1' must be text, got 1. "
        "Unknown setting 'draft.mod'. Did you mean 'draft.mode'? "
        "'learn' must be a section of settings, got 3."
    )


def test_a_file_gives_only_what_differs(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('batch = 8\nrun = "runs/a"\n[source]\nwhere = ["split=test"]\n[sampling]\ntemperature = 1\n')
    overrides = {"batch": 8, "run": "runs/a", "source.where": ["split=test"], "sampling.temperature": 1.0}
    assert load(path) == Config().with_overrides(overrides)
    assert load(path).run == Path("runs/a")


@given(
    text=st.text(min_size=1).filter(lambda text: not any("\ud800" <= character <= "\udfff" for character in text)),
    rate=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    limit=st.none() | st.integers(1, 2**60),
)
def test_what_is_written_reads_back_equal(tmp_path_factory, text: str, rate: float, limit: int | None):
    overrides = {"sources": [text, "-"], "source.template": text, "learn.rate": rate, "source.limit": limit, "run": "r"}
    config = Config().with_overrides(overrides)
    folder = tmp_path_factory.getbasetemp()
    for name, written in (
        ("config.toml", format_settings(config.flatten(), {}, changed=False)),
        ("config.json", config.to_json()),
    ):
        (folder / name).write_text(written, encoding="utf-8", newline="")
        assert load(folder / name) == config


def test_what_is_written_is_complete():
    def keys(values: dict[str, object]) -> set[str]:
        inner = {f"{section}.{name}" for section, held in values.items() if isinstance(held, dict) for name in held}
        return inner | {name for name, held in values.items() if not isinstance(held, dict)}

    assert keys(json.loads(Config().to_json())) == set(settings())
    unset = {key for key, field in settings().items() if field.default is None}
    assert keys(tomllib.loads(format_settings(Config().flatten(), {}, changed=False))) == set(settings()) - unset


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", b"batch = 0", r"^In '.*a\.toml': Setting 'batch' must be greater than or equal to 1, got 0\.$"),
        ("a.toml", b"[drafts]\nmode = 'trie'", "Unknown setting 'drafts'. Did you mean 'draft'"),
        ("a.toml", b"batch =", r"a\.toml' cannot be parsed: Invalid value"),
        ("a.toml", b"\xff", r"a\.toml' cannot be parsed: 'utf-8' codec"),
        ("a.json", b"{", r"a\.json' cannot be parsed: Expecting property name"),
        ("a.json", b"[]", "must hold an object of settings, got \\[\\]"),
        ("missing.toml", None, r"Cannot read .*missing\.toml': No such file or directory\."),
    ],
)
def test_the_error_names_a_file_that_cannot_be_used(tmp_path, name: str, content: bytes | None, message: str):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / name)


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


def test_a_loss_that_would_change_nothing_is_refused():
    said = "learn.loss = 'direct' needs learn.method = 'gradient': in closed form there is one loss"
    assert refusal({"learn.loss": "direct"}) == said
    for chosen in ({"learn.method": "gradient"}, {"learn.lora_rank": 4}):
        assert Config().with_overrides({"learn.loss": "direct", **chosen}).learn.loss == "direct"
