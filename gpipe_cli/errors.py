"""The errors that the user can fix, how their messages write values, and the exit codes of commands."""

import unicodedata

FAILED, BAD_INPUT = 1, 2
STOPPED = 3  # by SIGTERM, SIGUSR1 or SIGHUP
INTERRUPTED, SIGPIPE_EXIT = 130, 141  # as shells report SIGINT and SIGPIPE; the latter: `gpipe ... | head`


class InputError(ValueError):
    """A setting, a file or a model that cannot be used. The message is one line: its name and value, what is
    allowed, and the remedy.

    A command ends with this line and exit code 2. Any other exception is a fault of this program, of a library or of
    the machine: the command ends with its type, its traceback and exit code 1.
    """


class NothingFitsError(InputError):
    """No candidate fits the memory limit, however it is cut; the message has the excess, and what would fit."""


class InvalidSettingError(InputError):
    """A setting has an invalid value: `model.filters=0: why; remedy`. `diagram`: lines to print below the message."""

    def __init__(self, key: str, value: object, why: str, diagram: str = "") -> None:
        super().__init__(key, value, why, diagram)
        self.key, self.value, self.why, self.diagram = key, value, why, diagram

    def __str__(self) -> str:
        return f"{self.key}={format_value(self.value)}: {self.why}"


class InvalidValueError(InvalidSettingError):
    """A value that is invalid whatever the other settings are: a sweep that has it must not start any run."""


def format_value(value: object) -> str:
    """A value as it is written on the command line: `null`, `true`, `[4,8]`."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list() | tuple():
            return "[" + ",".join(format_value(item) for item in value) + "]"
        case dict():
            return "{" + ",".join(f"{key}:{format_value(item)}" for key, item in value.items()) + "}"
        case _:
            return "".join(c if unicodedata.category(c) not in ("Cc", "Cs") else ascii(c)[1:-1] for c in str(value))


def shorten(text: str) -> str:
    """A text for an error message, cut if it is long, such as a number with thousands of digits."""
    return text if len(text) <= 60 else f"{text[:20]}..."


def is_one_line(text: str) -> bool:
    """Whether a text is not empty and has neither control characters nor bytes that are not UTF-8."""
    return text != "" and not any(unicodedata.category(character) in ("Cc", "Cs") for character in text)


def error_text(error: BaseException) -> str:
    """The message of a library's exception on one line; of an OSError the file and the reason."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip()) or type(error).__name__


def describe_error(error: BaseException) -> str:
    """An exception's type and text: the text of a KeyError alone is only the key."""
    return f"{type(error).__name__}: {error_text(error)}"
