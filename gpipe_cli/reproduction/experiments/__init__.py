"""What recipes run and show: the function `reproduce` of the module that a recipe's `experiment` names."""
