"""What servers read: folders of codes, written and loaded, and the scales of inputs.

schemes            the table of formats: specs, names, shapes and algorithms, for both ways

export             mf.export: the order of work, the checks, the files
  weights          which parameters become codes, under which names, and what is against it
  codes            the tensors of one layer
  scales           scales of whole tensors, and what servers compute as one
  configuration    config.json and hf_quant_config.json
calibrate          mf.calibrate: the largest inputs, for scales that are known before
folders            the command `minifloat export`

load               mf.load_quantized_: the order of work, specs, recipes
  read_checkpoint  the files, and who wrote them
  read_codes       the quantized weights among their tensors
  read_targets     the parameter that each tensor is of
restore            mf.restore_(model, folder): original weights in the place of codes

ranks              what all ranks tell each other
"""
