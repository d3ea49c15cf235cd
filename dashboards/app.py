"""The dashboards as one web application: pages that are shells, and the questions that they ask the log."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response
from fastapi.staticfiles import StaticFiles
from fastapi.templating import Jinja2Templates
from pydantic import BaseModel

from dashboards.ask import ask, read_catalog
from dashboards.guard import HEADERS, guard
from dashboards.lineage import read_versions
from dashboards.logs import Logs
from dashboards.ngrams import read_ngrams
from dashboards.prompts import read_prompts
from dashboards.stream import read_stream
from dashboards.tokens import read_completion
from store.errors import OmnidraftError
from store.queries import LogReader

HERE = Path(__file__).parent
PAGES = {
    "stream": "Stream",
    "text": "Text",
    "ngrams": "N-grams",
    "versions": "Versions",
    "sql": "SQL",
}
PLOTLY = Path(str(files("plotly"))) / "package_data" / "plotly.min.js"

Runs = Annotated[list[str], Query(alias="run", default_factory=list)]


class Asked(BaseModel):
    """A query over some runs."""

    runs: list[str]
    query: str


def create_app(run: Path | None, runs: Path, host: str = "127.0.0.1") -> FastAPI:
    """The application over one run or a folder of runs, to be served under the name `host`."""
    # What may take long does not hold up the other pages.
    quick, long = Logs(run, runs), Logs(run, runs)

    @asynccontextmanager
    async def closing(_: FastAPI) -> AsyncIterator[None]:
        yield
        quick.close()
        long.close()

    app = FastAPI(title="omnidraft", openapi_url=None, lifespan=closing)
    app.middleware("http")(guard(host))
    app.mount("/static", StaticFiles(directory=HERE / "static"))
    app.add_exception_handler(OmnidraftError, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(Exception, _failed)
    _add_pages(app, quick)
    _add_questions(app, quick, long)
    return app


def _add_pages(app: FastAPI, logs: Logs) -> None:
    templates = Jinja2Templates(directory=HERE / "templates")
    catalog = read_catalog()

    @app.get("/")
    def start() -> Response:
        return RedirectResponse("/stream")

    @app.get("/plotly.js")
    def plotly() -> Response:
        return FileResponse(PLOTLY, media_type="text/javascript", headers={"Cache-Control": "max-age=3600"})

    def page(name: str) -> Callable[[Request, Runs], Response]:
        def shown(request: Request, run: Runs) -> Response:
            states = logs.states()
            known = [state.name for state in states]
            chosen = [name for name in dict.fromkeys(run) if name in known] or known[:1]
            told = {"page": name, "pages": PAGES, "states": states, "chosen": chosen, "catalog": catalog}
            return templates.TemplateResponse(request, f"{name}.html", told)

        return shown

    for name in PAGES:
        app.get(f"/{name}", response_class=HTMLResponse)(page(name))


def _add_questions(app: FastAPI, quick: Logs, long: Logs) -> None:
    templates = Jinja2Templates(directory=HERE / "templates")

    def answer(request: Request, logs: Logs, names: list[str], question: Callable[[LogReader], Any]) -> Response:
        """JSON; nothing if the log is as it was when the page last asked."""
        stamp = f'"{logs.stamp(names).encode().hex()}"'
        if request.headers.get("if-none-match") == stamp:
            return Response(status_code=304)
        return JSONResponse(logs.read(names, question), headers={"ETag": stamp, "Cache-Control": "no-cache"})

    @app.get("/api/stream")
    def stream(request: Request, run: Runs, window: int = 0, split: str = "none") -> Response:
        return answer(request, quick, run, lambda log: read_stream(log, window, split))

    @app.get("/api/prompts")
    def prompts(request: Request, run: Runs, order: str = "stream", dataset: str = "", page: int = 0) -> Response:
        return answer(request, quick, run[:1], lambda log: read_prompts(log, order, dataset, page))

    @app.get("/api/ngrams")
    def ngrams(request: Request, run: Runs, window: int = 0) -> Response:
        return answer(request, long, run, lambda log: read_ngrams(log, window))

    @app.get("/api/versions")
    def versions(request: Request, run: Runs) -> Response:
        return answer(request, quick, run, read_versions)

    @app.get("/api/states")
    def states(run: Runs) -> Response:
        return JSONResponse([asdict(state) for state in quick.states(run)])

    @app.get("/api/completion")
    def completion(request: Request, run: Runs, offset: int) -> Response:
        found = quick.read(run[:1], lambda log: read_completion(log, offset))
        return templates.TemplateResponse(request, "completion.html", {"completion": found})

    @app.post("/api/sql")
    def sql(asked: Asked) -> Response:
        return JSONResponse(long.read(asked.runs, lambda log: ask(log, asked.query)))


def _refused(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 400)


def _malformed(_: Request, error: Exception) -> Response:
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    told = "; ".join(f"{'.'.join(map(str, problem['loc'][1:]))}: {problem['msg']}" for problem in problems)
    return JSONResponse({"error": f"the request must be one that a page makes; {told}"}, 422)


def _failed(_: Request, error: Exception) -> Response:
    told = f"the server failed ({type(error).__name__}); its terminal says more"
    return JSONResponse({"error": told}, 500, HEADERS)  # the guard does not see this answer
