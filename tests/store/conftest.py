"""An object store for all tests of the store."""

from object_serving import objects, place  # noqa: F401  (fixtures)
