"""Starts workers from a process that has imported everything once and holds no threads and no CUDA context.

The eighth worker starts as fast as the first, and the server imports while the parent still reads the command line.

This is not multiprocessing's fork server, whose socket stays in the temporary directory when its parent is killed; a
stopped server of that kind outlives its parent, with all that it has forked, and a parent that asks it for a process or
an exit code waits forever. Here the parent never waits for the server, and as soon as the parent ends, the kernel kills
the server, the workers and their data loaders.
"""

import importlib
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gpipe_cli.config.groups import AdamConfig, HuggingFaceConfig, ImagesConfig, SGDConfig, TextConfig, TimmConfig
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.system.forked_call import end_with_parent
from gpipe_cli.system.interrupts import STOP_SIGNALS, defer_signals

if TYPE_CHECKING:
    from gpipe_cli.launch.job import Job

# Every worker would import the second with its first operation on the meta device.
_IMPORTED = ["gpipe_cli.launch.worker", "torch.fx.experimental.symbolic_shapes"]
_EXIT_TIMEOUT_SECONDS = 2.0  # how long this process waits at its exit for the end of all that it has started
_SERVE = "import sys; sys.path[:] = sys.argv[1:]; from gpipe_cli.launch.fork_server import serve; serve({}, {})"
_IGNORED = (signal.SIGINT, *STOP_SIGNALS)  # by the server: its parent also gets them, and ends it and its workers


class Worker:
    """A process that the server has forked, or will fork once it has imported everything."""

    def __init__(self, connection: Connection, status: Connection, server: int) -> None:
        self.connection = connection  # to the worker itself
        self.status = status  # from the server: the worker's process id, then its exit code
        self._server = server
        self._received = bytearray()  # the part of a message that has arrived
        self.pid: int | None = None  # process id; None until the server has sent it
        self.exit_code: int | None = None  # minus the signal's number if a signal ended it

    def receive(self) -> Iterator[object]:
        """The messages that have arrived whole, once there is something to read; closes the connection at its end.
        `Connection.recv` would wait for the rest of a message, whose worker may have been stopped."""
        arrived = b""
        with suppress(ConnectionError):
            arrived = os.read(self.connection.fileno(), 1 << 20)
        if not arrived:
            self.connection.close()
        self._received += arrived
        # as `Connection.send` writes it: the length in four bytes, then the pickled message
        while len(self._received) >= (end := 4 + int.from_bytes(self._received[:4], "big")):
            message = pickle.loads(self._received[4:end])
            del self._received[:end]
            yield message

    def read_status(self) -> None:
        try:
            value = self.status.recv()
        except (EOFError, OSError):  # the server has ended, so the kernel has killed its workers
            self.exit_code = -signal.SIGKILL
            return
        if self.pid is None:
            self.pid = value
        else:
            self.exit_code = value

    def is_stopped(self) -> bool:
        """Whether the worker, or the server that is to fork it, is stopped (SIGSTOP) until it gets SIGCONT."""
        try:
            stat = Path(f"/proc/{self.pid or self._server}/stat").read_text(encoding="utf-8")
        except OSError:  # it has ended
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def kill(self) -> None:
        if self.pid is not None and self.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """The parent's handle of a server process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._imported = _IMPORTED
        self._starter = 0  # id of the process that has started the server; its forks use the same server

    def start(self, config: TrainConfig | None = None) -> tuple[int, socket.socket]:
        """Start the server, with the libraries of this run, unless it runs already: then it imports them before its
        next fork. Returns the server's process id and the socket to it, without waiting for the imports."""
        if config is not None:
            self._imported = [*_IMPORTED, *_libraries(config)]
        parent = os.getpid()
        ended = self._starter == parent and self._process is not None and self._process.poll() is not None
        if self._control is None or self._process is None or ended:
            self._control, servers_end = socket.socketpair()
            self._starter = parent

            # Without preexec_fn, which would run Python in a fork of this process, whose other threads may hold locks;
            # the signals wait until the server ignores them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
            with servers_end, defer_signals(), ExitStack() as stack:
                stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _SERVE.format(parent, self._imported), *sys.path],
                    stdin=servers_end.fileno(),
                    # CUDA is to number GPUs as system/gpus.py does
                    env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
                    | os.environ
                    | {"TMPDIR": str(temporary_folder()), "GLIBC_TUNABLES": _tunables()},
                    pass_fds=[_temporary()[1]],
                )
        return self._process.pid, self._control

    def fork(self, job: "Job", activity: int) -> Worker:
        """Have the server fork a worker that does `job`. `activity`: descriptor of a file that both parties map."""
        connection, workers_end = Pipe()
        status, servers_end = Pipe(duplex=False)
        with workers_end, servers_end, open(os.memfd_create("gpipe_job"), "wb") as file:
            pickle.dump(self._imported, file)
            pickle.dump((os.getcwd(), sys.path, job), file)
            file.flush()
            pid, control = self.start()
            descriptors = [workers_end.fileno(), servers_end.fileno(), file.fileno(), activity]
            socket.send_fds(control, [b"."], descriptors)
        return Worker(connection, status, pid)

    def kill(self) -> None:
        """Kill the server, in whatever state it is, and with it all workers that it has forked."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            if self._starter == os.getpid():
                self._process.wait()
            self._process = None


fork_server = ForkServer()  # the server of this process


def temporary_folder() -> Path:
    """The folder for all temporary files of this command's processes; removed when the last of them has ended."""
    return _temporary()[0]


