"""The page that explains a plan or a run, and simulates other settings."""
