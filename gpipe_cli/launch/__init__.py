"""The parent process of a run: prepares a job, starts and supervises its workers, passes on their reports."""
