"""A client cannot fill the log of a server with warnings about its requests."""

import logging

from store.log_records import RepeatedWarnings, limit_warnings


def pass_record(warnings: RepeatedWarnings, message: str, level: int = logging.WARNING) -> str | None:
    """Pass a message through a filter. Returns the text that is written, or None."""
    record = logging.LogRecord("server", level, "", 0, message, (), None)
    return record.getMessage() if warnings.filter(record) else None


def test_a_warning_passes_once_per_interval_and_is_counted():
    seconds = [0.0]
    warnings = RepeatedWarnings(60, lambda: seconds[0])
    assert [pass_record(warnings, "no HTTP") for _ in range(4)] == ["no HTTP", None, None, None]
    assert pass_record(warnings, "no upgrade") == "no upgrade", "a different message is written"
    seconds[0] = 59.0
    assert pass_record(warnings, "no HTTP") is None
    seconds[0] = 60.0
    assert pass_record(warnings, "no HTTP") == "no HTTP (4 more like it were not shown)"
    assert pass_record(warnings, "no HTTP") is None
    seconds[0] = 120.0
    assert pass_record(warnings, "no HTTP") == "no HTTP (1 more like it were not shown)"


def test_errors_always_pass():
    warnings = RepeatedWarnings(60, lambda: 0.0)
    assert [pass_record(warnings, "broken", logging.ERROR) for _ in range(3)] == ["broken"] * 3


def test_many_different_warnings_use_bounded_memory():
    warnings = RepeatedWarnings(60, lambda: 0.0)
    for number in range(1000):
        pass_record(warnings, f"warning {number}")
    assert len(warnings._seen) <= 100


def test_a_logger_has_one_filter():
    for _ in range(3):
        limit_warnings("omnidraft.test-of-filters")
    assert len(logging.getLogger("omnidraft.test-of-filters").filters) == 1
