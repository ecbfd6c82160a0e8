"""`gpipe check`: whether pipelines that must be equivalent compute the same bits (law 1)."""
