"""Temperature-based sampling of languages (paper, Section 5): p ~ share^(1/T), T = 5 in its supplement.

With 10^4 to 10^9 sentences a language, a model that sees each sentence once hardly sees the small ones; with equal
shares it repeats them for ever. The temperature chooses between the two: 1 is by share, infinity is equal shares.
"""

import numpy as np
import torch
from torch import Tensor

from gpipe_cli.data.seeds import seed_of


def language_quotas(counts: list[int], temperature: float) -> list[int]:
    """How many of sum(counts) draws each language gets: by share^(1/T), rounded to the largest remainders."""
    samples = sum(counts)
    weights = [(count / samples) ** (1 / temperature) if count else 0.0 for count in counts]
    exact = [samples * weight / sum(weights) for weight in weights]
    quotas = [int(share) for share in exact]
    by_remainder = sorted(range(len(counts)), key=lambda group: (quotas[group] - exact[group], group))
    for group in by_remainder[: samples - sum(quotas)]:
        quotas[group] += 1
    return quotas


class TemperatureSampler:
    """The draws of each epoch, as many as there are samples.

    A language's samples are one endless sequence of permutations, and epoch e takes its quota from place e * quota on:
    no sample comes again before all others of its language have come, from epoch to epoch too, and an epoch can be
    computed without those before it.
    """

    def __init__(self, groups: Tensor, temperature: float, seed: int) -> None:
        numbers = groups.numpy()
        counts = np.bincount(numbers)
        self._members = np.argsort(numbers, kind="stable")  # the samples, language by language
        self._firsts = np.cumsum(counts) - counts
        self._counts = counts
        self._quotas = np.array(language_quotas(counts.tolist(), temperature))
        self._seed = seed

    def draws(self, epoch: int) -> Tensor:
        """int64 (samples,), language by language."""
        present = np.flatnonzero(self._quotas)
        counts, quotas = self._counts[present], self._quotas[present]
        start = quotas * epoch
        first_pass, last_pass = start // counts, (start + quotas - 1) // counts
        # One row for each (language, pass) that the epoch touches; each is a whole permutation of the language.
        passes = last_pass - first_pass + 1
        language = np.repeat(present, passes)
        number = _count_up(passes) + np.repeat(first_pass, passes)
        places, permuted = self._permutations(language, number)
        row = np.repeat(np.arange(len(language)), self._counts[language])
        place = number[row] * self._counts[language[row]] + places
        window = self._quotas[language[row]] * epoch
        kept = (window <= place) & (place < window + self._quotas[language[row]])
        return torch.from_numpy(permuted[kept])

    def _permutations(self, language: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Permutation `number` of the samples of `language`, row after row, with each sample's place in its row.

        The order within a row is by a hash of (seed, language, number, sample): all rows are sorted at once, and a row
        does not depend on which others are asked for. A generator for each row would take a second for small languages.
        """
        sizes = self._counts[language]
        places, row = _count_up(sizes), np.repeat(np.arange(len(language)), sizes)
        samples = self._members[np.repeat(self._firsts[language], sizes) + places]
        seeds = _mixed(
            _mixed(language.astype(np.uint64) + np.uint64(seed_of("languages", self._seed))) ^ number.astype(np.uint64)
        )
        keys = _mixed(seeds[row] ^ _mixed(samples.astype(np.uint64)))
        bits = max(len(language) - 1, 1).bit_length()
        order = np.argsort((row.astype(np.uint64) << np.uint64(64 - bits)) | (keys >> np.uint64(bits)), kind="stable")
        return places, samples[order]


def _count_up(sizes: np.ndarray) -> np.ndarray:
    """0 .. size - 1 for each size, one after the other."""
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """uint64: each number's bits mixed, one to one (SplitMix64's output function: Steele, Lea and Flood, 2014)."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
