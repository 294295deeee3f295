"""kvcs-bench: how fast a store is, how well it caches a recorded load, how it stands beside others."""
