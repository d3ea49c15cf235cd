"""Events and their storage. The lowest package; it also gives the project's logger its `NullHandler`."""

import logging

# A library prints nothing unless its user configures logging.
logging.getLogger("omnidraft").addHandler(logging.NullHandler())
