"""A counting semaphore made of files: at most N permits in use, over any number of processes.

Admission depends only on the kernel's file locks (`flock`): a permit is a locked slot file, so it is freed
however its holder dies. Admission never relies on a process id, a clock or the contents of a file. It works
on one machine; `lock_sharing_problem` returns why a directory's file system is not suitable.

The directory:

    permits.json      how many permits there are, and how many slots there have ever been
    permits.lock      held while permits.json is replaced
    turnstile.lock    the wait queue: held by the one waiter that watches the slots
    slot-0000 ...     locked while its permit is in use; names its holder
    seat-0000 ...     locked by a waiter, so that waiters can be counted

A waiter that is stopped (SIGSTOP) as the first in the queue blocks those behind it until it continues or
dies. A process that forks without Python's knowledge and without exec shares its permits with
the child: they are free once released, or once both are dead.
"""

from retrain.semaphore.file_semaphore import FileSemaphore, lock_sharing_problem
from retrain.semaphore.slots import Holder, SemaphoreState

__all__ = ["FileSemaphore", "Holder", "SemaphoreState", "lock_sharing_problem"]
