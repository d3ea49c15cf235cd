"""Routes of the server and of the dashboards, and names and labels of the samples of `/metrics`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from event_making import make_drifted, make_updated
from product import BlockDone, Chunk, EngineStatus, Finish, Limits, Metrics, Recalled, Usage, create_app, make_app
from prometheus_client.parser import text_string_to_metric_families

Golden = Callable[[str, Any], None]
BLOCK = BlockDone(0, "live", 0, 1, drafted=6, proposed=5, judged=4, accepted=3, emitted=4, seconds_decode=0.0,
                  seconds_translate=0.0, seconds_verify=0.0)  # fmt: skip
STATUS = EngineStatus("big", True, 2, 3, 11, 12, 4, 6, 7, True, 4000, learner_waits=False)


class Engine:
    """A stub engine with the one method that an application calls when it is built."""

    def read_status(self) -> EngineStatus:
        return STATUS


def routes(app: Any) -> Mapping[str, list[str]]:
    """Paths of an application with their methods."""
    return {route.path: sorted(getattr(route, "methods", None) or ["(files)"]) for route in app.routes}


def test_routes(golden: Golden, tmp_path: Path) -> None:
    metrics: Any = Metrics("big")
    server = make_app(Engine(), Limits(), metrics)
    golden("routes", {"serve": routes(server), "dashboard": routes(create_app(None, tmp_path))})


def test_metrics(golden: Golden) -> None:
    metrics = Metrics("big")
    for event in (BLOCK, make_updated(), make_drifted(), Recalled(0, "big", None, 2, 5, 0.5, 0.4, 1.0)):
        metrics.count_event(event)
    metrics.count_tokens(4)
    metrics.count_finish(Chunk("", finish=Finish.STOP, usage=Usage(5, 4, 1, 6, 3)), 0.5)
    metrics.count_response(200)
    found: dict[str, dict[str, Any]] = {}
    for family in text_string_to_metric_families(metrics.render(STATUS).decode()):
        samples = {one.name: sorted(one.labels) for one in family.samples if not one.name.endswith("_created")}
        found[family.name] = {"type": family.type, "labels by sample": samples}
    golden("metrics", found)
