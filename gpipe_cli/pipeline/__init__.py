"""GPipe itself (section 2 of the paper): plain arguments in, no settings, no printing; `schedule/` needs no torch."""
