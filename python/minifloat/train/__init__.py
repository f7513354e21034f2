"""`minifloat train`: a small Llama on real text, once a recipe, side by side.

config     a job's settings and runs    checks           values from outside
data       text to batches              durable_files    files that survive a kill
model/     the Llama, measurements      job/             the runs, checkpoints, metrics
report     the table and the figure     interrupt        Ctrl-C during imports
inspect_run    `minifloat inspect`
"""
