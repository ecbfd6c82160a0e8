"""What a run will take, before anything is allocated: costs, cut, memory of stages, time of a step, and the search."""
