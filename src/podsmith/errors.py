"""The one exception a user may cause.

`UserError` carries one clear sentence: what (file, line, dotted field), what was wrong,
and the cure. The command line prints it without a traceback and exits with code 2.
"""


class UserError(Exception):
    """Bad input from outside; `str(error)` is the whole message."""
