"""`lmwright`: one command per verb, each in the module of its kind.

Bad input from outside ends with one line and exit code 2, Ctrl-C with 130; anything else
that is raised is our mistake and keeps its traceback.
"""

import errno
import os
import re
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from lmwright import __version__
from lmwright.cli import cloud, config, data, models, runs
from lmwright.cli.adapters import adapters
from lmwright.cli.interrupt import note_interrupts, send_again, was_interrupted
from lmwright.cli.output import BrokenPipe, open_output
from lmwright.cli.publish import publish
from lmwright.cli.shared import InOrder
from lmwright.errors import ERROR, EXIT_INTERRUPTED, EXIT_USER_ERROR, StorageError, UserError
from lmwright.guard.parent import end_with_parent
from lmwright.guard.terminal import visible
from lmwright.guard.unread import EXIT_UNREAD, leave_output
from lmwright.guard.urls import redact_text
from lmwright.hardware import driver
from lmwright.hardware.environment import no_platform, set_environment

DISK_ERRORS = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again",
    errno.EDQUOT: "the quota is used up; free some space and run the same command again",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "no permission; choose another folder or change its rights",
    errno.EPERM: "not permitted; choose another folder or change its rights",
    errno.ENAMETOOLONG: "the name is too long; shorten it",
    errno.EISDIR: "a folder lies in the place of a file; move it away",
    errno.ENOTDIR: "a file lies in the place of a folder; move it away",
    errno.ELOOP: "its links lead in a circle; correct them",
    errno.EFBIG: "the file is larger than its disk or `ulimit -f` allows; choose another disk",
    errno.EMFILE: "too many files are open; raise `ulimit -n`",
    errno.ENOLCK: "the file system has no locks; choose another folder",
    errno.ESTALE: "the file server has lost it; run the same command again",
}


FULL = (errno.ENOSPC, errno.EDQUOT)

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(cls=InOrder, context_settings=CONTEXT)
@click.version_option(__version__, message="%(prog)s %(version)s")
def lmwright() -> None:
    """Prepare data, plan, train and ship language models: TPU, GPU or laptop.

    RUN is a run file (TOML) or a run directory; overrides such as train.steps=500 change
    single fields.

    \b
    Start here:  lmwright quickstart
    """
    refuse_folder()


def refuse_folder() -> None:
    """Raises UserError in a working directory that was deleted, where paths have no meaning and
    libraries that look for it end the process, and in one whose path libraries in C do not take."""
    try:
        os.getcwd().encode()
    except UnicodeEncodeError:
        raise UserError(
            f"the folder in which this command runs, {os.getcwd()!a}, has a name that is not "
            "UTF-8; rename it, or go to another one by cd"
        ) from None
    except FileNotFoundError:
        raise UserError(
            "the folder in which this command runs was deleted; go to another one by cd (or by "
            '`cd "$PWD"`, if it was made again)'
        ) from None


@lmwright.command()
@click.argument("folder", default="quickstart")
def quickstart(folder: str) -> Any:
    """Run the whole pipeline once, on Python's own source code.

    Text, tokenizer, training, evaluation, a sample, a report and a Hugging Face folder, in
    a few minutes, all below FOLDER. A second run continues where it stopped.

    \b
    Example:  lmwright quickstart
    """
    from lmwright.cli.quickstart import main

    return main(folder)


VERBS = (config.init, *data.VERBS, *config.VERBS, *runs.VERBS, *cloud.VERBS, *models.VERBS)
VERBS += (adapters, publish, runs.report)
for verb in VERBS:  # in the order in which they are used
    lmwright.add_command(verb)


