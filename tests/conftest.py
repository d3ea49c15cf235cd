"""Being here puts this folder on the import path, so that every test can `import doubles`."""

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)  # a busy machine is no failure
settings.load_profile("unhurried")
