"""The actors of a run on Ray, on one or several machines. The only module of this package that imports ray.

Local and distributed runs differ in construction alone: an actor is a `DecodeWorker` (worker.py) or a
`LearnerActor` (learner.py), whose methods do not depend on Ray.
"""

import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # in pending calls to a lost actor

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from pipeline.cluster.worker_pool import DeadError, GoneError, Ref
from store.errors import RunError

LOCAL = "local"  # a Ray cluster on this machine that is started for the run
CONNECT_SECONDS = 5.0  # timeout of a connection to the cluster


@contextmanager
def connect_to_ray(address: str) -> Iterator[None]:
    """Connect to a Ray cluster while the block runs. Its address is `local` for one that runs as long as this run,
    `auto` for that of this machine, HOST:PORT of another.
    """
    where: dict[str, Any] = {"address": address}
    if address == LOCAL:
        where |= {"num_cpus": 1, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdigit():  # Ray itself would retry for minutes
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        raise RunError(f"a Ray cluster must be reachable at {address!r}, but: {error}; see `ray status`") from error
    try:
        yield
    finally:
        ray.shutdown()


def gpu_share(workers: int) -> float:
    """Return the share of a GPU for each of `workers` workers and a learner; 0 in a cluster without GPUs."""
    return float(min(1.0, ray.cluster_resources().get("GPU", 0.0) / (workers + 1)))


class RayActors:
    """Objects in processes of their own, on any machine of the Ray cluster that this process is connected to.

    The methods return at once, except `wait` and `get`.
    """

    def start(self, kind: type, options: Mapping[str, float], *arguments: Any) -> object:
        """Create an actor, which starts when a machine has these resources. Ray does not restart it when it dies."""
        return ray.remote(kind).options(**options, max_restarts=0).remote(*arguments)

    def call(self, actor: Any, method: str, *arguments: Any, returns: int = 1, **named: Any) -> Sequence[Ref]:
        """Queue a method call. Arguments may be references to results of pending calls."""
        refs = getattr(actor, method).options(num_returns=returns).remote(*arguments, **named)
        return refs if returns > 1 else [refs]

    def wait(self, refs: Sequence[Any], seconds: float) -> Sequence[Ref]:
        """Return the references whose objects are on this machine; waits at most `seconds` for the first of them."""
        ray.wait(list(refs), timeout=seconds)
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        return ready

    def get(self, ref: Any) -> Any:
        """Return the object of a reference. Raises the error of the method, `DeadError` or `GoneError`."""
        try:
            return ray.get(ref)
        except RayTaskError as error:
            if isinstance(error.cause, RayError):  # an argument was lost with a machine
                raise GoneError(_first_line(error.cause)) from error
            raise error.cause from error
        except RayActorError as error:
            raise DeadError(_first_line(error)) from error
        except RayError as error:
            raise GoneError(_first_line(error)) from error

    def kill(self, actor: Any) -> None:
        ray.kill(actor)


def _first_line(error: RayError) -> str:
    return str(error).strip().partition("\n")[0]
