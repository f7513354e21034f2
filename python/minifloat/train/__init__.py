"""`minifloat train`: a small Llama on real text, once a recipe, side by side.

command    the command line             interrupt        Ctrl-C during imports
config     a job's settings             recipes          its runs
checks     values from outside          durable_files    files that survive a kill
data       text to batches              model/           the Llama, and what is measured of it
report     the table and the figure     job/             the runs, checkpoints
"""
