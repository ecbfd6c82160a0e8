"""The GPipe library (paper section 2): takes plain arguments, prints nothing; `schedule/` does not need torch."""
