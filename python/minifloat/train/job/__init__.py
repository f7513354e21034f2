"""The runs of a job, on one process or several, and the files that survive a kill."""
