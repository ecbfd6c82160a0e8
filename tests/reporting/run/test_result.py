from pathlib import Path

from gpipe_cli.reporting.run.result import RESULT, read_result, write_result


def test_round_trip_and_what_is_no_number_becomes_null(tmp_path: Path) -> None:
    given = {"loss": float("nan"), "deep": [{"x": float("inf")}, (1, -float("inf"), 0.1)], "at": tmp_path, "text": "ä"}
    write_result(tmp_path, given)
    expected = {"loss": None, "deep": [{"x": None}, [1, None, 0.1]], "at": str(tmp_path), "text": "ä"}
    assert read_result(tmp_path) == expected
    assert "NaN" not in (tmp_path / RESULT).read_text()
