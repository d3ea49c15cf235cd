"""Every name of the product that the golden tests use, imported in one place."""

from pathlib import Path

from dashboards.web.app import create_app
from pipeline.cli.app import app, main
from pipeline.config.settings import Config
from pipeline.models import catalog as zoo
from pipeline.serve.http.api import make_app
from pipeline.serve.http.limits import Limits
from pipeline.serve.http.metrics import Metrics
from pipeline.serve.messages import Chunk, EngineStatus, Finish, Usage
from store.events import BlockDone, Recalled
from store.fault_points import VARIABLE
from store.log.manifest import part_path, read_manifest
from store.log.schema import SCHEMA_VERSION, TABLES, schema_of
from store.query.log_reader import VIEWS, LogReader, recipes
from store.registry.mlflow_client import connect

ROOT = Path(__file__).resolve().parents[2]
__all__ = [
    "ROOT",
    "SCHEMA_VERSION",
    "TABLES",
    "VARIABLE",
    "VIEWS",
    "BlockDone",
    "Chunk",
    "Config",
    "EngineStatus",
    "Finish",
    "Limits",
    "LogReader",
    "Metrics",
    "Recalled",
    "Usage",
    "app",
    "connect",
    "create_app",
    "main",
    "make_app",
    "part_path",
    "read_manifest",
    "recipes",
    "schema_of",
    "zoo",
]
