from itertools import product

from gpipe_cli.pipeline.runtime.randomness import mix, seed_of_name


def test_the_numbers_are_the_same_everywhere() -> None:
    """Fixed: another machine, process or version must resume a run with the same masks."""
    assert mix(0) == mix(0)
    assert mix(1, 2, 3) != mix(3, 2, 1)
    assert seed_of_name(0, "stem") == seed_of_name(0, "stem")
    # SplitMix64 of a zero state that takes in a zero, computed by hand from its published constants
    state = (0x9E3779B97F4A7C15 * 2) & (2**64 - 1)
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    assert mix(0) == state ^ (state >> 31)


def test_neighbours_do_not_collide() -> None:
    """Sums of (step, micro-batch, layer) would: (1, 0, 0) and (0, 1, 0) drew the same masks."""
    seeds = [mix(*values) for values in product(range(2), range(20), range(2), range(8), range(20))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert len({seed_of_name(run, name) for run in range(9) for name in ("a", "b", "ab", "cell_1", "cell_10")}) == 45
