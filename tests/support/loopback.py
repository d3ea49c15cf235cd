"""A Kafka broker on loopback for the tests."""

from collections.abc import Iterable


class LoopbackBroker:
    """The test broker of Kafka's client library, which implements the protocol over TCP.

    Topics are created by the first message, with four partitions each.
    """

    def __init__(self) -> None:
        from confluent_kafka import Producer

        self._producer = Producer({"test.mock.num.brokers": 1, "log_level": 0})
        (broker,) = self._producer.list_topics(timeout=10).brokers.values()
        self.address = f"{broker.host}:{broker.port}"

    def send(self, topic: str, values: Iterable[bytes | None], partition: int = 1) -> str:
        """Append messages to a partition and return the name of its source."""
        for value in values:
            self._producer.produce(topic, value=value, partition=partition)
        assert self._producer.flush(10) == 0, "messages were not taken"
        return f"kafka://{self.address}/{topic}?partition={partition}"
