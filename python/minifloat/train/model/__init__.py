"""The model of a job: the Llama, and what is measured of it."""
