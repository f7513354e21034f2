"""`minifloat train`: a small Llama on real text, once a recipe, side by side.

config       a job's settings                   corpus, tokens, batches   text to batches
recipes      the runs of a job                  model                     the Llama
loop         one run                            checkpoint, metrics       files that survive a kill
job          all runs and the report            measure, report, plot     the report's numbers
command      the command line                   saved                     an earlier job's files
world        several processes                  fields, files, manifest   checks, writes, checksums
experts      load of experts                    expert_ranks, gradients   experts on several ranks
"""
