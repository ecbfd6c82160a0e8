"""How many samples of each language an epoch draws, and which: temperature sampling.

The paper samples small languages more often than in proportion to their data: p ~ fraction^(1/T), T = 5 in its
supplement; T = 1 is in proportion, infinity is uniform.
"""

import numpy as np
import torch
from torch import Tensor


def language_quotas(counts: list[int], temperature: float) -> list[int]:
    """How many of sum(counts) draws each language gets: by fraction^(1/T), rounded up at the largest remainders."""
    samples = sum(counts)
    weights = [(count / samples) ** (1 / temperature) if count else 0.0 for count in counts]
    exact = [samples * weight / sum(weights) for weight in weights]
    quotas = [int(quota) for quota in exact]
    by_remainder = sorted(range(len(counts)), key=lambda group: (quotas[group] - exact[group], group))
    for group in by_remainder[: samples - sum(quotas)]:
        quotas[group] += 1
    return quotas


def draw_by_temperature(groups: Tensor, temperature: float, seed: int, epoch: int) -> Tensor:
    """int64 (samples,): the samples that an epoch draws, language by language. groups: each sample's language.

    Each language has an endless sequence of permutations of its samples, and epoch e takes its quota starting at place
    e * quota: no sample recurs before all others of its language were drawn, and an epoch does not depend on earlier
    epochs. A permutation sorts its samples by a hash of (seed, language, index of the permutation, sample): sorting
    once makes all permutations, which is faster than a generator for each.
    """
    language_of_sample = groups.numpy()
    counts = np.bincount(language_of_sample)
    quotas = np.array(language_quotas(counts.tolist(), temperature))
    start = quotas * epoch
    # One row for each (language, permutation) that the epoch uses.
    first = start // np.maximum(counts, 1)
    rows = np.where(quotas > 0, (start + quotas - 1) // np.maximum(counts, 1) - first + 1, 0)
    language = np.repeat(np.arange(len(counts)), rows)
    number = np.repeat(first, rows) + _count_up(rows)
    seeds = _mix_bits(language.astype(np.uint64) + np.uint64(seed))
    seeds = _mix_bits(seeds ^ number.astype(np.uint64))
    # Expand each row to all samples of its language.
    sizes = counts[language]
    row, place = np.repeat(np.arange(len(language)), sizes), _count_up(sizes)
    members = np.argsort(language_of_sample, kind="stable")  # the samples, language by language
    samples = members[(np.cumsum(counts) - counts)[language[row]] + place]
    samples = samples[np.lexsort((_mix_bits(seeds[row] ^ _mix_bits(samples.astype(np.uint64))), row))]
    position = number[row] * sizes[row] + place - start[language[row]]
    return torch.from_numpy(samples[(position >= 0) & (position < quotas[language[row]])])


def _count_up(sizes: np.ndarray) -> np.ndarray:
    """0 .. size - 1 for each size, concatenated."""
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _mix_bits(numbers: np.ndarray) -> np.ndarray:
    """uint64: each number's bits mixed, one to one (SplitMix64's output function: Steele, Lea and Flood, 2014)."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
