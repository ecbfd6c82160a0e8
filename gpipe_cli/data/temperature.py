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


def temperature_draws(groups: Tensor, temperature: float, seed: int, epoch: int) -> Tensor:
    """int64 (samples,): what an epoch draws of samples whose languages are `groups`, language by language.

    A language's samples are one endless sequence of permutations, and epoch e takes its quota from place e * quota on:
    no sample comes again before all others of its language have come, from epoch to epoch too, and an epoch can be
    computed without those before it.

    The order of a permutation is by a hash of (seed, language, its number, sample): all are sorted at once. A generator
    for each would take a second for small languages.
    """
    of = groups.numpy()
    counts = np.bincount(of)
    quotas = np.array(language_quotas(counts.tolist(), temperature))
    start = quotas * epoch
    # One row for each (language, permutation) that the epoch touches.
    first = start // np.maximum(counts, 1)
    rows = np.where(quotas > 0, (start + quotas - 1) // np.maximum(counts, 1) - first + 1, 0)
    language = np.repeat(np.arange(len(counts)), rows)
    number = np.repeat(first, rows) + _count_up(rows)
    seeds = _mixed(
        _mixed(language.astype(np.uint64) + np.uint64(seed_of("languages", seed))) ^ number.astype(np.uint64)
    )
    # Each row has all samples of its language.
    sizes = counts[language]
    row, place = np.repeat(np.arange(len(language)), sizes), _count_up(sizes)
    members = np.argsort(of, kind="stable")  # the samples, language by language
    samples = members[(np.cumsum(counts) - counts)[language[row]] + place]
    samples = samples[np.lexsort((_mixed(seeds[row] ^ _mixed(samples.astype(np.uint64))), row))]
    at = number[row] * sizes[row] + place - start[language[row]]
    return torch.from_numpy(samples[(at >= 0) & (at < quotas[language[row]])])


def _count_up(sizes: np.ndarray) -> np.ndarray:
    """0 .. size - 1 for each size, one after the other."""
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """uint64: each number's bits mixed, one to one (SplitMix64's output function: Steele, Lea and Flood, 2014)."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
