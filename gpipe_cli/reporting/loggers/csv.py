"""metrics.csv: the curves of a run as a table, with a row for each step and a column for each tag.

New rows are appended in one write. Only a new tag, or a point of an older step, such as a test score, makes the logger
rewrite the file, atomically. A killed run therefore leaves a readable file.
"""

import csv
import errno
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from gpipe_cli.reporting.loggers.logger import RunLogger
from gpipe_cli.reporting.run.description import RunContext
from gpipe_cli.reporting.run.lines import show_error
from gpipe_cli.system.files import errors_name_path, open_regular, write_atomic
from gpipe_cli.units import plural

NAME = "metrics.csv"
_ROW = re.compile(rb"\d{1,18}(,([-+.\de]*|-?(nan|inf)))*\r?\n")


class Logger(RunLogger):
    remote = False
    needs = None

    def __init__(self, folder: Path, run: RunContext, facts: Mapping[str, str]) -> None:
        """A resumed run repeats the steps after its checkpoint: their rows are removed."""
        self._path = folder / NAME
        self._rows: dict[int, dict[str, float]] = {}  # step -> values not yet written
        self._tags: list[str] = []  # the columns after `step`
        self._columns = 0  # number of these tags that are columns of the file
        self._size = 0  # size of the file in bytes
        self._last = run.ready.first_step  # the last step of the file
        with errors_name_path(self._path):
            if self._path.exists():
                if run.ready.first_step:
                    self._read_tags()
                self._rewrite()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._rows.setdefault(step, {}).update(values)
        self._tags += [tag for tag in values if tag not in self._tags]

    def flush(self) -> None:
        if not self._rows:
            return
        if len(self._tags) > self._columns or min(self._rows) <= self._last:
            self._rewrite()
        else:
            new = b"".join(self._line(step, {}) for step in sorted(self._rows))
            with errors_name_path(self._path), self._path.open("r+b", buffering=0) as file:
                file.seek(self._size)  # overwrite what a failed write has left
                written = 0
                while written < len(new):
                    written += file.write(new[written:])
            self._size += len(new)
        self._last = max(self._last, *self._rows)
        self._rows.clear()

    def end(self, status: str, files: Sequence[Path]) -> None:
        self.flush()

    def _rewrite(self) -> None:
        write_atomic(self._path, self._merge_lines())
        self._columns = len(self._tags)
        self._size = self._path.stat().st_size

    def _read_tags(self) -> None:
        """Take the columns of the file; a warning counts damaged rows. Raises OSError if it has no columns."""
        with open_regular(self._path) as file:
            head = file.readline().decode(errors="replace")
            lines = sum(line.endswith(b"\n") for line in file)
        try:
            step, *self._tags = next(csv.reader([head]), [""])
        except csv.Error:
            step = ""
        if step != "step":
            raise OSError(errno.EINVAL, "its first line names no columns; move it away")
        self._columns = len(self._tags)
        if damaged := lines - sum(1 for _ in self._rows_in_file()):
            show_error(f"warning: {self._path}: {plural(damaged, 'damaged line')} left out")

    def _rows_in_file(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Step and values of each row in the file, without the last if it is incomplete, and without damaged rows: a
        power failure may leave zeros instead of what was written last."""
        with open_regular(self._path) as file:
            file.readline()
            for line in file:
                if _ROW.fullmatch(line) and line.count(b",") == self._columns:
                    step, *values = line.decode().strip().split(",")
                    yield int(step), dict(zip(self._tags, values, strict=False))

    def _merge_lines(self) -> Iterator[bytes]:
        """The lines of the file up to step `_last`, merged with the values not yet written."""
        yield _line(["step", *self._tags])
        written_steps = set()
        for step, row in self._rows_in_file() if self._path.exists() else ():
            if step <= self._last:
                written_steps.add(step)
                yield self._line(step, row)
        yield from (self._line(step, {}) for step in sorted(self._rows.keys() - written_steps))

    def _line(self, step: int, row: Mapping[str, str]) -> bytes:
        values = {**row, **self._rows.get(step, {})}
        return _line([step, *(values.get(tag, "") for tag in self._tags)])


def _line(cells: Iterable[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
