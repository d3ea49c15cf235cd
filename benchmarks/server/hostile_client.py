"""Measure how much one client that sends long prompts, all of which are refused, delays the short prompts of others.

    python benchmarks/server/hostile_client.py --target smollm2-135m

A server is started with the real models. Rounds without and with the hostile client alternate. It sends its bodies one
after the other over one connection, as fast as they are answered. Nothing else should run on the machine.
"""

import argparse
import http.client
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

PROGRAM = "from pipeline.cli.app import main; main()"
HEADERS = {"Content-Type": "application/json"}
SIZE = 900_000  # characters
NEW_TOKENS = 8


@contextmanager
def start_server(options: Sequence[str]) -> Iterator[str]:
    """Run a server; yields its host and port."""
    with tempfile.TemporaryDirectory() as folder:
        error = Path(folder, "err")
        arguments = [*options, "--port", "0", "--no-publish", "--run", f"{folder}/run"]
        with error.open("wb") as err:
            process = subprocess.Popen([sys.executable, "-c", PROGRAM, "serve", *arguments], stderr=err)
        try:
            while "serving " not in (text := error.read_text()):
                assert process.poll() is None, text
                time.sleep(0.1)
            yield urlsplit(text.partition(" on ")[2].split()[0]).netloc
        finally:
            process.terminate()
            process.wait()


def post(connection: http.client.HTTPConnection, model: str, prompt: str) -> tuple[int, bytes]:
    """Send a completion request over a connection that stays open."""
    body = {"model": model, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), HEADERS)
    answer = connection.getresponse()
    return answer.status, answer.read()


def read_model(place: str) -> str:
    """Return the name of the served model."""
    connection = http.client.HTTPConnection(place)
    connection.request("GET", "/v1/models")
    return str(json.load(connection.getresponse())["data"][0]["id"])


def find_longest(place: str, model: str) -> int:
    """Return the largest number of characters that is not refused before tokenisation, by bisection."""
    connection, low, high = http.client.HTTPConnection(place), 1, SIZE
    while high - low > 1000:
        middle = (low + high) // 2
        _, answer = post(connection, model, "a" * middle)
        low, high = (low, middle) if b"or more" in answer else (middle, high)
    return low


class HostileClient:
    """Sends long prompts while it is switched on, and counts the answers by their status."""

    def __init__(self, place: str, model: str, prompts: Sequence[str]) -> None:
        self._place, self._model, self._prompts = place, model, prompts
        self._on, self._end = threading.Event(), threading.Event()
        self.answers: Counter[int] = Counter()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def switch(self, on: bool) -> None:
        """Begin or end sending."""
        (self._on.set if on else self._on.clear)()

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._on.set()
        self._thread.join()

    def _run(self) -> None:
        connection = http.client.HTTPConnection(self._place)
        for prompt in itertools.cycle(self._prompts):
            self._on.wait()
            if self._end.is_set():
                return
            self.answers[post(connection, self._model, prompt)[0]] += 1


def time_short_prompts(place: str, model: str, numbers: Iterator[int], count: int) -> list[float]:
    """Return the seconds of each of `count` short requests, one after the other."""
    connection, found = http.client.HTTPConnection(place), []
    for number in itertools.islice(numbers, count):
        began = time.perf_counter()
        status, answer = post(connection, model, f"Question {number}: what is {7 * number} plus {number}? Answer:")
        assert status == 200, answer
        found.append(time.perf_counter() - began)
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is not exceeded by this share of the values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    """Measure each kind of hostile prompt and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", help="Target model, as for `omnidraft serve`.")
    parser.add_argument("--rounds", type=int, default=4, help="Rounds without and with the client, for each kind.")
    parser.add_argument("--prompts", type=int, default=50, help="Short prompts per round.")
    parser.add_argument("--kinds", default="letters,spaces,words,longest", help="Kinds of hostile prompts.")
    chosen = parser.parse_args()
    with start_server(["--target", chosen.target]) as place:
        model = read_model(place)
        numbers = itertools.count()
        time_short_prompts(place, model, numbers, 10)
        kinds = {"letters": "a" * SIZE, "spaces": " " * SIZE, "words": "def add return for " * (SIZE // 19)}
        if "longest" in chosen.kinds:
            kinds["longest"] = "a" * find_longest(place, model)
        print("prompts         n  median   p99  worst (ms)   refused per second")
        for kind in chosen.kinds.split(","):
            measure_kind(place, model, numbers, kind, kinds[kind], chosen.rounds, chosen.prompts)


def measure_kind(
    place: str, model: str, numbers: Iterator[int], kind: str, prompt: str, rounds: int, count: int
) -> None:
    """Alternate rounds without and with the hostile client and print both lines."""
    client = HostileClient(place, model, [prompt])
    found: dict[bool, list[float]] = {False: [], True: []}
    seconds = 0.0
    for _ in range(rounds):
        for hostile in (False, True):
            client.switch(hostile)
            began = time.perf_counter()
            found[hostile] += time_short_prompts(place, model, numbers, count)
            seconds += hostile * (time.perf_counter() - began)
            client.switch(False)
    client.close()
    for hostile, times in found.items():
        milliseconds = [1000 * value for value in (median(times), percentile(times, 0.99), max(times))]
        name = f"with {kind}" if hostile else "alone"
        rate = f"{sum(client.answers.values()) / seconds:8.1f} {dict(client.answers)}" if hostile else ""
        print(
            f"{name:12} {len(times):4} {milliseconds[0]:7.0f} {milliseconds[1]:5.0f} {milliseconds[2]:6.0f}   {rate}",
            flush=True,
        )


if __name__ == "__main__":
    main()
