"""The site that teaches pipelining: a front page that explains it, and leads to the page of a plan."""
