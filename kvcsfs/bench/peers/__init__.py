"""The stores that `kvcs-bench compare` sets side by side, one module each."""
