"""Several machines: the actors of a run on Ray. The only file that imports ray.

What is local and what is distributed differ in construction alone: an actor is a `DecodeWorker` (scale_worker.py) or a
`Learner` (scale_learner.py), whose methods know nothing of Ray.
"""

import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of what was on its way to somebody who is gone

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from pipeline.scale_messages import DeadError, GoneError, Ref
from store.errors import RunError

LOCAL = "local"  # a Ray of our own on this machine
ANSWER_SECONDS = 5.0  # that a cluster has to accept a connection


@contextmanager
def connected(address: str) -> Iterator[None]:
    """In touch with a Ray cluster.

    Args:
        address: `local` for one that lives as long as this run, `auto` for that of this machine, HOST:PORT of another.

    Raises:
        RunError: nobody answers.
    """
    where: dict[str, Any] = {"address": address}
    if address == LOCAL:
        where |= {"num_cpus": 1, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdigit():  # Ray itself would go on asking for minutes
            socket.create_connection((host, int(port)), ANSWER_SECONDS).close()
        ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        raise RunError(f"a Ray cluster must answer at {address!r}, but: {error}; see `ray status`") from error
    try:
        yield
    finally:
        ray.shutdown()


def gpu_share(workers: int) -> float:
    """Of a GPU for each of so many workers and a learner; 0 in a cluster without."""
    return float(min(1.0, ray.cluster_resources().get("GPU", 0.0) / (workers + 1)))


class RayActors:
    """See `Actors`. Used while `connected`."""

    def start(self, kind: type, options: Mapping[str, float], *arguments: Any) -> Any:
        """See `Actors`. One that dies stays dead."""
        return ray.remote(kind).options(**options, max_restarts=0).remote(*arguments)

    def call(self, actor: Any, method: str, *arguments: Any, returns: int = 1, **named: Any) -> Sequence[Ref]:
        """See `Actors`."""
        refs = getattr(actor, method).options(num_returns=returns).remote(*arguments, **named)
        return refs if returns > 1 else [refs]

    def wait(self, refs: Sequence[Ref], seconds: float) -> Sequence[Ref]:
        """See `Actors`."""
        ray.wait(list(refs), timeout=seconds)
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        return ready

    def get(self, ref: Ref) -> Any:
        """See `Actors`."""
        try:
            return ray.get(ref)
        except RayTaskError as error:
            if isinstance(error.cause, RayError):  # what it was given went with a machine
                raise GoneError(_first_line(error.cause)) from error
            raise error.cause from error
        except RayActorError as error:
            raise DeadError(_first_line(error)) from error
        except RayError as error:
            raise GoneError(_first_line(error)) from error

    def kill(self, actor: Any) -> None:
        """See `Actors`."""
        ray.kill(actor)


def _first_line(error: RayError) -> str:
    return str(error).strip().partition("\n")[0]
