"""What `gpipe reproduce` makes of several recipes: a page, and the results in recipes/README.md."""
