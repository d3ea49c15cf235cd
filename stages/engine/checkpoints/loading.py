"""Reports how far the loading of a model is."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from time import monotonic
from typing import TypeVar

LOG, PROGRESS = logging.getLogger("omnidraft.models"), logging.getLogger("omnidraft.loading")
SECONDS = 1.0  # between two reports; a model that loads in less has none

Layer = TypeVar("Layer")


def report_layers(source: str, layers: Sequence[Layer]) -> Iterator[Layer]:
    """Yield the layers of a model while their weights are prepared, and log what share is and how long the others take.

    The records of `PROGRESS` are shown in place (`pipeline/reports/terminal.py`); `LOG` gets one at the end. Messages
    name the source of the model.
    """
    name = PurePath(source).name.removesuffix(".gguf")
    began = reported = monotonic()
    for number, layer in enumerate(layers):
        now = monotonic()
        if number and now - reported >= SECONDS:
            left = (now - began) * (len(layers) - number) / number
            PROGRESS.info("loading %s: %.0f%%, %.0f s left", name, 100 * number / len(layers), left)
            reported = now
        yield layer
    if reported > began:
        PROGRESS.info("checking %s", name)
        LOG.info("loaded %s in %.0f s", name, monotonic() - began)
