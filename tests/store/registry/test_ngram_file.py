"""A file of n-grams is read back as it was written; any other file is refused."""

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from store.errors import CorruptError, VocabularyError
from store.registry.ngram_file import read_ngrams, write_ngrams

PAIR, OTHER = "ab" * 32, "cd" * 32
NGRAMS = [((5, 7), 300, 12), ((5, 7, 31_999), 128_255, 1 << 40), ((1, 1), 2, 1)]
ids = st.integers(0, 2**31 - 1)


@given(st.lists(st.tuples(st.lists(ids, min_size=2).map(tuple), ids, st.integers(1, 2**62)), max_size=9))
def test_n_grams_are_read_back_in_the_same_order(tmp_path_factory: pytest.TempPathFactory, ngrams: list):
    path = tmp_path_factory.mktemp("ngrams") / "ngrams.parquet"
    write_ngrams(path, iter(ngrams), PAIR)
    assert read_ngrams(path, PAIR) == ngrams


def test_the_file_of_another_pair_is_refused_with_both_pairs_and_a_remedy(tmp_path: Path):
    write_ngrams(tmp_path / "ngrams", NGRAMS, OTHER)
    with pytest.raises(VocabularyError) as refused:
        read_ngrams(tmp_path / "ngrams", PAIR)
    assert str(refused.value) == (
        f"{tmp_path / 'ngrams'} must have been made for this pair of vocabularies (abababababab), but was for "
        "cdcdcdcdcdcd; start with an empty cache, or use the target and drafter that it belongs to"
    )


def test_a_file_without_a_pair_is_refused(tmp_path: Path):
    write_ngrams(tmp_path / "ngrams", NGRAMS, PAIR)
    parquet.write_table(parquet.read_table(tmp_path / "ngrams").replace_schema_metadata({}), tmp_path / "ngrams")
    with pytest.raises(VocabularyError, match="but was for none"):
        read_ngrams(tmp_path / "ngrams", PAIR)


@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, kept: int):
    path = tmp_path / "ngrams"
    write_ngrams(path, NGRAMS, PAIR)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CorruptError, match=r"ngrams must be a saved n-gram cache, but .*; delete it"):
        read_ngrams(path, PAIR)


@pytest.mark.parametrize(
    "columns",
    [
        {"pieces": [[1, 2]], "token": [3]},
        {"pieces": ["12"], "token": [3], "count": [1]},
        {"pieces": [None], "token": [3], "count": [1]},
        {"pieces": [[1, 2]], "token": [1 << 40], "count": [1]},
    ],
)
def test_another_table_is_refused(tmp_path: Path, columns: dict[str, list]):
    table = pa.table(columns).replace_schema_metadata({"omnidraft.pair": PAIR})
    parquet.write_table(table, tmp_path / "ngrams")
    with pytest.raises(CorruptError, match="must be a saved n-gram cache"):
        read_ngrams(tmp_path / "ngrams", PAIR)
