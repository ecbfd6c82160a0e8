"""The error that the user can fix, and the exit codes of commands."""

FAILED, BAD_INPUT = 1, 2
STOPPED = 3  # by SIGTERM or SIGUSR1
INTERRUPTED, UNREAD = 130, 141  # as shells report SIGINT and SIGPIPE; the latter: `gpipe ... | head`


class InputError(ValueError):
    """A setting, a file or a model that cannot be used. The message is one line: its name and value, what is
    allowed, and the remedy.

    A command ends with this line and exit code 2. Any other exception is a fault of this program, of a library or of
    the machine: the command ends with its type, its traceback and exit code 1.
    """
