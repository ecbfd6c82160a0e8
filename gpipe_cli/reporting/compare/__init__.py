"""Several runs beside each other: `gpipe compare`."""
