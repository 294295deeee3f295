"""The POSIX face: the store as a file system, through FUSE."""
