"""The error that the user can fix."""


class InputError(ValueError):
    """A setting, a file or a model that cannot be used. The message is one line: its name and value, what is
    allowed, and the remedy.

    A command ends with this line and exit code 2. Any other exception is a fault of this program, of a library or of
    the machine: the command ends with its type, its traceback and exit code 1.
    """
