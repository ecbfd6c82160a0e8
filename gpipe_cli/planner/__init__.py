"""What a run will take, before anything is allocated: costs, placement, memory of stages, and the search."""
