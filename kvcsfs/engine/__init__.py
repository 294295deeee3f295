"""What the store is: index, eviction, capacity, pins and object files, behind one asynchronous face (`engine.py`)."""
