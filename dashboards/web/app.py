"""The web application of the dashboards: static pages, and an API with their queries to the log."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response
from fastapi.staticfiles import StaticFiles
from fastapi.templating import Jinja2Templates
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from dashboards.web.logs import BusyError, Logs, default_runs
from dashboards.web.overview import list_runs
from dashboards.web.queries.calibration import read_calibration
from dashboards.web.queries.charts import read_ngrams, read_stream
from dashboards.web.queries.held import add_spelling, list_held_contexts, list_held_ngrams
from dashboards.web.queries.memory import list_accepted, read_memory
from dashboards.web.queries.policies import read_policies
from dashboards.web.queries.tables import find_rejection, read_catalog, read_prompts
from dashboards.web.queries.tokens import read_completion
from dashboards.web.queries.versions import read_versions
from dashboards.web.queries.vocabulary import read_vocabularies
from dashboards.web.registered import list_compared, list_numbers
from dashboards.web.sql_process import PAGE, SqlProcess
from store.bodies import BodyError, check_lengths, read_json_body
from store.errors import OmnidraftError, UsageError
from store.hosts import is_own_name
from store.query.exports import MEDIA_TYPES
from store.query.log_reader import LogReader

HERE = Path(__file__).parent
TEMPLATES = Jinja2Templates(directory=HERE / "templates")
PAGES = {
    "runs": "Runs",
    "stream": "Stream",
    "text": "Text",
    "versions": "Versions",
    "sql": "SQL",
    "details": "Details",
}
# The parts of the page Details, each a page of its own.
DETAILS = {
    "policies": "Policies",
    "memory": "Memory",
    "ngrams": "N-grams",
    "calibration": "Calibration",
    "vocabulary": "Vocabulary",
}
# The terms that pages use, each explained in a sentence, in the order in which a page needs them.
LISTED = json.loads((HERE / "terms.json").read_text(encoding="utf-8"))
PLOTLY = Path(str(files("plotly"))) / "package_data" / "plotly.min.js"
# Own content only. Inline styles are allowed, because Plotly sets them; inline scripts are not.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
OWN = ("same-origin", "none")  # values of Sec-Fetch-Site for requests from these pages and from the address bar

BODY_BYTES = 512 << 10  # a query of 64 kB, if every character of it is escaped
BODY_SECONDS = 30.0  # as those of `omnidraft serve`

Runs = Annotated[list[str], Query(alias="run", default_factory=list)]


class SqlRequest(BaseModel):
    """A query over some runs, and the kind of its answer."""

    runs: list[str]
    query: str
    kind: str = PAGE


async def read_sql_request(request: Request) -> SqlRequest:
    """Read the body of a request. FastAPI would read one of any size, for any time."""
    check_lengths(request.headers)
    body = await read_json_body(request.headers, request.stream(), BODY_BYTES, BODY_SECONDS)
    try:
        return SqlRequest.model_validate_json(body)
    except ValidationError as error:
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from None


SqlBody = Annotated[SqlRequest, Depends(read_sql_request)]


def create_app(run: Path | None, runs: Path, host: str = "127.0.0.1") -> FastAPI:
    """Create the application over one run or a folder of runs, which is served on the address `host`."""
    # Slow queries have their own snapshots, so that they do not block the other pages; those of visitors a process.
    quick, long, queries = Logs(run, runs), Logs(run, runs), SqlProcess(run, runs)

    @asynccontextmanager
    async def closing(_: FastAPI) -> AsyncIterator[None]:
        yield
        queries.close()
        quick.close()
        long.close()

    app = FastAPI(title="omnidraft", openapi_url=None, lifespan=closing)
    app.mount("/static", StaticFiles(directory=HERE / "static"))
    _add_guard(app, host)
    _add_errors(app, quick)
    _add_pages(app, quick)
    _add_lists(app, quick, run.resolve().parent if run else runs)
    _add_questions(app, quick)
    _add_long_questions(app, long)
    _add_sql(app, queries)
    return app


def _add_guard(app: FastAPI, served: str) -> None:
    @app.middleware("http")
    async def guard_request(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        if not is_own_name(request.headers.get("host", ""), served):
            answer: Response = PlainTextResponse("The Host header must name this server; open it by its address.", 403)
        elif request.url.path.startswith("/api/") and _is_from_another_site(request.headers):
            answer = PlainTextResponse("Other sites must not query the log; open the dashboards themselves.", 403)
        else:
            answer = await call_next(request)
        answer.headers.update(HEADERS)
        return answer


def _is_from_another_site(headers: Mapping[str, str]) -> bool:
    """Whether a browser sends this for a page of another site. Over plain HTTP to another machine it does not send
    `Sec-Fetch-Site`, but where the page is from, at least with all that is not a GET. Programs send neither.
    """
    if (site := headers.get("sec-fetch-site")) is not None:
        return site not in OWN
    pages = (headers[name] for name in ("origin", "referer") if name in headers)
    return any(urlsplit(page).netloc != headers.get("host") for page in pages)


def _add_errors(app: FastAPI, logs: Logs) -> None:
    @app.exception_handler(404)
    def report_missing(request: Request, _: Exception) -> Response:
        if request.url.path.startswith(("/api/", "/static/")):
            return JSONResponse({"error": "Not Found"}, 404)
        context = {"page": "", "pages": PAGES, "details": {}, "states": logs.states(), "chosen": [], "unknown": []}
        return TEMPLATES.TemplateResponse(request, "missing.html", context, 404)

    @app.exception_handler(OmnidraftError)
    def report_refusal(_: Request, error: OmnidraftError) -> Response:
        return JSONResponse({"error": str(error)}, 429 if isinstance(error, BusyError) else 400)

    @app.exception_handler(RequestValidationError)
    def report_malformed(_: Request, error: RequestValidationError) -> Response:
        message = "; ".join(f"{'.'.join(map(str, problem['loc'][1:]))}: {problem['msg']}" for problem in error.errors())
        return JSONResponse({"error": f"the request must be one that a page makes; {message}"}, 422)

    @app.exception_handler(BodyError)
    def report_body(_: Request, error: BodyError) -> Response:
        return JSONResponse({"error": str(error)}, error.status, {"Connection": "close"})

    @app.exception_handler(ClientDisconnect)
    def report_nothing(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody receives it

    @app.exception_handler(Exception)
    def report_failure(_: Request, error: Exception) -> Response:
        message = f"the server failed ({type(error).__name__}); see its terminal"
        return JSONResponse({"error": message}, 500, HEADERS)  # the middleware does not process this response


def _add_pages(app: FastAPI, logs: Logs) -> None:
    catalog = read_catalog()

    @app.get("/plotly.js")
    def plotly() -> Response:
        return FileResponse(PLOTLY, media_type="text/javascript", headers={"Cache-Control": "max-age=3600"})

    def page(name: str) -> Callable[[Request, Runs], Response]:
        def show_page(request: Request, run: Runs) -> Response:
            states = logs.states()
            known = [state.name for state in states]
            chosen = [name for name in dict.fromkeys(run) if name in known] or default_runs(states)
            unknown = [name for name in dict.fromkeys(run) if name not in known]
            context = {"page": name, "pages": PAGES, "states": states, "chosen": chosen, "unknown": unknown}
            terms = [(term, LISTED["terms"][term]) for term in LISTED["pages"].get(name, ())]
            context |= {"catalog": catalog, "terms": terms, "details": DETAILS}
            return TEMPLATES.TemplateResponse(request, f"{name}.html", context)

        return show_page

    for name in (*PAGES, *DETAILS):
        app.get("/" if name == "runs" else f"/{name}", response_class=HTMLResponse)(page(name))


def _add_lists(app: FastAPI, logs: Logs, runs_folder: Path) -> None:
    @app.get("/api/runs")
    def runs() -> Response:
        return JSONResponse(list_runs(logs))

    @app.get("/api/registry")
    def registry(run: Runs) -> Response:
        return JSONResponse(list_numbers(runs_folder, run))

    @app.get("/api/comparisons")
    def comparisons(run: Runs) -> Response:
        return JSONResponse(list_compared(runs_folder, run))

    @app.get("/api/states")
    def states(run: Runs) -> Response:
        return JSONResponse([asdict(state) for state in logs.states(run)])


def _answer(request: Request, logs: Logs, names: list[str], question: Callable[[LogReader], Any]) -> Response:
    """Response with the result as JSON, or status 304 if the log has not changed since the page's last request."""
    stamp = f'"{logs.stamp(names).encode().hex()}"'
    if request.headers.get("if-none-match") == stamp:
        return Response(status_code=304)
    return JSONResponse(logs.read(names, question), headers={"ETag": stamp, "Cache-Control": "no-cache"})


