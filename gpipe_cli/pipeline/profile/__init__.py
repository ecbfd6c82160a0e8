"""What layers cost and keep in memory, traced from shapes before anything is allocated."""
