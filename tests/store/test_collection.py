"""Garbage collection is paused and resumed, also around a failure."""

import gc

import pytest

from store.collection import freeze_objects, pause_collection


def test_nothing_is_collected_in_the_block():
    with pause_collection():
        assert not gc.isenabled()
        with pause_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()  # the outer block lasts
    assert gc.isenabled()


def test_a_failure_resumes_collections():
    with pytest.raises(KeyError), pause_collection():
        raise KeyError
    assert gc.isenabled()


def test_objects_are_frozen_in_the_block_only():
    before = gc.get_freeze_count()
    with freeze_objects():
        assert gc.get_freeze_count() > before
    assert gc.get_freeze_count() == 0
