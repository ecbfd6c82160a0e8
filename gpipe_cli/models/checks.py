"""Checks of settings that several models have, each an error that names the setting as it is written."""


def check_sizes(**sizes: int) -> None:
    """Raise ValueError, naming the setting model.<name>, for a size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"model.{name}={size}: use 1 or more")


def check_probabilities(**probabilities: float) -> None:
    """Raise ValueError, naming the setting model.<name>, for a probability outside [0, 1)."""
    for name, probability in probabilities.items():
        if not 0 <= probability < 1:
            raise ValueError(f"model.{name}={probability}: a probability to drop; use 0 or more and less than 1")
