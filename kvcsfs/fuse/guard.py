"""Guard: ends the mount of a daemon that was killed and can't die. Run as a script, a process of its own.

To make the kernel forget a name, a thread of the daemon waits in the kernel for the directory's lock. Whoever holds
that may be waiting for an answer of the daemon. If the daemon is killed then, that thread never ends: the connection
stays open, nobody answers, and nothing is restarted, as the process doesn't end. Aborting the connection frees both.
Source: the kernel's fs/fuse/dir.c, `fuse_reverse_inval_entry`; Documentation/filesystems/fuse.rst, on deadlocks.

Nothing of ours is imported here: it is to be small, and to start at once.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

DEAD, DISMISSED = signal.SIGUSR1, signal.SIGUSR2
LOOK_SECONDS = 0.05
PATIENCE_SECONDS = 1.0  # for a process to end by itself
PR_SET_PDEATHSIG = 1
MNT_FORCE = 1


class Guard:
    """The daemon's end. Made by its main thread: the signal comes when the thread that made the process ends."""

    def __init__(self, path: Path, device: str) -> None:
        """Guard the mount of a device ("major:minor") at a path. Returns when it does."""
        connection = device.rpartition(":")[2]  # fuse.rst: it is the minor number
        command = [sys.executable, "-I", "-S", __file__, str(path), connection, str(os.getpid())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd="/", start_new_session=True
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self._process.stdout.close()

    def dismiss(self) -> None:
        """The mount is taken down in order."""
        self._process.send_signal(DISMISSED)
        self._process.wait()


def main(path: str, connection: str, daemon: str) -> None:
    """Wait for the daemon's death; if it doesn't come to an end, abort the connection until it does."""
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))  # at a stop all of a service get a signal
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, int(DEAD), 0, 0, 0)
    print("ready", flush=True)
    if os.getppid() == int(daemon) and signal.sigwait({DEAD, DISMISSED}) == DISMISSED:
        return
    patient_until = time.monotonic() + PATIENCE_SECONDS
    while os.getppid() == int(daemon):
        if time.monotonic() > patient_until:
            try:
                Path(f"/sys/fs/fuse/connections/{connection}/abort").write_text("1", encoding="ascii")
            except OSError:  # that file system isn't mounted
                libc.umount2(os.fsencode(path), MNT_FORCE)
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
