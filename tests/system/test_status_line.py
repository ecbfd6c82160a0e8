"""What a command is doing is also named outside a terminal if it takes long and no other program reads the output."""

import pytest

from gpipe_cli.system import status_line as module
from gpipe_cli.system.status_line import end_phase, name_long_phases, phase, phases


def test_a_phase_that_takes_long_gets_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(doing: str, seconds: float, *, at_once: bool) -> str:
        monkeypatch.setattr(module, "_LONG_SECONDS", seconds)
        assert not phase(doing), "no terminal shows it"
        if at_once:
            end_phase()
        line = module._LINE.get()
        if line is not None and line.timer is not None:
            line.timer.join()
        return capsys.readouterr().out

    with phases():
        assert ended("reading the settings", 0.0, at_once=False) == ""
        name_long_phases()
        assert ended("tracing the layers", 0.0, at_once=False) == "tracing the layers ...\n"
        assert ended("planning a step", 60.0, at_once=True) == ""
    assert ended("outside", 0.0, at_once=False) == ""
