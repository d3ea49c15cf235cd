"""The exceptions that omnidraft raises for errors of use and of stored data.

    OmnidraftError
    ├── UsageError          the request cannot be carried out; exit status 2
    │   ├── ConfigError     an unknown or impossible setting
    │   ├── SourceError     a prompt source that cannot be opened
    │   ├── ModelError      a model or tokenizer that cannot be loaded or used
    │   ├── VocabularyError two vocabularies that cannot be paired
    │   ├── QueryError      a query that is not allowed or not valid
    │   └── RunError        a run folder that is missing, foreign or busy
    └── CorruptError        stored data that differs from its record

A message names what must hold, what was found, and what to try.
"""


class OmnidraftError(Exception):
    """Base class of all exceptions of omnidraft."""


class UsageError(OmnidraftError):
    """A request that cannot be carried out; the command line exits with status 2."""


class ConfigError(UsageError):
    """A setting that is unknown, or a value outside its range."""


class SourceError(UsageError):
    """A prompt source that cannot be opened or read at all."""


class ModelError(UsageError):
    """A model or tokenizer that cannot be loaded, or that lacks what the pipeline needs."""


class VocabularyError(UsageError):
    """Two vocabularies that cannot be paired, or a cache made for another pair."""


class QueryError(UsageError):
    """A query that is not a plain SELECT, or that DuckDB refuses."""


class RunError(UsageError):
    """A run folder that does not exist, is not a run, or already holds one."""


class CorruptError(OmnidraftError):
    """A stored file whose content does not match what was recorded about it."""
