"""What layers cost and keep, found from shapes before anything is allocated."""
