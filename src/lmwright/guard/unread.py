"""Output that nobody reads any more: a pipe that was closed at its other end, as `head` does."""

import os
import select

EXIT_UNREAD = 141  # 128 and SIGPIPE, as shells count; 0 and 1 are answers of some verbs


def is_of_pipe(error: BaseException | None) -> bool:
    """True for the error of a closed pipe, and for the SystemExit that rich makes of it."""
    if isinstance(error, SystemExit):
        return is_of_pipe(error.__context__)
    return isinstance(error, BrokenPipeError)


def leave_output(error: BaseException | None) -> bool:
    """Lets what is still to be written go nowhere, where an error of a pipe came because nobody
    reads standard output or error any more; False where it is another pipe."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    unread = [descriptor for descriptor, event in poll.poll(0) if event & select.POLLERR]
    for descriptor in unread:
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return bool(unread) or isinstance(error, SystemExit)  # rich has left it already
