"""The client of kvcsfs; `kvcs` is its public name."""

from kvcsfs.errors import KvcsClosedError, KvcsCode, KvcsError, KvcsTimeoutError, KvcsUnavailableError
from kvcsfs.sdk.client import KvcsLowLevelClient
from kvcsfs.sdk.results import (
    LLBatchOptions,
    LLDeleteResult,
    LLGetIntoResult,
    LLGetItemOpt,
    LLGetResult,
    LLPutItem,
    LLPutResult,
    LLQueryResult,
)

__all__ = [
    "KvcsClosedError",
    "KvcsCode",
    "KvcsError",
    "KvcsLowLevelClient",
    "KvcsTimeoutError",
    "KvcsUnavailableError",
    "LLBatchOptions",
    "LLDeleteResult",
    "LLGetIntoResult",
    "LLGetItemOpt",
    "LLGetResult",
    "LLPutItem",
    "LLPutResult",
    "LLQueryResult",
]
