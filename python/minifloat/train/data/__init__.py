"""The text of a job: its documents, their token ids, batches."""
