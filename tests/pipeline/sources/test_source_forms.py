"""The forms in which people have prompts: conversations, compressed files, folders, files of other programs."""

import gzip
import json
from datetime import UTC, datetime
from pathlib import Path

import pandas
import pyarrow
import pytest
from pyarrow import ipc, parquet
from source_reading import GOOD, list_rejections, list_texts, read, write_file

from pipeline.sources.conversations import from_text
from store.errors import SourceError

USER, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
AGAIN, SYSTEM = {"role": "user", "content": "3 + 3?"}, {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def read_row(folder: Path, row: dict[str, object], **settings: object) -> list[object]:
    """Return the conversations, or else the texts, that are read from one row."""
    events = read(write_file(folder / "x.jsonl", json.dumps(row).encode()), **settings)
    assert not list_rejections(events)
    return [from_text(text) or text for text in list_texts(events)]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [SYSTEM, USER, ANSWER, AGAIN, {"role": "assistant", "content": "6"}]},
        {"prompt": [SYSTEM, USER, ANSWER, AGAIN], "completion": [ANSWER]},  # preferences of TRL
        {
            "system": "Be brief.",  # ShareGPT's form, as LLaMA-Factory reads it
            "conversations": [
                {"from": "human", "value": "2 + 2?"},
                {"from": "gpt", "value": "4"},
                {"from": "human", "value": "3 + 3?"},
                {"from": "gpt", "value": "6"},
            ],
        },
        {
            "custom_id": "1",  # a line of a batch for OpenAI's API
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "m",
                "messages": [SYSTEM, USER, ANSWER, {**AGAIN, "content": [{"type": "text", "text": "3 + 3?"}]}],
            },
        },
        {"text": json.dumps([SYSTEM, USER, ANSWER, AGAIN])},
        {"text": str([SYSTEM, USER, ANSWER, AGAIN])},  # as pandas writes it into a cell
        {"chosen": [SYSTEM, USER, ANSWER, AGAIN, ANSWER], "rejected": [SYSTEM, USER, ANSWER, AGAIN, USER]},
        {"input": {"messages": [SYSTEM, USER, ANSWER, AGAIN]}, "preferred_output": [ANSWER]},  # of OpenAI
        {"body": {"instructions": "Be brief.", "input": [USER, {"type": "reasoning"}, ANSWER, AGAIN]}},
        {
            "instruction": "3 + 3?",  # Alpaca's form, as LLaMA-Factory reads it
            "input": "",
            "output": "6",
            "system": "Be brief.",
            "history": [["2 + 2?", "4"]],
        },
    ],
)
def test_a_conversation_is_read_up_to_its_last_question(tmp_path, row: dict[str, object]):
    assert read_row(tmp_path, row) == [([SYSTEM, USER, ANSWER, AGAIN], [])]


def test_every_turn_of_a_conversation_may_be_answered(tmp_path):
    row = {"id": "a", "messages": [USER, ANSWER, AGAIN, ANSWER]}
    assert read_row(tmp_path, row, turns="all") == [([USER], []), ([USER, ANSWER, AGAIN], [])]
    events = read(tmp_path / "x.jsonl", turns="all")
    assert [(event.offset, event.prompt_id) for event in events] == [(0, "a#1"), (1, "a#2")]
    assert len(read(tmp_path / "x.jsonl", turns="all", limit=1)) == 1


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [{**TOOL, "name": None}], [TOOL["function"]]])
@pytest.mark.parametrize("arguments", ['{"a": 2}', {"a": 2}, {"a": 2, "city": None}])
def test_calls_and_tools_of_a_conversation_are_kept(tmp_path, tools: object, arguments: object):
    function = {"name": "add", "arguments": arguments}
    result = {"role": "tool", "content": "4"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    by_name = {"from": "function_call", "value": json.dumps(function)}
    for one in (call, by_name):
        [(messages, found)] = read_row(tmp_path, {"messages": [USER, one, result], "tools": tools})
        function_read = {"name": "add", "arguments": {"a": 2}}
        tool_calls = [{"type": "function", "function": function_read}]
        assert messages == [USER, {"role": "assistant", "content": "", "tool_calls": tool_calls}, result]
        assert found == [TOOL]


def test_calls_among_the_items_of_a_response_are_kept(tmp_path):
    call = {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"a": 2}'}
    items = [USER, call, {**call, "call_id": "2"}, {"type": "function_call_output", "call_id": "1", "output": "4"}]
    [(messages, tools)] = read_row(tmp_path, {"body": {"input": items, "tools": [{"type": "function", "name": "f"}]}})
    assert [one["id"] for one in messages[1]["tool_calls"]] == ["1", "2"]
    assert messages[2] == {"role": "tool", "tool_call_id": "1", "content": "4"}
    assert tools == [{"type": "function", "function": {"name": "f"}}]


def test_a_request_may_hold_a_text_or_several(tmp_path):
    assert read_row(tmp_path, {"body": {"input": "One"}}) == read_row(tmp_path, {"input": "One"}) == ["One"]
    assert read_row(tmp_path, {"custom_id": "r", "body": {"prompt": ["One", "Two"]}}) == ["One", "Two"]
    assert [event.prompt_id for event in read(tmp_path / "x.jsonl")] == ["r#1", "r#2"]


def test_a_table_s_values_in_calls_are_kept_as_text(tmp_path):
    call = {"function": {"name": "add", "arguments": {"day": datetime(2026, 1, 2, tzinfo=UTC)}}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "4"}]
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": messages}]), tmp_path / "x.parquet")
    [text] = list_texts(read(tmp_path / "x.parquet"))
    assert "2026-01-02" in text


