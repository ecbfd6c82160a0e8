"""What gpu_acceptance.py needs on a machine that has torch and a GPU, but neither gpipe nor a network: wheels of what
is missing there, and a command line for each call. They are rehearsed here as if this machine were that one.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What gpipe and gpu_acceptance.py need, and images with PyTorch for CUDA do not have. Where no version is named, it is
# that of this machine, so that they suit each other.
MISSING = "hydra-core,omegaconf,antlr4-python3-runtime,Babel,torchgpipe==0.0.7"
PYTHON, PLATFORMS = "3.12", ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
CARRIED_MIB = 64  # limit of the kit and the checkout together
COMMAND_SECONDS = 600  # limit of a call
INSTALLATION_SECONDS = 75  # at most, with the imports and the end of the call
# Becomes the command that it is given, in a namespace with a loopback interface and a host name that nothing resolves.
ALONE = """
import fcntl, os, socket, struct, sys
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh22x", b"lo", 0x41))  # SIOCSIFFLAGS: up and running
socket.sethostname("no-such-host")
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Refused(Exception):
    """One line that says why there is no kit or no rehearsal, and what to do."""


@dataclass(frozen=True)
class Done:
    """A command line that was rehearsed."""

    table: Path  # the file that it should have left
    seconds: float
    code: int
    printed: str


def pack(kit: Path, missing: Sequence[str]) -> str:
    """Fill the folder ``kit`` with a wheel of gpipe, made from the checkout as it is, and one of each requirement in
    ``missing``, in the version that is installed here unless it names another; returns a line with its size.

    Raises Refused if a wheel cannot be had, or if there is too much to carry.
    """
    if kit.exists() and any(one.suffix != ".whl" for one in kit.iterdir()):
        raise Refused(f"--pack={kit}: has other files than wheels; name another folder, which is replaced")
    shutil.rmtree(kit, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        source, built = Path(temporary) / "source", Path(temporary) / "built"
        copy_checkout(source)
        carried = size_mib(source)
        sources = [str(source)]
        for name in missing:
            installed = [one.version for one in metadata.distributions(name=name)]
            wanted = f"{name}=={installed[0]}" if installed else name
            elsewhere = [f"--python-version={PYTHON}", *(f"--platform={platform}" for platform in PLATFORMS)]
            if pip("download", "--only-binary=:all:", *elsewhere, f"--dest={kit}", wanted):
                sources.append(wanted)
        if failure := pip("wheel", "--no-build-isolation", f"--wheel-dir={built}", *sources):
            raise Refused(failure)
        kit.mkdir(parents=True, exist_ok=True)
        for wheel in built.iterdir():
            if not wheel.name.endswith("-none-any.whl"):
                raise Refused(f"{wheel.name}: is for this machine; there is none for Python {PYTHON} on Linux")
            shutil.move(wheel, kit)
    size = size_mib(kit)
    if size + carried > CARRIED_MIB:
        raise Refused(
            f"--pack={kit}: {size:.0f} MiB and {carried:.0f} of the checkout are more than the {CARRIED_MIB} MiB that "
            "may be carried; name fewer packages with --missing"
        )
    return f"{kit}: {size:.1f} MiB in {len([*kit.iterdir()])} wheels; the checkout has {carried:.1f} MiB"


def pip(command: str, *arguments: str) -> str:
    """Run a command of pip; returns the last line of its failure, or ''."""
    line = [sys.executable, "-m", "pip", command, "-q", "--no-deps", "--disable-pip-version-check", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    return (done.stderr.strip().splitlines() or [f"pip {command}: failed"])[-1] if done.returncode else ""


def inside(kit: Path) -> Path:
    """The path of ``kit`` in the checkout that carries it: at its root if it is outside of this one."""
    kit = kit.resolve()
    return kit.relative_to(ROOT) if kit.is_relative_to(ROOT) else Path(kit.name)


def copy_checkout(to: Path) -> None:
    """Copy the tracked files, and the untracked ones that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, check=False
    )
    if listed.returncode:
        raise Refused(f"{ROOT}: is not a git repository, whose files could be listed")
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file() and not name.endswith(".whl"):  # a kit may not be ignored, a file be deleted
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def size_mib(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20


def commands(kit: Path, folder: str, calls: int) -> list[str]:
    """A command line for each call, in bash, for the root of the checkout. The system's packages stay as they are."""
    wheels = f"{shlex.quote(str(inside(kit)))}/*.whl"
    return [
        f"site=$(mktemp -d) && python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir"
        f' --disable-pip-version-check --target "$site" {wheels} &&'
        f' PYTHONPATH="$site${{PYTHONPATH:+:$PYTHONPATH}}" python3 recipes/measurements/gpu_acceptance.py'
        f' --device=cuda --call={call + 1} --folder="{folder}"'
        for call in range(calls)
    ]  # fmt: skip


def rehearse(kit: Path, python: Path, calls: Sequence[int], place: Path, *options: str) -> Iterator[tuple[int, Done]]:
    """Run the command lines of ``calls``, with ``options`` added, on a fresh copy of the checkout with nothing but
    ``kit`` and the packages of the interpreter ``python``, and without a network where this is permitted.

    Raises Refused if there is no kit, or ``python`` cannot be that machine's python3.
    """
    python = python.absolute()
    if not any(kit.glob("*.whl")):
        raise Refused(f"--rehearse={kit}: has no wheels; make it with --pack={kit}")
    if not (python.parent / "python3").exists():
        raise Refused(f"--python={python}: there is no python3 beside it; name one of a virtual environment")
    copy_checkout(place / "checkout")
    shutil.copytree(kit, place / "checkout" / inside(kit))
    alone = ["unshare", "--map-root-user", "--net", "--uts", sys.executable, "-c", ALONE]
    if subprocess.run(["env", *alone, "true"], capture_output=True, check=False).returncode:
        print("rehearsal: unshare is not permitted here, so that nothing but pip is kept off the network")
        alone = []
    for call in calls:
        home = place / f"home_{call}"
        home.mkdir()
        environment = {"HOME": str(home), "TMPDIR": str(home), "OUT": str(home / "out"), "PIP_CONFIG_FILE": os.devnull,
                       "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin"}  # fmt: skip
        command = " ".join([commands(kit, "$OUT", call)[-1], *options])
        began = time.monotonic()
        done = subprocess.run(
            ["timeout", str(COMMAND_SECONDS), *alone, "bash", "-c", command], cwd=place / "checkout", env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        yield call, Done(home / "out/gpu_acceptance.json", time.monotonic() - began, done.returncode, done.stdout)
