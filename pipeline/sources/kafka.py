"""Rows of a Kafka topic, by any broker that speaks Kafka's protocol."""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl

from typing_extensions import override

from pipeline.sources.files import MAX_LINE_BYTES, TOO_LONG, json_object
from pipeline.sources.rows import PROMPT, Fault, Rows, SourceRow, import_extra, nearest
from store.errors import SourceError

SPEC = re.compile(r"kafka://(?P<brokers>[^/?]+)/(?P<topic>[\w.-]+)(?:\?(?P<options>.*))?", re.ASCII)
FORM = "kafka://HOST:PORT[,HOST:PORT]/TOPIC[?partition=N&follow=true&values=text]"
OPTIONS = {"partition": "[0-9]+", "follow": "true|false", "values": "json|text"}
SECONDS_TO_OPEN, SECONDS_OF_SILENCE = 10.0, 60.0  # without a response, after which a broker counts as unreachable
PREFETCH_KILOBYTES = 16_384


class KafkaRows(Rows):
    """Messages of one partition, from the oldest to the newest at the time when the source is opened.

    Messages have a fixed order only within a partition; each partition of a topic is a source of its own. A message is
    a JSON object, or with `values=text` a prompt. Its line is its offset in the partition plus one. With `follow=true`
    reading continues with new messages and never ends. Nothing is stored with the broker: a resumed run reads the
    partition from its oldest message again, so messages that were read must not be deleted. `spec` has the form `FORM`;
    a topic of one partition needs no number.
    """

    columns = None

    def __init__(self, spec: str) -> None:
        found = SPEC.fullmatch(spec)
        if not found:
            raise SourceError(f"A Kafka source must be '{FORM}', got '{spec}'.")
        self._spec, self._brokers, self.dataset = spec, found["brokers"], found["topic"]
        options = _parse_options(spec, found["options"] or "")
        self._as_text = options.get("values") == "text"
        self._follow = options.get("follow") == "true"
        with self._consumer() as consumer:
            self._partition = self._choose_partition(consumer, options.get("partition"))
            self._begin, self._end = consumer.get_watermark_offsets(
                self._make_topic_partition(), timeout=SECONDS_TO_OPEN
            )

    @override
    def count(self) -> int | None:
        """Return an upper bound of the number of rows: deleted messages leave gaps."""
        return None if self._follow else self._end - self._begin

    @override
    def read(self, columns: Collection[str]) -> Iterator[SourceRow]:
        done = self._begin
        with self._consumer() as consumer:
            consumer.assign([self._make_topic_partition(done)])
            while self._follow or done < self._end:
                message = self._poll_next(consumer)
                if message is None:
                    return
                done = message.offset() + 1
                if self._follow or done <= self._end:
                    yield SourceRow(done, self._parse_value(message.value()))

    def _poll_next(self, consumer: Any) -> Any:
        """Return the next message; None at the end of a partition that is not followed."""
        from confluent_kafka import KafkaError

        waited = 0.0
        while self._follow or waited < SECONDS_OF_SILENCE:
            message = consumer.poll(1.0)  # seconds; short, so that a signal is handled
            if message is None:
                waited += 1.0
                continue
            error = message.error()
            if error is None:
                return message
            if error.code() != KafkaError._PARTITION_EOF:
                raise SourceError(f"The source '{self._spec}' broke off: {error.str()}.")
            if not self._follow:
                return None
        raise SourceError(f"The source '{self._spec}' broke off: its broker was silent for {waited:.0f} seconds.")

    def _parse_value(self, value: bytes | None) -> dict[str, object] | Fault:
        if value is None:
            return Fault("the message must hold a value, got none")
        if len(value) > MAX_LINE_BYTES:
            return TOO_LONG
        if not self._as_text:
            return json_object(value, "utf-8")
        try:
            return {PROMPT: value.decode()}
        except UnicodeDecodeError as error:
            return Fault(f"the message must be valid UTF-8: {error.reason} at byte {error.start}")

    def _make_topic_partition(self, offset: int = 0) -> Any:
        from confluent_kafka import TopicPartition

        return TopicPartition(self.dataset, self._partition, offset)

    def _choose_partition(self, consumer: Any, wanted: str | None) -> int:
        topic = consumer.list_topics(self.dataset, timeout=SECONDS_TO_OPEN).topics[self.dataset]
        if topic.error is not None:
            raise SourceError(f"The source '{self._spec}' must be a topic of the broker, but: {topic.error.str()}.")
        numbers = sorted(topic.partitions)
        if wanted is None and len(numbers) == 1:
            return int(numbers[0])
        if wanted is None or int(wanted) not in numbers:
            got = "none" if wanted is None else wanted
            raise SourceError(
                f"The source '{self._spec}' must name one of the topic's partitions {numbers[0]} to {numbers[-1]} with "
                f"'?partition=N', got {got}. For several, name as many sources: messages have an order in each alone."
            )
        return int(wanted)

    @contextmanager
    def _consumer(self) -> Iterator[Any]:
        kafka = import_extra("confluent_kafka", "kafka", self._spec)
        try:
            consumer = kafka.Consumer({"bootstrap.servers": self._brokers} | SETTINGS)
            try:
                yield consumer
            finally:
                consumer.close()
        except kafka.KafkaException as error:
            raise SourceError(
                f"The source '{self._spec}' cannot be read: {error.args[0].str()}. Is it running?"
            ) from error


SETTINGS = {
    "group.id": "omnidraft",  # must be given, and is not used: nothing is stored with the broker
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",  # rather than skip deleted messages
    "queued.max.messages.kbytes": PREFETCH_KILOBYTES,
    "log_level": 0,  # failures are reported by our own errors
}


def _parse_options(spec: str, text: str) -> dict[str, str]:
    try:
        options = dict(parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text)))
    except ValueError as error:
        raise SourceError(f"A Kafka source must be '{FORM}', got '{spec}': {error}.") from None
    for name, value in options.items():
        if name not in OPTIONS:
            hint = nearest(name, OPTIONS)
            raise SourceError(f"An option of a Kafka source must be one of {', '.join(OPTIONS)}, got '{name}'.{hint}")
        if not re.fullmatch(OPTIONS[name], value, re.ASCII):
            raise SourceError(f"The option '{name}' of '{spec}' must be {OPTIONS[name]}, got '{value}'.")
    return options
