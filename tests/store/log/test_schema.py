import struct
from dataclasses import fields

import pyarrow as pa
import pytest
from synthetic_runs import bonus, decision, make_unjudged

from store.events import Outcome
from store.log.schema import (
    TABLES,
    parquet_options,
    schema_of,
    to_table,
)


@pytest.mark.parametrize("table", TABLES)
def test_the_columns_are_the_sequence_number_and_the_fields_of_the_event(table):
    assert schema_of(table).names == ["seq", *(field.name for field in fields(TABLES[table]))]


def test_a_column_may_be_null_only_where_its_field_may_be_none():
    decisions = schema_of("decisions")
    assert decisions.field("emitted_id").nullable
    assert not decisions.field("offset").nullable
    assert not decisions.field("pieces").type.value_field.nullable


def test_rows_are_read_back_unchanged_and_numbered_from_the_given_start():
    rows = to_table("decisions", 5, [decision(pieces=(1, 2), uniform=0.1), bonus()]).to_pylist()
    assert [row["seq"] for row in rows] == [5, 6]
    assert rows[0]["pieces"] == [1, 2]
    assert rows[0]["outcome"] == "accepted"
    assert rows[0]["uniform"] == pytest.approx(0.1, abs=1e-8)
    assert rows[0]["uniform"] != 0.1
    assert rows[1]["proposed_bytes"] is None


def float32(values):
    return pa.array(values, pa.float32()).to_pylist()


def test_only_values_that_decide_nothing_are_rounded_to_eight_bits():
    numbers = (0.1, 0.7, 1 / 3)
    fields = {"drafter_levels": numbers, "target_levels": numbers, "uniform": 0.1, "entropy": 1.1, "head_estimate": 0.9}
    judged, other = to_table(
        "decisions", 0, [decision(**fields), make_unjudged(**fields | {"uniform": None})]
    ).to_pylist()
    for row in (judged, other):
        assert row["entropy"] == pytest.approx(1.1, rel=2**-8)
        assert row["head_estimate"] == pytest.approx(0.9, rel=2**-8)
        assert all(lower_bits(row[name]) == 0 for name in ("entropy", "head_estimate"))
    assert judged["drafter_levels"] == judged["target_levels"] == float32(numbers)
    assert judged["uniform"] == float32([0.1])[0]
    assert other["drafter_levels"] == other["target_levels"] == pytest.approx(numbers, rel=2**-8)
    assert {lower_bits(value) for value in other["drafter_levels"]} == {0}
    assert all(lower_bits(value) for value in judged["drafter_levels"])


def test_the_levels_of_an_alternative_decide_and_are_not_rounded():
    fields = {"drafter_levels": (1.0,), "target_levels": (0.1,)}
    kept, rounded = to_table(
        "decisions", 0, [make_unjudged(outcome=Outcome.ALTERNATIVE, **fields), make_unjudged(**fields)]
    ).to_pylist()
    assert kept["target_levels"] == float32([0.1])
    assert rounded["target_levels"] == pytest.approx([0.1], rel=2**-8)
    assert lower_bits(rounded["target_levels"][0]) == 0


def lower_bits(value):
    return int.from_bytes(struct.pack("<f", value)[:2], "little")


def test_every_column_has_an_encoding_or_is_left_to_the_default_on_purpose():
    options = parquet_options("decisions")
    assert options["column_encoding"]["offset"] == "DELTA_BINARY_PACKED"
    assert options["column_encoding"]["target_levels.list.element"] == "BYTE_STREAM_SPLIT"
    assert "emitted_id" in options["use_dictionary"]
    assert not set(options["use_dictionary"]) & set(options["column_encoding"])
    assert "prompt_text" not in parquet_options("prompts")["use_dictionary"]
