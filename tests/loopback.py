"""Servers of other people's protocols, on loopback and for as long as the tests run."""

from collections.abc import Iterable


class LoopbackBroker:
    """The broker that comes with Kafka's client library for tests: it speaks the protocol over TCP.

    Topics are made as they are written to, with four partitions each.
    """

    def __init__(self) -> None:
        from confluent_kafka import Producer

        self._producer = Producer({"test.mock.num.brokers": 1, "log_level": 0})
        (broker,) = self._producer.list_topics(timeout=10).brokers.values()
        self.address = f"{broker.host}:{broker.port}"

    def send(self, topic: str, values: Iterable[bytes | None], partition: int = 1) -> str:
        """Append messages to a partition, and return what a source of it is called."""
        for value in values:
            self._producer.produce(topic, value=value, partition=partition)
        assert self._producer.flush(10) == 0, "messages were not taken"
        return f"kafka://{self.address}/{topic}?partition={partition}"
