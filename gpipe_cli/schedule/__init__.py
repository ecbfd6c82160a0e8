"""The schedule of a step as data, and what works on it without torch: orders, simulator, timeline, partitioner."""
