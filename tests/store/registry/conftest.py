"""Registries of these tests send from a thread, in which tests can replace functions; this needs MLflow imported."""

import mlflow  # noqa: F401