def test_an_instruction_has_its_input_and_system_text(tmp_path):
    assert read_row(tmp_path, {"instruction": "Add.", "input": "2, 2", "output": "4"}) == ["Add.\n2, 2"]
    assert read_row(tmp_path, {"instruction": "Add.", "input": ""}) == ["Add."]
    assert read_row(tmp_path, {"instruction": "Add.", "input": "2"}, prompt_field="instruction") == ["Add."]
    [(messages, _)] = read_row(tmp_path, {"instruction": "2 + 2?", "input": "", "system": "Be brief."})
    assert messages == [SYSTEM, USER]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "a conversation must be a list of messages"),
        ({"messages": [{"content": "x"}]}, "message 1 must have a 'role' (system, developer, user, assistant, tool)"),
        ({"messages": [USER, {"role": "narrator", "content": "x"}]}, "message 2 must have a 'role'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "message 1 must have a 'content' of text",
        ),
        ({"messages": "text"}, "the prompt in 'messages' must be messages, got 'text'"),
        ({"text": "[{'role': 'user', 'content': array(['a'])}]"}, "the conversation must be JSON; write the data as"),
        ({"text": "[{'role': 'user', 'content': 'cut"}, "the conversation must be JSON; write the data as JSON lines"),
        ({"body": {"input": [USER, {"type": "item_reference"}]}}, "item 2 must be a message, a function_call or"),
        ({"body": {"input": [{**USER, "content": [{"type": "input_image"}]}]}}, "item 1 must have as content a text"),
        ({"messages": [USER], "tools": ["f"]}, "a function must be an object"),
        ({"instruction": "x", "history": [["2 + 2?", 4]]}, "message 2 must have a 'content' of text"),
        ({"messages": [ANSWER]}, "the conversation in 'messages' must have a message of the user"),
        ({"messages": [USER], "tools": {"a": 1}}, "the tools must be a list"),
        ({"messages": [USER], "tools": "["}, "Expecting value"),
        ({"messages": [USER], "tools": "[" * 200_000}, "maximum recursion depth"),
        ({"messages": [{"role": "user", "content": "a\0b"}]}, "message 1 must not contain NUL characters"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "the prompt must be valid Unicode"),
    ],
)
def test_a_conversation_that_cannot_be_read_is_rejected_with_its_message(tmp_path, row: dict[str, object], reason: str):
    events = read(write_file(tmp_path / "x.jsonl", json.dumps(row).encode()))
    [(_, got)] = list_rejections(events)
    assert got.startswith(reason)


def test_a_template_takes_no_conversation(tmp_path):
    path = write_file(tmp_path / "x.jsonl", json.dumps({"messages": [USER]}).encode())
    [(_, reason)] = list_rejections(read(path, template="Q: {prompt}"))
    assert reason == "the prompt must be text where a template is given, got a conversation"


def write_forms(folder: Path) -> None:
    """Write one table of two rows as other programs do."""
    table = pandas.DataFrame({"prompt": ["one", "two"], "n": [1, 2]})
    table.to_json(folder / "array.json", orient="records")
    for form in ("columns", "index", "split", "table"):
        table.to_json(folder / f"{form}.json", orient=form)
    table.to_json(folder / "one-value.json", orient="records", indent=2)
    table.to_json(folder / "lines.json", orient="records", lines=True)
    table.to_feather(folder / "table.feather")
    table.to_csv(folder / "comma.csv.bz2", index=False)
    table.to_json(folder / "lines.jsonl.gz", orient="records", lines=True)
    table.to_csv(folder / "comma.csv.gz", index=False)
    table.to_csv(folder / "semicolon.csv", index=False, sep=";", encoding="utf-8-sig")
    table.to_csv(folder / "tabs.tsv", index=False, sep="\t")
    arrow = pyarrow.Table.from_pandas(table)
    with pyarrow.CompressedOutputStream(str(folder / "lines.jsonl.zst"), "zstd") as file:
        file.write(table.to_json(orient="records", lines=True).encode())
    with ipc.new_stream(str(folder / "stream.arrow"), arrow.schema) as stream:  # as a saved data set has it
        stream.write_table(arrow, max_chunksize=1)
    with ipc.new_file(str(folder / "file.arrow"), arrow.schema) as file:
        file.write_table(arrow)
    for kind in (pyarrow.large_string(), pyarrow.string_view(), pyarrow.dictionary(pyarrow.int8(), pyarrow.string())):
        column = arrow["prompt"].cast(pyarrow.string()).combine_chunks()
        column = column.dictionary_encode() if pyarrow.types.is_dictionary(kind) else column.cast(kind)
        parquet.write_table(pyarrow.table({"prompt": column}), folder / f"{str(kind).partition('<')[0]}.parquet")


