"""Reads the environment variables that torchrun sets for its processes."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from gpipe_cli.errors import InputError, shorten

_MAX_PROCESSES = 10_000  # the most processes of a run, each with a partition
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_WAIT_LIMIT: ContextVar[float | None] = ContextVar("wait_limit", default=None)


class Torchrun(NamedTuple):
    """This process's place among several that torchrun has started."""

    rank: int
    world_size: int
    local_world_size: int  # processes on this machine
    local_rank: int  # number of this process on its machine, and of its GPU


def read_torchrun_env() -> Torchrun | None:
    """This process's place among the processes that torchrun has started; None: the command starts its own processes.

    Raises:
        InputError: the variables contradict each other, or a variable is not a number.
    """
    world_size = _number("WORLD_SIZE", 1, _MAX_PROCESSES, 1)
    rank = _number("RANK", 0, world_size - 1, 0)
    if world_size == 1:
        return None
    if not os.environ.get("MASTER_ADDR"):
        raise InputError(
            f"WORLD_SIZE={world_size}: torchrun also sets MASTER_ADDR, which is missing; start gpipe by torchrun, "
            "or unset WORLD_SIZE and RANK"
        )
    store_address()
    local_world_size = _number("LOCAL_WORLD_SIZE", 1, world_size, world_size)
    local_rank = _number("LOCAL_RANK", 0, local_world_size - 1, rank % local_world_size)
    return Torchrun(rank, world_size, local_world_size, local_rank)


def describe_variables() -> str:
    """The variables that are set, as NAME=VALUE, and what to do if another program has left them."""
    are_set = [f"{name}={shorten(os.environ[name])}" for name in _VARIABLES if name in os.environ]
    return f"{' '.join(are_set)}: if nothing has started these processes together, unset them"


@contextmanager
def limit_waits(seconds: float) -> Iterator[None]:
    """While active, this process waits no longer than this for the others, which may not exist: another program may
    have left the variables."""
    before = _WAIT_LIMIT.set(seconds)
    try:
        yield
    finally:
        _WAIT_LIMIT.reset(before)


def get_wait_limit() -> float | None:
    """How many seconds this process waits for others; None: nothing has been set."""
    return _WAIT_LIMIT.get()


def check_not_torchrun(why: str) -> None:
    """Under torchrun, raise InputError with `why` (reason and remedy): for commands that run in a single process."""
    if read_torchrun_env() is not None:
        raise InputError(f"torchrun: {why}; {describe_variables()}")


def store_address() -> tuple[str, int]:
    """Host and port of the store through which the processes find each other. Raises InputError for an invalid port."""
    return os.environ.get("MASTER_ADDR", "localhost"), _number("MASTER_PORT", 1, 65535, 29500)


def may_restart() -> bool:
    """Whether the store is torchrun's, which outlives this process: torchrun may start the process again."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_rank_zero() -> bool:
    """Whether this is process 0, which reports."""
    try:
        torchrun = read_torchrun_env()
    except InputError:  # every process then reports the error
        return True
    return torchrun is None or torchrun.rank == 0


def _number(name: str, low: int, high: int, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not re.fullmatch("[0-9]{1,18}", text) or not low <= int(text) <= high:
        raise InputError(
            f"{name}={shorten(text)!r}: torchrun sets it to a whole number from {low} to {high}; start gpipe by "
            f"torchrun, or unset {name}"
        )
    return int(text)
