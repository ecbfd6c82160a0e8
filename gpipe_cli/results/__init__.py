"""What runs, plans and sweeps leave behind, as types; and the measures that reports choose from."""