def test_files_of_other_programs_are_read(tmp_path):
    write_forms(tmp_path)
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 19
    for path in paths:
        assert list_texts(read(path)) == ["one", "two"], path.name
    assert read(tmp_path / "lines.jsonl.gz")[0].dataset == "lines"


def test_conversations_in_cells_are_read_as_such(tmp_path):
    rows = [[SYSTEM, {"role": "user", "content": "It's \n {'2'} + 2?"}], [USER, ANSWER, AGAIN]]
    table = pandas.DataFrame({"messages": rows})
    table.to_parquet(tmp_path / "x.parquet")
    table.to_csv(tmp_path / "lists.csv")
    pandas.read_parquet(tmp_path / "x.parquet").to_csv(tmp_path / "arrays.csv")  # without commas
    for name in ("x.parquet", "lists.csv", "arrays.csv"):
        assert [from_text(text) for text in list_texts(read(tmp_path / name))] == [(row, []) for row in rows], name


def test_one_object_in_a_file_is_one_row(tmp_path):
    for indent in (None, 2):
        write_file(tmp_path / "x.json", json.dumps({"messages": [USER]}, indent=indent).encode())
        assert list_texts(read(tmp_path / "x.json")) == [json.dumps([USER])]


def test_what_a_library_has_computed_from_a_saved_data_set_is_left_out(tmp_path):
    for name in ("data-00000-of-00001", "cache-9fb042a1629c823b"):
        pandas.DataFrame({"prompt": [name]}).to_feather(tmp_path / f"{name}.arrow")
    assert len(list_texts(read(tmp_path))) == 2
    write_file(tmp_path / "state.json", b"{}")
    assert list_texts(read(tmp_path)) == ["data-00000-of-00001"]


def test_a_folder_and_a_pattern_are_read_by_path_without_hidden_files(tmp_path):
    names = ["b.jsonl", "a/c.jsonl.gz", ".hidden.jsonl", ".cache/d.jsonl", "dataset_info.json"]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        content = json.dumps({"prompt": name}).encode() + b"\nbad\n"
        path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    events = read(tmp_path)
    assert list_texts(events) == ["a/c.jsonl.gz", "b.jsonl"]
    assert [event.line for event in events] == [1, 2, 3, 4]
    assert events[0].dataset == tmp_path.name
    [first, _] = list_rejections(events)
    assert first[1].startswith(f"{tmp_path / 'a/c.jsonl.gz'}:2: the line must be JSON")
    assert list_texts(read(f"{tmp_path}/*.jsonl")) == ["b.jsonl"]
    assert list_texts(read(f"{tmp_path}/**/*.gz")) == ["a/c.jsonl.gz"]


def test_joined_files_may_have_marks_and_headers_inside(tmp_path):
    mark = b"\xef\xbb\xbf"
    table = mark + b"prompt,n\nx,1\n"
    events = read(write_file(tmp_path / "x.csv", table + table))
    assert list_texts(events) == ["x", "x"]
    assert list_rejections(events) == [(3, "the row must not repeat the header, as those of joined files do")]
    assert list_texts(read(write_file(tmp_path / "x.jsonl", (mark + GOOD) * 2))) == ["good", "good"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.json", b"[1, 2", "must be a JSON array, but cannot be read as one: .*jq -c '.\\[\\]'"),
        ("x.arrow", b"no arrow", "must be an Arrow file, but is none"),
        ("x.jsonl.gz", b"no gzip", "must be a readable file"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path, name: str, content: bytes, reason: str):
    with pytest.raises(SourceError, match=reason):
        read(write_file(tmp_path / name, content))


def test_two_columns_of_one_name_are_refused(tmp_path):
    column = pyarrow.array(["x"])
    parquet.write_table(pyarrow.Table.from_arrays([column, column], names=["prompt", "prompt"]), tmp_path / "x.parquet")
    with pytest.raises(SourceError, match="must have columns of different names, got two of the name 'prompt'"):
        read(tmp_path / "x.parquet")
