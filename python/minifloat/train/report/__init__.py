"""The report of a job: the table and the figure."""
