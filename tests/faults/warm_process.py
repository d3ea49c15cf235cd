"""Loads what a run needs, once, in the process from which runs are forked."""

import os

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # its thread would not survive a fork

import mlflow  # noqa: F401
import transformers  # noqa: F401

import pipeline.cli
import pipeline.replay

pipeline.replay.UNSENT_TIMEOUT = 0.1  # nobody is there to be waited for
pipeline.replay.of_run = lambda run_folder: []  # pictures take seconds and have tests of their own
