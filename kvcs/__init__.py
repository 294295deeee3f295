"""The KVCacheStore SDK: what inference engines import. See docs/sdk.md."""

from kvcsfs.sdk import (
    BufferPool,
    KvcsClosedError,
    KvcsCode,
    KvcsError,
    KvcsLowLevelClient,
    KvcsTimeoutError,
    KvcsUnavailableError,
    LLBatchOptions,
    LLDeleteResult,
    LLGetIntoResult,
    LLGetItemOpt,
    LLGetResult,
    LLPutItem,
    LLPutResult,
    LLQueryResult,
    WriteBackQueue,
)

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
