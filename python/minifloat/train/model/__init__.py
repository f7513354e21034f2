"""The model of a job: the Llama, its sizes, and what is measured of it."""
