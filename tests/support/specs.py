"""The specs that tests of one operand run over: every format, scale rule, block and variant."""

SPECS = [
    "e4m3/tensor",
    "e5m2/tensor",
    "e4m3/tensor+delayed",
    "e4m3/row",
    "e4m3/row+exact",
    "e4m3/1x128",
    "e4m3/128x128",
    "mxfp8",
    "mxfp8+floor",
    "mxfp8/e5m2",
    "mxfp8/e5m2+floor",
    "mxfp8/32x32",
    "mxfp4",
    "mxfp4+floor",
    "nvfp4",
    "nvfp4/16x16",
    "nvfp4+up",
    "nvfp4+pow2",
    "nvfp4/16x16+pow2",
]
