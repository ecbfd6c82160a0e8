"""The error that the person at the command line can mend."""


class InputError(ValueError):
    """A setting, a file or a model that cannot be used. The message is one line: what it is and its value, what is
    allowed, the remedy.

    A command ends with this line and exit code 2. Any other exception is a fault of this program, of a library or of
    the machine, and ends with its type, its traceback and exit code 1.
    """