def _add_questions(app: FastAPI, quick: Logs) -> None:
    @app.get("/api/stream")
    def stream(request: Request, run: Runs, window: int = 0, split: str = "none") -> Response:
        chosen = quick.choose_runs(run)
        return _answer(request, quick, run, lambda log: read_stream(log, window, split, chosen))

    @app.get("/api/prompts")
    def prompts(
        request: Request, run: Runs, order: str = "stream", dataset: str = "", page: int = 0, search: str = ""
    ) -> Response:
        return _answer(request, quick, run[:1], lambda log: read_prompts(log, order, dataset, page, search))

    @app.get("/api/rejection")
    def rejection(request: Request, run: Runs, offset: int = -1) -> Response:
        return _answer(request, quick, run[:1], lambda log: find_rejection(log, offset))

    @app.get("/api/vocabulary")
    def vocabulary(request: Request, run: Runs) -> Response:
        chosen = quick.choose_runs(run)
        return _answer(request, quick, run, lambda log: read_vocabularies(log, chosen, list(chosen)))

    @app.get("/api/completion")
    def completion(request: Request, run: Runs, offset: int) -> Response:
        found = quick.read(run[:1], lambda log: read_completion(log, offset))
        return TEMPLATES.TemplateResponse(request, "completion.html", {"completion": found})

    @app.get("/api/versions")
    def versions(request: Request, run: Runs) -> Response:
        return _answer(request, quick, run, lambda log: read_versions(log, quick.folders()))


