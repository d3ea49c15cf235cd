"""Prompts from Kafka: one partition in order, to its end or beyond, from a broker on loopback."""

import sys

import pytest
from loopback import LoopbackBroker
from source_reading import PLAIN, list_rejections, list_texts, read

from pipeline.sources import kafka as source_kafka
from pipeline.sources.stream import open_source, open_sources, stream
from store.errors import SourceError
from store.events import PromptReceived

pytest.importorskip("confluent_kafka", reason="needs the extra 'kafka'")


@pytest.fixture
def topic(request) -> str:
    """Return a topic for this test alone."""
    return "".join(letter if letter.isalnum() else "-" for letter in request.node.name)


def test_a_source_ends_where_the_partition_did_when_it_was_opened(kafka_broker, topic):
    spec = kafka_broker.send(topic, [b'{"prompt": "a", "id": "first"}', b'{"prompt": "b"}'])
    source = open_source(spec, PLAIN)
    kafka_broker.send(topic, [b'{"prompt": "later"}'])
    assert source.size() == 2
    assert list(source.read(5)) == [
        PromptReceived(5, "first", topic, 1, "a"),
        PromptReceived(6, f"{topic}:2", topic, 2, "b"),
    ]


def test_with_follow_it_waits_for_more(kafka_broker, topic):
    source = open_source(kafka_broker.send(topic, [b'{"prompt": "a"}']) + "&follow=true", PLAIN)
    assert source.size() is None
    events = source.read(0)
    assert next(events).text == "a"
    kafka_broker.send(topic, [b'{"prompt": "later"}'])
    assert next(events).text == "later"


def test_partitions_are_sources_that_follow_each_other(kafka_broker, topic):
    specs = [kafka_broker.send(topic, [f'{{"prompt": "{n}{m}"}}'.encode() for m in "ab"], n) for n in (2, 0)]
    events = list(stream(open_sources(specs, PLAIN)))
    assert list_texts(events) == ["2a", "2b", "0a", "0b"]
    assert [event.offset for event in events] == [0, 1, 2, 3]


def test_messages_that_are_no_prompts_are_rejected_by_their_place(kafka_broker, topic, monkeypatch):
    monkeypatch.setattr(source_kafka, "MAX_LINE_BYTES", 30)
    events = read(kafka_broker.send(topic, [b"{", None, b'"\xff"', b"[]", b"x" * 31, b"", b'{"prompt": "good"}']))
    assert list_texts(events) == ["good"]
    assert [line for line, _ in list_rejections(events)] == [1, 2, 3, 4, 5, 6]
    for (_, reason), expected in zip(
        list_rejections(events),
        ["must be JSON", "must hold a value", "valid UTF-8", "JSON object, got a JSON array", "longer than", "be JSON"],
        strict=True,
    ):
        assert expected in reason


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("kafka://", "must be 'kafka://HOST:PORT"),
        ("kafka://host/", "must be 'kafka://HOST:PORT"),
        ("kafka://host/a/b", "must be 'kafka://HOST:PORT"),
        ("kafka://host/a?partition", "must be 'kafka://HOST:PORT"),
        ("kafka://host/a?folow=true", "one of partition, follow, values, got 'folow'. Did you mean 'follow'?"),
        ("kafka://host/a?follow=yes", "the option 'follow' .* must be true|false, got 'yes'"),
        ("kafka://host/a?partition=-1", "must be .*, got '-1'"),
        ("kafka://BROKER/TOPIC", "must name one of the topic's partitions 0 to 3 with '.partition=N', got none"),
        ("kafka://BROKER/TOPIC?partition=4", "partitions 0 to 3 .*, got 4"),
        ("kafka://BROKER/other", "must be a topic of the broker, but: .*Unknown topic"),
    ],
)
def test_an_unreadable_source_is_refused_when_it_is_opened(kafka_broker, topic, spec, reason):
    kafka_broker.send(topic, [b"{}"])
    with pytest.raises(SourceError, match=rf"(?i){reason}"):
        open_source(spec.replace("BROKER", kafka_broker.address).replace("TOPIC", topic), PLAIN)


def test_a_broker_that_goes_away_ends_the_source_with_an_error(topic, monkeypatch):
    monkeypatch.setattr(source_kafka, "SECONDS_OF_SILENCE", 1.0)
    broker = LoopbackBroker()
    source = open_source(broker.send(topic, [b'{"prompt": "a"}']), PLAIN)
    del broker
    with pytest.raises(SourceError, match="broke off: its broker was silent for 1 seconds"):
        list(source.read(0))


def test_without_the_client_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(SourceError, match=r"needs the optional extra 'kafka'\. Try: pip install 'omnidraft\[kafka\]'"):
        open_source("kafka://host:9092/topic", PLAIN)
