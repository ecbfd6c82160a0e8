"""Decoding: the search finds what an enumeration finds, and neither the cut nor the batch changes a translation."""

import math
from dataclasses import replace

import pytest
from decode_runs import (
    FORBIDDEN,
    LAYERS,
    PIECES,
    SOURCES,
    Case,
    decode_here,
    patient,
    source_tokens,
)

from gpipe_cli.data.vocabulary import END
from gpipe_cli.training.translation import Beam


@pytest.mark.parametrize(("beam", "length_penalty"), [(1, 2.0), (2, -1.0), (5, 0.6), (3**5, 2.0)])
def test_stopping_early_changes_no_translation(beam: int, length_penalty: float) -> None:
    """A beam of 243 of at most 5 tokens is wide enough for all translations: three pieces, and the end."""
    different = set()
    for seed in (2, 11):
        limit = 5 if beam == 3**5 else 12
        case = Case(beam=beam, length_penalty=length_penalty, seed=seed, limit=limit, indices=(0, 2, 6, 10))
        found = decode_here(case)
        assert found == [patient(case, index) for index in case.indices]
        different |= set(map(tuple, found))
    assert len(different) > 1


def test_cut_micro_batches_and_batches_do_not_matter() -> None:
    assert decode_here(Case(indices=())) == []
    for case in (Case(seed=2, limit=9), Case(beam=3, seed=11, length_penalty=2.0, limit=9)):
        expected = decode_here(replace(case, micro_batches=1, batch_sentences=len(SOURCES)))
        assert len(set(map(tuple, expected))) > 3
        for partitions, micro_batches, batch_sentences in ((1, 5, 1), (2, 2, 100), (2, 1, 5), (LAYERS, 32, 12)):
            other = replace(case, partitions=partitions, micro_batches=micro_batches, batch_sentences=batch_sentences)
            assert decode_here(other) == expected, other


def test_a_translation_is_cut_off_at_the_limit_or_by_its_source() -> None:
    """At most `limit` tokens, and at most 2 n + 10 for a source of n."""
    for limit, indices in ((9, (0, 7)), (16, (0, 7)), (40, (0, 7))):
        case = Case(limit=limit, indices=indices, seed=2)
        found = [len(tokens) for tokens in decode_here(case, bias={END: -1e4})]
        assert found == [min(limit, 2 * len(source_tokens(index)) + 10) for index in indices]
    assert found == [20, 18]


@pytest.mark.parametrize(("beam", "partitions"), [(1, 1), (3, 3)])
def test_nothing_forbidden_is_ever_chosen(beam: int, partitions: int) -> None:
    """Not even by a model that wants nothing else, and does not want to end either."""
    bias = dict.fromkeys(FORBIDDEN, 1e3) | {END: -1e3}
    found = decode_here(Case(beam=beam, partitions=partitions, seed=2, limit=5), bias=bias)
    assert [len(translation) for translation in found] == [5] * len(SOURCES)
    assert {token for translation in found for token in translation} <= set(PIECES)


def test_a_model_that_returns_no_numbers_translates_nothing() -> None:
    assert decode_here(Case(beam=2), bias=dict.fromkeys(range(8), math.nan)) == [[]] * len(SOURCES)
    beam = Beam(Case(beam=2, length_penalty=0.0).search, 9)
    beam.advance([[(END, math.nan), (5, math.nan), (6, -math.inf)]])
    assert not beam.growing
    assert beam.is_final