def _add_long_questions(app: FastAPI, long: Logs) -> None:
    def ask(question: Callable[[LogReader], Any]) -> Callable[[Request, Runs], Response]:
        def answer(request: Request, run: Runs) -> Response:
            return _answer(request, long, run, question)

        return answer

    for name, question in {"policies": read_policies, "calibration": read_calibration, "memory": read_memory}.items():
        app.get(f"/api/{name}")(ask(question))

    @app.get("/api/memory/accepted")
    def list_contexts(request: Request, run: Runs, source: str = "", search: str = "") -> Response:
        return _answer(request, long, run, lambda log: list_accepted(log, source, search))

    @app.get("/api/memory/held")
    def list_memory(request: Request, run: Runs, search: str = "") -> Response:
        return _answer(request, long, run, lambda log: list_held_contexts(log, long.folders(), search))

    @app.get("/api/ngrams")
    def ngrams(request: Request, run: Runs, window: int = 0) -> Response:
        def read(log: LogReader) -> dict[str, Any]:
            found = read_ngrams(log, window)
            return found | {"paying": add_spelling(found["paying"], log, long.folders())}

        return _answer(request, long, run, read)

    @app.get("/api/ngrams/held")
    def list_entries(request: Request, run: Runs, search: str = "") -> Response:
        return _answer(request, long, run, lambda log: list_held_ngrams(log, long.folders(), search))


def _add_sql(app: FastAPI, queries: SqlProcess) -> None:
    @app.post("/api/sql")
    async def sql(body: SqlBody) -> Response:
        return Response(await queries.answer(body.runs, body.query), media_type="application/json")

    @app.post("/api/sql/export")
    async def export(body: SqlBody) -> Response:
        if body.kind not in MEDIA_TYPES:
            raise UsageError(f"rows can be saved as {', '.join(MEDIA_TYPES)}; got {body.kind!r}")
        headers = {"Content-Disposition": f'attachment; filename="rows.{body.kind}"'}
        content = await queries.answer(body.runs, body.query, body.kind)
        return Response(content, media_type=MEDIA_TYPES[body.kind], headers=headers)
