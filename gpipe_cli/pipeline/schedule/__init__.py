"""The schedule as data, and what reads it without a tensor: order, simulator, timeline, partition. No torch."""