READ_BY_PREPARE = re.compile(r"(recipe|depth|(data|model|objective)(\.[\w.-]+)?)=")
"""Overrides on which prepared data depends: rows have the model's length, say."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; `argv` is without the program's name."""
    open_output()
    end_with_parent()
    set_environment()
    sys.excepthook = show_exception
    note_interrupts()
    send_again()
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        result = lmwright.main(args=words, prog_name="lmwright", standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        return _fail(with_run_file(str(error), words), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.ctx.get_help() if error.ctx else error.message)
        return 0
    except click.ClickException as error:
        return _fail(usage_message(error))
    except (click.Abort, KeyboardInterrupt):
        return _interrupted()
    except BrokenPipe as error:  # the reader, `head` say, has seen enough
        if not leave_output(error.__cause__):
            raise
        return EXIT_UNREAD
    except BrokenPipeError as error:  # after the command had ended
        leave_output(error)
        return 0
    except (RuntimeError, AssertionError) as error:
        refused = of_card(error)
        if refused is None:
            raise
        return _fail(str(refused), refused.exit_code)
    except (ImportError, SystemError) as error:
        if not was_interrupted(error):
            raise
        return _interrupted()
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        where = error.filename2 or error.filename or "output"
        refused = StorageError(f"{where}: {DISK_ERRORS[error.errno]}")
        return _fail(str(refused), refused.exit_code if error.errno in FULL else EXIT_USER_ERROR)
    except Exception as error:
        # pydantic makes one of a Ctrl-C that comes while it builds a schema
        if type(error).__name__ != "SchemaError" or not was_interrupted(error):
            raise
        return _interrupted()
    return result if type(result) is int else 0


def of_card(error: BaseException) -> UserError | None:
    """The error to show for one of JAX on a platform that is not there, or an NVIDIA card that is
    lost or full; None for others."""
    if "jax" not in sys.modules:
        return None
    from lmwright.core.cards import out_of_memory

    refused = driver.refusal(error) or no_platform(error)
    return refused or out_of_memory(error, training=False)


def with_run_file(message: str, words: Sequence[str]) -> str:
    """A message whose `lmwright prepare` names the run file of `words`, and what it reads there."""
    for word in words[1:]:
        if word.endswith(".toml") or os.path.isfile(os.path.join(word, "run.toml")):
            read = [w for w in words if READ_BY_PREPARE.match(w)]
            return message.replace(
                "`lmwright prepare`", f"`{shlex.join(['lmwright', 'prepare', word, *read])}`"
            )
    return message


def show_exception(kind: Any, error: BaseException, trace: Any) -> None:
    """Prints an exception of ours as Python does, without credentials of URLs; not that of Ctrl-C,
    which libraries in C show before they raise another one."""
    if isinstance(error, KeyboardInterrupt):
        return
    text = "".join(traceback.format_exception(kind, error, trace))
    print(visible(redact_text(text)), end="", file=sys.stderr)


def _interrupted() -> int:
    print("\nlmwright: interrupted; run the same command again to continue", file=sys.stderr)
    return EXIT_INTERRUPTED


def _fail(message: str, exit_code: int = UserError.exit_code) -> int:
    print(f"{ERROR}{visible(message)}", file=sys.stderr)
    return exit_code


def usage_message(error: Exception) -> str:
    """Message for an error found by click, with a hint to the verb's help."""
    message = error.format_message().replace(" Did you mean '--help'?", "")
    message = re.sub(r"not a valid integer( range)?\b", "not a whole number", message)
    message = re.sub(r"not a valid float( range)?\b", "not a number", message)
    context = getattr(error, "ctx", None)
    option = getattr(error, "option_name", "")
    near = getattr(error, "possibilities", None) or ()
    takes = [param.name for param in context.command.params] if context else ()
    if "." in option or (option and "overrides" in takes and not set(near) - {"--help"}):
        return (
            f"{option} is not an option; fields of the run are set without dashes, as in "
            "train.steps=500"
        )
    if "unexpected extra argument" in message and "prompts" in takes:
        message += "; a prompt is given as --prompt TEXT"
    return f"{message} (see {context.command_path} --help)" if context else message


if __name__ == "__main__":
    sys.exit(main())
