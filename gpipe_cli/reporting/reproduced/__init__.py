"""The output of `gpipe reproduce` for several recipes: a page, and the results in recipes/README.md."""
