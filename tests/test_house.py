"""The rules of the house, read off the syntax trees: who may import what, and how long things may be."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("dashboards", "pipeline", "stages", "store")
MODULES = sorted(path.relative_to(ROOT).as_posix() for room in ROOMS for path in (ROOT / room).rglob("*.py"))
TESTS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py"))

# Per room the modules of ours that it may import, beside itself.
MAY_IMPORT = {
    "store": (),
    "stages": ("store.events", "store.errors"),
    "pipeline": ("stages", "store"),
    "dashboards": ("store",),
}
# Per heavy library the files that may import it; `inside` marks those that may do so in functions only.
LIVES_IN = {
    "torch": ("stages/*",),
    "transformers": ("stages/huggingface.py",),
    "pyarrow": ("store/*",),
    "duckdb": ("store/queries.py",),
    "mlflow": (),
    "peft": (),
    "river": ("pipeline/drift.py",),
    "datasets": (),
    "ray": ("pipeline/scale.py",),
    "confluent_kafka": (),
    "openvino": (),
    "openvino_genai": (),
    "openvino_tokenizers": (),
    "gguf": (),
    "fastapi": ("dashboards/app.py", "dashboards/guard.py", "pipeline/serve_*.py"),
    "starlette": ("pipeline/serve_*.py",),
    "uvicorn": ("pipeline/serve_uvicorn.py",),
    "prometheus_client": ("pipeline/serve_metrics.py", "pipeline/bench_serve_watch.py"),
    "plotly": (),
}
LIVES_INSIDE = {
    "torch": ("pipeline/zoo.py",),
    "pyarrow": ("pipeline/source_files.py", "pipeline/source_ray.py", "pipeline/zoo.py", "pipeline/cli_log.py"),
    "mlflow": ("store/mlflow_*.py",),
    "peft": ("stages/adapters.py",),
    "datasets": ("pipeline/source_feeds.py",),
    "ray": ("pipeline/source_ray.py",),
    "confluent_kafka": ("pipeline/source_kafka.py",),
    "openvino": ("pipeline/bench_engine_*.py",),
    "openvino_genai": ("pipeline/bench_engine_*.py",),
    "openvino_tokenizers": ("pipeline/bench_engine_*.py",),
    "gguf": ("pipeline/bench_engine_*.py",),
    "uvicorn": ("dashboards/serve.py",),
}
BANNED = ("manager", "helper", "utils", "speculator", "assistant")
MAY_SAY_ASSISTANT = ("stages/baselines.py", "pipeline/bench*.py")  # the name of transformers' own option
FILE_LINES, FUNCTION_LINES = 300, 60


@cache
def tree_of(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def is_for_types(node: ast.AST) -> bool:
    """`if TYPE_CHECKING:`, which never runs."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(node: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """Every module that is imported below a node when it runs, and whether only inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, inside) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: relative import"
            yield str(child.module), inside
            yield from ((f"{child.module}.{alias.name}", inside) for alias in child.names if child.module in ROOMS)
        elif not is_for_types(child):
            yield from imports(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def below(name: str, *roots: str) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)


