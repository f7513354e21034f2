"""`minifloat train`: a small Llama on real text, once a recipe, side by side.

config       what a job is asked                corpus, tokens, batches   text to batches
recipes      the runs of a job                  model                     the Llama
loop         one run                            checkpoint, metrics       what survives a kill
job          all runs and the report            measure, report, plot     what is told of them
command      the command line
"""
