"""The beginning of a learner's process. It imports nothing that takes time."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from store.child import Parent

FREE = "free"  # file in the scratch folder: no request runs or ever will, so the budget does not hold
POLL_SECONDS = 0.25  # between two looks for that file, and for further prompts


def start_learner(parent: "Parent", share: float, scratch: str) -> None:
    """Run the learner of the first message. Without a share of the processor it begins in the first pause: its imports
    take seconds of a core.
    """
    while not share and not Path(scratch, FREE).exists():
        time.sleep(POLL_SECONDS)
    from pipeline.learner_service.process import run_learner

    run_learner(parent, parent.receive(), share, scratch)
