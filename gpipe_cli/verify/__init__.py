"""`gpipe check`: whether pipelines that differ in what must not matter compute the same bits (law 1)."""