@cache
def _temporary() -> tuple[Path, int]:
    """The temporary folder, and a descriptor that all processes of this command hold open.

    A killed parent cannot remove the folder, so a shell does, once no process holds the descriptor any more: a data
    loader that is about to end may look for its sockets in the folder after the parent has ended.
    """
    # Data loaders create sockets in it, whose whole path may have 107 characters at most.
    folder = tempfile.mkdtemp(prefix="gpipe_", dir=None if len(tempfile.gettempdir()) < 60 else "/tmp")
    nothing = subprocess.DEVNULL
    read_end, write_end = os.pipe()
    remover = subprocess.Popen(
        ["sh", "-c", 'trap "" TERM USR1; read -r _; rm -rf "$0"', folder],  # SLURM signals all processes
        stdin=read_end,
        stdout=nothing,
        stderr=nothing,
        start_new_session=True,  # not killed with the process group of this process
    )
    os.close(read_end)

    def remove() -> None:
        fork_server.kill()
        os.close(write_end)
        with suppress(subprocess.TimeoutExpired):  # a process that a user's layer has started may still run
            remover.wait(_EXIT_TIMEOUT_SECONDS)

    # after multiprocessing has removed its own folder, which is in this folder: that has priority -100
    Finalize(None, remove, exitpriority=-101)
    return Path(folder), write_end


def _tunables() -> str:
    """GLIBC_TUNABLES that make glibc ask for huge pages (2 MiB) when it allocates, unless the user has set that.

    On pages of 4 KiB, whose places in memory are up to chance, a quarter of the processes took 20 to 40 % longer for
    every layer throughout their lives.
    """
    given = os.environ.get("GLIBC_TUNABLES", "")
    return given if "glibc.malloc.hugetlb" in given else ":".join(filter(None, (given, "glibc.malloc.hugetlb=1")))


def _libraries(config: TrainConfig) -> list[str]:
    """The libraries that this run's workers need besides gpipe's; else every worker would import them."""
    libraries = ["timm"] if isinstance(config.model, TimmConfig) else []
    if isinstance(config.model, HuggingFaceConfig):
        libraries += ["transformers.modeling_utils", *(["peft"] if config.model.lora else [])]
    if isinstance(config.dataset, TextConfig) and config.dataset.tokenizer is not None:
        libraries.append("transformers.models.auto.tokenization_auto")
    if isinstance(config.dataset, ImagesConfig):
        augmentation = config.dataset.augmentation
        if config.dataset.root or (augmentation and (augmentation.random_resized_crop or augmentation.horizontal_flip)):
            libraries.append("torchvision.transforms.v2")
    if config.compile or isinstance(config.optimizer, SGDConfig | AdamConfig):  # torch's own optimizers, by their step
        libraries.append("torch._dynamo")
    return libraries


def _import(names: Sequence[str]) -> None:
    for name in names:
        with suppress(ImportError):  # the worker will report it
            importlib.import_module(name)


def serve(parent: int, imported: Sequence[str]) -> None:
    """The program of the server, until `parent` ends. `imported`: modules that it imports before it forks."""
    for ignored in _IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    end_with_parent(parent)
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as devnull:
        os.dup2(devnull.fileno(), 0)  # the workers have no input
    _import(imported)
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    statuses: dict[int, Connection] = {}
    server = os.getpid()
    while True:
        ready = wait([control, ended])
        if ended in ready:
            os.read(ended, 4096)
            with suppress(ChildProcessError):  # there are no children
                while (child := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                    with statuses.pop(child[0]) as status, suppress(OSError):
                        status.send(os.waitstatus_to_exitcode(child[1]))
        if control in ready:
            message, descriptors, _, _ = socket.recv_fds(control, 1, 4)
            if not message:
                return
            connection, status_end, job_file, activity = descriptors
            with open(job_file, "rb", closefd=False) as file:
                file.seek(0)
                _import(pickle.load(file))
            number = os.fork()
            if number == 0:
                for descriptor in (control.detach(), ended, wake, status_end):
                    os.close(descriptor)
                _be_worker(server, job_file, connection, activity)
            statuses[number] = Connection(status_end, readable=False)
            with suppress(OSError):  # the parent has closed it
                statuses[number].send(number)
            for descriptor in (connection, job_file, activity):
                os.close(descriptor)


def _be_worker(server: int, job_file: int, connection: int, activity: int) -> NoReturn:
    exit_code = 1
    try:
        end_with_parent(server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with open(job_file, "rb") as file:
            file.seek(0)
            pickle.load(file)  # what the server has imported
            folder, sys.path[:], job = pickle.load(file)
        os.chdir(folder)
        from gpipe_cli.launch.worker import main

        main(job, Connection(connection), memoryview(mmap.mmap(activity, 0)).cast("q"))
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)  # without exit handlers, which are the server's
