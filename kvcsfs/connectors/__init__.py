"""Connectors: what makes an inference engine keep its KV cache in kvcsfs. One module an engine, imported by name."""
