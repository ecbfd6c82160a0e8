"""The site that teaches pipelining: a front page that explains it, with a link to the page of a plan."""
