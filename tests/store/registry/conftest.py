"""Registries of these tests send from a thread, where tests can replace parts: MLflow is imported for that."""

import mlflow  # noqa: F401
