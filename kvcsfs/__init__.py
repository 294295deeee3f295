"""kvcsfs: a KV-cache store for large-model inference, one daemon a node."""

__version__ = "0.1.0"