def functions_of(path: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def names_made_in(path: str) -> Iterator[str]:
    """Names of the module, and those of its classes, functions, their parameters, and what is assigned anywhere."""
    yield Path(path).stem
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.arg():
                yield node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr


def test_every_room_has_modules():
    assert {path.split("/")[0] for path in MODULES} == set(ROOMS)
    assert len(MODULES) > 40


@pytest.mark.parametrize("path", MODULES)
def test_imports_run_one_way(path: str):
    room = path.split("/")[0]
    ours = {name for name, _ in imports(tree_of(path)) if below(name, *ROOMS, "tests") and name not in ROOMS}
    foreign = {name for name in ours if not below(name, room)}
    assert {name for name in foreign if not below(name, *MAY_IMPORT[room])} == set()


def test_the_events_import_nothing_but_the_standard_library():
    assert {name.split(".")[0] for name, _ in imports(tree_of("store/events.py"))} <= sys.stdlib_module_names
    assert {name.split(".")[0] for name, _ in imports(tree_of("store/errors.py"))} <= sys.stdlib_module_names


@pytest.mark.parametrize("library", LIVES_IN)
def test_a_heavy_library_lives_where_it_may(library: str):
    found = {(path, inside) for path in MODULES for name, inside in imports(tree_of(path)) if below(name, library)}
    strays = {path for path, inside in found if not inside and not matches(path, LIVES_IN[library])}
    assert strays == set(), "imported when the module is"
    homes = (*LIVES_IN[library], *LIVES_INSIDE.get(library, ()))
    assert {path for path, _ in found if not matches(path, homes)} == set()


@pytest.mark.parametrize("path", MODULES)
def test_a_file_is_short(path: str):
    assert len((ROOT / path).read_text(encoding="utf-8").splitlines()) <= FILE_LINES


@pytest.mark.parametrize("path", [*MODULES, *TESTS])
def test_functions_are_short(path: str):
    lines = {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions_of(path)}
    assert {name: length for name, length in lines.items() if length > FUNCTION_LINES} == {}


def test_nine_functions_in_ten_fit_on_half_a_page():
    lengths = sorted((node.end_lineno or 0) - node.lineno + 1 for path in MODULES for node in functions_of(path))
    assert lengths[len(lengths) // 2] <= 10
    assert lengths[len(lengths) * 9 // 10] <= 30


@pytest.mark.parametrize("path", MODULES)
def test_names_say_what_a_thing_is(path: str):
    banned = BANNED[:-1] if matches(path, MAY_SAY_ASSISTANT) else BANNED
    assert {name for name in names_made_in(path) for word in banned if word in name.lower()} == set()


@pytest.mark.parametrize("path", [path for path in MODULES if not path.endswith("__init__.py")])
def test_a_module_says_what_it_is(path: str):
    assert len(ast.get_docstring(tree_of(path)) or "") > 20


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_s_init_runs_nothing(room: str):
    allowed = ast.Import | ast.ImportFrom | ast.Expr
    assert all(isinstance(node, allowed) for node in tree_of(f"{room}/__init__.py").body)


def test_no_test_folder_is_a_package():
    assert [path for path in TESTS if path.endswith("__init__.py")] == []


def test_test_files_have_names_of_their_own():
    names = [Path(path).name for path in TESTS if not path.endswith("conftest.py")]  # pytest tells those apart
    assert {name for name in names if names.count(name) > 1} == set()


def loaded_by(program: str) -> set[str]:
    """The top-level modules that a fresh Python has loaded when it has run a program."""
    report = "\nimport sys; print('LOADED', *{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", program + report], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    return set(done.stdout.rpartition("LOADED")[2].split())


def test_the_store_is_read_without_torch_and_mlflow():
    modules = [path.removesuffix(".py").replace("/", ".") for path in MODULES if path.startswith("store/")]
    loaded = loaded_by("\n".join(f"import {module}" for module in modules))
    assert {"store", "pyarrow", "duckdb"} <= loaded
    assert loaded & {"torch", "transformers", "peft", "mlflow", "river", "stages", "pipeline"} == set()


def test_the_bare_store_loads_nothing_heavy():
    loaded = loaded_by("import store, store.events, store.errors, store.registry")
    assert loaded & {"torch", "mlflow", "pyarrow", "duckdb", "numpy"} == set()


@pytest.mark.parametrize("arguments", [["--help"], ["replay", "--help"], ["sql", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]):
    program = f"""
from pipeline.cli import main
import sys
sys.argv = ["omnidraft", *{arguments}]
try:
    main()
except SystemExit as end:
    assert not end.code, end
"""
    loaded = loaded_by(program)
    assert {"pipeline", "typer"} <= loaded
    heavy = {"torch", "transformers", "peft", "mlflow", "pyarrow", "duckdb", "river", "numpy", "stages"}
    assert loaded & heavy == set()
