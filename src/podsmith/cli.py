"""`podsmith`: one command per verb; see `podsmith.commands` for the verbs themselves.

Bad input from outside ends with one line and exit code 2, Ctrl-C with 130; anything else
that is raised is our mistake and keeps its traceback.
"""

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from podsmith.errors import UserError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

# Read by the C library and by jax before our code runs, hence a second start.
ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
COMPUTING_VERBS = ("train", "eval", "generate", "quickstart")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

DISK_ERRORS = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again",
    errno.EDQUOT: "the quota is used up; free some space and run the same command again",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "no permission; choose another folder or change its rights",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; `argv` is without the program's name."""
    if argv is None:
        argv = sys.argv[1:]
        restart_with_environment(argv)
    import click

    from podsmith.commands import podsmith

    try:
        result = podsmith.main(args=list(argv), prog_name="podsmith", standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        return _fail(str(error))
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.ctx.get_help() if error.ctx else error.message)
        return 0
    except click.ClickException as error:
        return _fail(usage_message(error))
    except (click.Abort, KeyboardInterrupt):
        print("\npodsmith: interrupted; run the same command again to go on", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        return _fail(f"{error.filename or 'output'}: {DISK_ERRORS[error.errno]}")
    return result if type(result) is int else 0


def _fail(message: str) -> int:
    print(f"podsmith: error: {message}", file=sys.stderr)
    return EXIT_USER_ERROR


def usage_message(error: Exception) -> str:
    """What click found, and where to read more."""
    message = error.format_message()
    context = getattr(error, "ctx", None)
    option = getattr(error, "option_name", "")
    if "." in option:
        return f"{option} is no option; fields of the run are set without dashes, as in a.b=c"
    return f"{message} (see {context.command_path} --help)" if context else message


def restart_with_environment(argv: Sequence[str]) -> None:
    """Starts this process anew with what must be set before it begins, where that helps.

    Huge pages make the training step on a CPU faster; glibc looks for the setting once, at
    the start. Whatever the user has set stays.
    """
    missing = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    if argv[:1] and argv[0] in COMPUTING_VERBS and missing and huge_pages_on_request():
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **missing})


def huge_pages_on_request() -> bool:
    """Whether this kernel gives huge pages to those who ask, and only to them."""
    try:
        return "[madvise]" in HUGE_PAGES.read_text()
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
