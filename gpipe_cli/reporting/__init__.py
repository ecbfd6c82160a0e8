"""What a person and later commands learn of a run, in the one process that is the parent of its workers."""
