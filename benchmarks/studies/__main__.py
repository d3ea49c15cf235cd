"""The studies: `python -m benchmarks.studies losses --quick`, `... paper --table 1 --quick`."""

import sys

from benchmarks.command import run
from benchmarks.studies.command import study
from benchmarks.studies.paper.command import study_paper

if __name__ == "__main__":
    if sys.argv[1:2] == ["paper"]:
        del sys.argv[1]
        run(study_paper)
    else:
        run(study)
