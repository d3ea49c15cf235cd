"""Being here puts this folder on the import path, so that every test can `import doubles`."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("unhurried", deadline=None)  # a busy machine is no failure
settings.load_profile("unhurried")


@pytest.fixture(scope="session", autouse=True)
def _cache_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test writes into the user's cache; what one test reads of a tokenizer serves the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIDRAFT_CACHE", str(tmp_path_factory.getbasetemp() / "omnidraft-cache"))
        yield
