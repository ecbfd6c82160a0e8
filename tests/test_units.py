import pytest

from gpipe_cli import units


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0"), (999, "999"), (1000, "1.00 k"), (999_960, "1.00 M"), (1_244_400, "1.24 M"), (155_300_000, "155.3 M")],
)
def test_count(number: int, words: str) -> None:
    assert units.count(number) == words


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0"), (999, "999"), (53_240_000, "53.2 M"), (999.96e6, "1.0 G"), (1.4e14, "140.0 T"), (5e21, "5,000 E")],
)
def test_operations(number: float, words: str) -> None:
    assert units.operations(number) == words


@pytest.mark.parametrize(("number", "words"), [(0, "0 B"), (2**20, "1.0 MiB"), (1.5 * 2**30, "1.5 GiB")])
def test_size(number: float, words: str) -> None:
    assert units.size(number) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0.0 ms"),
        (2e-7, "0.2 us"),
        (3.41e-5, "34.1 us"),
        (0.0625, "62.5 ms"),
        (0.9999, "1.0 s"),
        (59.96, "1 min 00 s"),
        (133, "2 min 13 s"),
        (3 * 3600 + 299, "3 h 04 min"),
    ],
)
def test_duration(seconds: float, words: str) -> None:
    assert units.duration(seconds) == words


def test_rounded_parts_add_up() -> None:
    """Each of them by itself would be rounded down, to 0.2 of 0.4 in all; a part may be below 0."""
    assert units.rounded({"a": 0.14, "b": 0.13, "c": 0.13}) == {"a": 0.2, "b": 0.1, "c": 0.1}
    assert units.rounded({"a": 10.16, "b": -0.06}) == {"a": 10.2, "b": -0.1}
    assert units.rounded({}) == {}


def test_what_is_not_known_is_a_dash_and_what_is_not_a_number_says_so() -> None:
    assert [units.percent(None), units.rate(None), units.loss(None), units.learning_rate(None)] == ["-"] * 4
    assert [units.percent(float("nan")), units.loss(float("nan")), units.loss(float("inf"))] == ["nan %", "nan", "inf"]


@pytest.mark.parametrize(
    ("perplexity", "words"),
    [
        (1.0, "1.00"),
        (9.994, "9.99"),
        (9.996, "10.0"),
        (41.34, "41.3"),
        (999.94, "999.9"),
        (999.96, "1,000"),
        (999_999.4, "999,999"),
        (999_999.5, ">1e+06"),
        (float("inf"), ">1e+06"),
        (float("nan"), "nan"),
        (None, "-"),
    ],
)
def test_perplexity(perplexity: float | None, words: str) -> None:
    assert units.perplexity(perplexity) == words


def test_rate_and_plural() -> None:
    assert [units.rate(999.94), units.rate(12_345.6)] == ["999.9", "12,346"]
    assert [units.rate(999_999.4), units.rate(999_999.5), units.rate(12_345_678.9)] == ["999,999", "1.00 M", "12.3 M"]
    assert [units.plural(1, "micro-batch"), units.plural(4, "micro-batch")] == ["1 micro-batch", "4 micro-batches"]
    assert units.plural(3, "epoch") == "3 epochs"
