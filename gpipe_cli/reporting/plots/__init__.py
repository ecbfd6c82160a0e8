"""Pictures: timelines, partitions, shares, curves; and the style that they share."""
