"""What the learner costs a server under load: `python -m benchmarks.server`."""

import asyncio
import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from benchmarks.command import JsonOption, run
from benchmarks.server.cost import OFF, compare, make_table
from benchmarks.server.server import OwnServer
from pipeline.config.cli_options import SetOption, TargetOption, argument, overrides_of, parse_settings
from pipeline.config.settings import Config
from pipeline.reports.terminal import require_file, status
from pipeline.sources.stream import open_sources, stream
from store.errors import SourceError
from store.events import PromptReceived


def server(
    sources: Annotated[list[str] | None, argument("sources", "Prompt sources, as for `replay`.", "SOURCE")] = None,
    target: TargetOption = None,
    settings: SetOption = None,
    rounds: Annotated[int, typer.Option(min=1, help="Every server has its turn in each.")] = 6,
    seconds: Annotated[float, typer.Option(min=1, help="Length of a round.")] = 20.0,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second. [default: half of what a full load completes]")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Start a server without learning and two with learning (`live`, `shadow`), and load them in turn."""
    require_file("--json", json_file)
    overrides = overrides_of(server, locals()) | parse_settings(settings)
    config = Config().with_overrides(overrides)
    events = stream(open_sources(config.sources, config.source, seed=config.seed))
    prompts = [event.text for event in events if isinstance(event, PromptReceived)]
    if not prompts:
        raise SourceError(f"the sources must have prompts, but {', '.join(config.sources)} has none")
    options = [word for key, value in overrides.items() if key != "sources" for word in _to_option(key, value)]
    with TemporaryDirectory(prefix="omnidraft-server-") as scratch, ExitStack() as opened, status() as report:
        servers: dict[str, OwnServer] = {}
        for learn in (OFF, "live", "shadow"):
            report(f"starting a server: {learn}")
            servers[learn] = opened.enter_context(OwnServer([*options, "--learn", learn], Path(scratch, learn)))
        used_rate, found = asyncio.run(compare(servers, prompts, rounds, seconds, rate, report))
    table = make_table(found)
    print(f"{used_rate:.2f} requests per second\n\n{table.markdown()}\n\n{table.notes[0]}")
    if json_file is not None:
        values = {"rate": used_rate, "rounds": {name: list(map(asdict, own)) for name, own in found.items()}}
        json_file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _to_option(key: str, value: object) -> list[str]:
    return [] if key.startswith("source.") else ["--set", f"{key}={json.dumps(value)}"]


if __name__ == "__main__":
    run(server)
