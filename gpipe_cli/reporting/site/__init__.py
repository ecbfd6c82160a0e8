"""The site that teaches pipelining: a front page that explains it, and an explorer of presets."""
