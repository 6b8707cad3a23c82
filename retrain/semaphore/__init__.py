"""A counting semaphore made of files: at most N permits out, over any number of processes.

The kernel's file locks (`flock`) are the only truth: a permit is a locked slot file, so whatever
kills its holder frees it. Nothing here trusts a process id, a clock or the contents of a file
for admission. It serves one machine; `lock_sharing_problem` says when a directory cannot do that.

The directory:

    permits.json      how many permits there are, and how many slots there have ever been
    permits.lock      held for the moment in which permits.json is replaced
    turnstile.lock    held by the one waiter that watches the slots
    slot-0000 ...     locked while its permit is out; says who holds it
    seat-0000 ...     locked while somebody waits, to be counted

A waiter that is stopped (SIGSTOP) at the turnstile holds up those behind it until it goes on or
dies. A process that forks without Python's knowledge and without exec shares its permits with
the child: they are free when released, or when both are dead.
"""

from retrain.semaphore.file_semaphore import FileSemaphore
from retrain.semaphore.filesystems import lock_sharing_problem
from retrain.semaphore.slots import Holder, SemaphoreState

__all__ = ["FileSemaphore", "Holder", "SemaphoreState", "lock_sharing_problem"]
