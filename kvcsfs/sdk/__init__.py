"""The client of kvcsfs; `kvcs` is its public name."""

from kvcsfs.errors import KvcsClosedError, KvcsCode, KvcsError, KvcsTimeoutError, KvcsUnavailableError
from kvcsfs.sdk.buffers import BufferPool
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
from kvcsfs.sdk.writeback import WriteBackQueue

__all__ = [
    "BufferPool",
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
    "WriteBackQueue",
]
