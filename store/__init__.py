"""What happened and how it is kept. The lowest package; also where the project's logger gets its `NullHandler`."""

import logging

logging.getLogger("omnidraft").addHandler(logging.NullHandler())  # a library writes nothing unless it is asked to
